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
from helpers.tiny import save_tiny_model
from IPython.core.inputtransformer2 import TransformerManager
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
def test_the_stored_outputs_are_those_of_the_stored_code(path):
    notebook = read(path)
    nbformat.validate(notebook)
    assert notebook.metadata["executed"]["code"] == execute.hash_of(notebook), (
        f"run `python notebooks/execute.py notebooks/{path.name}`, and commit what it stores"
    )
    cells = code(notebook)
    assert [cell.execution_count for cell in cells] == list(range(1, len(cells) + 1))
    cells[-1].source += " "
    assert notebook.metadata["executed"]["code"] != execute.hash_of(notebook), "the hash is blind"


@every_notebook
def test_stored_outputs_are_small_and_name_no_folder_of_a_machine(path):
    notebook = read(path)
    assert path.stat().st_size < 80_000
    outputs = [output for cell in code(notebook) for output in cell.outputs]
    kinds = {"stream", "display_data", "execute_result"}
    assert {output.output_type for output in outputs} <= kinds
    assert all(output.name == "stdout" for output in outputs if output.output_type == "stream")
    assert not re.search(r"/(home|root|tmp|work|Users)/", json.dumps(outputs))
    assert all(cell.metadata == {} for cell in notebook.cells)
    # Editors invent new ids and format JSON differently; both would show in every diff.
    assert all(re.fullmatch(r"[a-z-]+", cell.id) for cell in notebook.cells)
    names = {"accelerator", "colab", "executed", "kernelspec", "language_info"}
    assert set(notebook.metadata) == names
    assert path.read_text() == nbformat.writes(notebook) + "\n"


# --- the first cell ---------------------------------------------------------------------------


def installs(path: Path, monkeypatch, *, found: bool) -> list[str]:
    """Run the first code cell with or without trl_packing; return the install commands."""
    lines: list[str] = []
    names: dict[str, Any] = {}

    class Shell:
        def run_line_magic(self, name: str, line: str) -> None:
            lines.append(f"{name} {line.format(**names)}")

    monkeypatch.setattr("importlib.util.find_spec", lambda name: object() if found else None)
    source = TransformerManager().transform_cell(code(read(path))[0].source)
    names["get_ipython"] = Shell
    exec(source, names)
    return lines


@every_notebook
def test_the_first_cell_installs_only_where_nothing_is_installed(path, monkeypatch, capsys):
    monkeypatch.chdir(REPOSITORY / "notebooks")
    assert installs(path, monkeypatch, found=True) == []
    assert installs(path, monkeypatch, found=False) == ['pip install "..[peft]"'], "this checkout"
    assert "Installing ..[peft]" in capsys.readouterr().out


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


@pytest.mark.slow
def test_model_and_data_can_be_named(tmp_path):
    rows = [{"question": f"What is {i} + 1?", "answer": f"#### {i + 1}"} for i in range(200)]
    (tmp_path / "rows.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    model = save_tiny_model(tmp_path, "llama")
    printed = run(
        read(SWAP), tmp_path, TRL_PACKING_MODEL=model, TRL_PACKING_DATA=str(tmp_path / "rows.jsonl")
    )
    assert f"model:  {Path(model).name}" in printed
    assert "80 rows to train on, 20 held out" in printed
    assert "documents    80 " in printed
