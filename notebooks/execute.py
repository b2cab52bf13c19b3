"""Run the notebooks offline and store their outputs, which GitHub and the documentation show.

    python notebooks/execute.py                          all of them, two minutes on a CPU
    python notebooks/execute.py notebooks/3_*.ipynb      some of them

The stored outputs are those of the stored code: its hash is in the metadata, which
tests/test_notebooks.py compares. Progress bars and warnings (stderr) are not stored.
"""

import hashlib
import os
import sys
import tempfile
from importlib.metadata import version
from pathlib import Path
from typing import Any

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode
from traitlets.config import Config

FOLDER = Path(__file__).resolve().parent
NOWHERE = "http://127.0.0.1:9"
OFFLINE = {"HF_HUB_OFFLINE": "1", "HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE}
PACKAGES = ("torch", "transformers", "trl")
NOISE = "real_accelerator.py"  # a warning that deepspeed prints to stdout where it is installed


def run(notebook: NotebookNode, folder: Path, **environment: str) -> None:
    """Run all cells in `folder` without a network, on this checkout, whatever is installed."""
    with tempfile.TemporaryDirectory() as sockets:
        # Not by ports: one that is free now may be taken when the kernel opens it.
        kernel = {"transport": "ipc", "connection_file": f"{sockets}/kernel.json"}
        client = NotebookClient(
            notebook,
            timeout=3600,
            startup_timeout=300,
            kernel_name="python3",
            resources={"metadata": {"path": str(folder)}},
            config=Config({"KernelManager": kernel}),
        )
        paths = {"PYTHONPATH": str(FOLDER.parent)}
        client.execute(env={**os.environ, **OFFLINE, **paths, **environment})


def hash_of(notebook: NotebookNode) -> str:
    """Return the hash of the code of a notebook."""
    code = [cell.source for cell in notebook.cells if cell.cell_type == "code"]
    return hashlib.sha256("\0".join(code).encode()).hexdigest()[:16]


def clean(notebook: NotebookNode) -> None:
    """Keep the outputs that a reader looks at, and what they were made by."""
    for cell in notebook.cells:
        cell.metadata = {}
        if cell.cell_type == "code":
            cell.outputs = [kept for output in cell.outputs if (kept := _cleaned(output))]
    versions = {name: version(name).partition("+")[0] for name in PACKAGES}
    notebook.metadata["executed"] = {"code": hash_of(notebook), "versions": versions}
    notebook.metadata["language_info"] = {"name": "python"}


def _cleaned(output: Any) -> Any:
    if output.output_type != "stream":
        shown = output.get("data", {}).get("text/html", "")
        if "<progress" in shown and "<table" not in shown:
            return None
        output.metadata = {}
        return output
    if output.name == "stderr":
        return None
    output.text = "".join(line for line in output.text.splitlines(True) if NOISE not in line)
    return output if output.text.strip() else None


def main() -> None:
    """Run the notebooks that are named, by default all."""
    chosen = [Path(name) for name in sys.argv[1:]] or sorted(FOLDER.glob("*.ipynb"))
    for path in chosen:
        notebook = nbformat.read(path, as_version=4)
        with tempfile.TemporaryDirectory() as folder:
            run(notebook, Path(folder), COLUMNS="96")
        clean(notebook)
        path.write_text(nbformat.writes(notebook) + "\n")
        print(f"{path.name}: {path.stat().st_size / 1e3:,.0f} kB")


if __name__ == "__main__":
    main()
