"""The notebooks run top to bottom without a network, and are stored with the outputs of their code.

After working on one: python notebooks/execute.py notebooks/NAME.ipynb
"""

import importlib.util
import json
import re
from pathlib import Path
from typing import Any

import nbformat
import pytest
from nbformat import NotebookNode

REPOSITORY = Path(__file__).parents[1]
NOTEBOOKS = sorted((REPOSITORY / "notebooks").glob("*.ipynb"))
ANATOMY, SWAP, PROOF = NOTEBOOKS


spec = importlib.util.spec_from_file_location("execute", REPOSITORY / "notebooks" / "execute.py")
execute = importlib.util.module_from_spec(spec)
spec.loader.exec_module(execute)

every_notebook = pytest.mark.parametrize("path", NOTEBOOKS, ids=lambda path: path.stem)


def code(notebook: NotebookNode) -> list[NotebookNode]:
    return [cell for cell in notebook.cells if cell.cell_type == "code"]


def read(path: Path) -> NotebookNode:
    return nbformat.read(path, as_version=4)


# --- as they are stored -------------------------------------------------------------------------


@every_notebook
def test_stored_outputs_are_those_of_the_stored_code_and_name_no_folder_of_a_machine(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata["executed"]["code"] == execute.hash_of(notebook), (
        f"run `python notebooks/execute.py notebooks/{path.name}`, and commit what it stores"
    )
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    cells[-1].source += " "
    assert notebook.metadata["executed"]["code"] != execute.hash_of(notebook), "the hash is blind"
    assert path.stat().st_size < 80_000
    outputs = [output for cell in cells for output in cell.outputs]
    assert all(output.output_type != "error" for output in outputs)
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))


# --- run ----------------------------------------------------------------------------------------


def run(notebook: NotebookNode, folder: Path, **environment: str) -> str:
    """Run all cells in `folder` without a network, and return their output."""
    execute.run(notebook, folder, **environment)
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    return "".join(output.get("text", "") for output in outputs)


def size(outputs: list[dict[str, Any]]) -> int:
    return len(json.dumps([o for o in outputs if set(o.get("data", {})) <= {"text/plain"}]))


@pytest.mark.slow
@every_notebook
def test_a_notebook_runs_top_to_bottom_offline(path, tmp_path):
    notebook = read(path)
    printed = run(notebook, tmp_path)
    execute.clean(notebook)
    assert all(size(cell.outputs) < 5_000 for cell in code(notebook)), "outputs stay small"
    expected = {
        ANATOMY: ["Here it is: "],
        SWAP: ["step   SFTTrainer   PackedSFTTrainer", "checked      isolated: "],
        PROOF: ["packed, boundaries lost (control)", "padded batches compute 2.82 times"],
    }
    assert [words for words in expected[path] if words not in printed] == []
    if path != SWAP:  # its outputs are those of SmolLM2 and GSM8K
        assert counts(read(path)) == counts(notebook), "counts are the same on every machine"


def counts(notebook: NotebookNode) -> list[str]:
    """Return the printed lines that no rounding and no clock changes."""
    text = "".join(output.get("text", "") for cell in code(notebook) for output in cell.outputs)
    words = ("tokens ", "packed into", "an epoch", "seq_lengths", "cu_seqlens", "position_ids")
    return [line for line in text.splitlines() if line.startswith(words)]
