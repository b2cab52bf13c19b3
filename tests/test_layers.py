"""Imports point one way: a folder may import only the folders above it in this table.

A new folder adds its row here first. `python docs/pictures/draw.py` draws the table for
docs/architecture.md.
"""

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import trl_packing

PACKAGE = Path(__file__).parent.parent / "trl_packing"

# folder or module -> (those of ours that it imports, packages that it imports at the top of files)
TABLE: dict[str, tuple[str, str]] = {
    "versions": ("", "packaging"),
    "documents": ("", "datasets numpy pyarrow torch"),
    "attention": ("documents", "numpy torch transformers"),
    "packing": ("attention documents", "numpy pyarrow torch transformers"),
    "config": ("documents packing", "numpy torch transformers trl"),
    "loss": ("attention documents", "accelerate datasets numpy pyarrow torch trl"),
    "data": (
        "attention config documents packing",
        "accelerate datasets jinja2 numpy pyarrow torch transformers trl",
    ),
    "isolation": ("attention data documents loss packing", "accelerate datasets numpy torch"),
    "vision": (
        "attention data documents isolation packing",
        "datasets numpy packaging pyarrow torch transformers trl",
    ),
    "pages": ("data documents packing versions vision", "datasets jinja2 markupsafe numpy"),
    "run": (
        "attention config data documents isolation loss packing pages vision",
        "accelerate datasets numpy torch transformers trl",
    ),
    "training": (
        "attention config data documents isolation loss packing pages run",
        "accelerate datasets numpy safetensors torch transformers trl",
    ),
    "plain_trainer": (
        "attention config data documents isolation loss packing versions",
        "datasets numpy torch transformers",
    ),
    "trainer": (
        "attention data documents loss pages run training versions",
        "accelerate datasets torch transformers trl",
    ),
    "tools": (
        "attention config data documents isolation packing pages run trainer versions vision",
        "datasets numpy torch transformers trl",
    ),
    "cli": ("data pages run tools", ""),
}

# Types of what pages are given: mypy reads these imports, and no run does.
TYPES = {"pages": {"run", "tools"}}


def files_of(room: str) -> list[Path]:
    """Return the files of a folder, or the one file of a module."""
    folder = PACKAGE / room
    return sorted(folder.rglob("*.py")) if folder.is_dir() else [folder.with_suffix(".py")]


def rooms() -> set[str]:
    files = [p.relative_to(PACKAGE) for p in PACKAGE.rglob("*.py")]
    return {p.parts[0].removesuffix(".py") for p in files} - {"__init__", "recipes"}


def imports_of(path: Path) -> tuple[set[str], set[str]]:
    """Return modules of ours imported anywhere in the file, and packages imported at its top."""
    tree = ast.parse(path.read_text())
    ours, third_party = set(), set()
    types = [n for n in tree.body if isinstance(n, ast.If) and "TYPE_CHECKING" in ast.dump(n.test)]
    if path.parent.name in TYPES:
        for block in types:
            tree.body.remove(block)
            named = {node.module.split(".")[1] for node in block.body}
            assert named <= TYPES[path.parent.name]
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom):
            names = [node.module or ""]
            if node.module == "trl_packing":
                names = [f"trl_packing.{alias.name}" for alias in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        else:
            continue
        for name in names:
            root = name.split(".")[0]
            if root == "trl_packing":
                ours.add(name.removeprefix("trl_packing").removeprefix("."))
            elif node in tree.body and root not in sys.stdlib_module_names:
                third_party.add(root)
    return ours - {"", "lazy_names"}, third_party


def test_every_folder_has_its_row_and_every_row_its_folder():
    assert rooms() == set(TABLE)


@pytest.mark.parametrize("room", TABLE)
def test_folder_imports_exactly_what_its_row_says(room):
    ours, third_party = set(), set()
    for path in files_of(room):
        found = imports_of(path)
        ours |= {name.split(".")[0] for name in found[0]} - {room}
        third_party |= found[1]
    assert (ours, third_party) == tuple(set(names.split()) for names in TABLE[room])


@pytest.mark.parametrize("room", TABLE)
def test_rows_name_only_folders_above_them(room):
    order = list(TABLE)
    assert all(order.index(other) < order.index(room) for other in TABLE[room][0].split())


def test_importing_the_package_and_packing_needs_neither_torch_nor_trl():
    code = (
        "import sys, trl_packing\n"
        "assert len(trl_packing.pack([3, 2, 1], 4)) == 2\n"
        "heavy = {'torch', 'trl', 'transformers', 'datasets'} & set(sys.modules)\n"
        "sys.exit(f'imported {heavy}' if heavy else 0)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)


def test_every_public_name_can_be_imported():
    assert all(getattr(trl_packing, name) is not None for name in trl_packing.__all__)
    assert set(trl_packing.__all__) == set(trl_packing._HOME)


def test_a_public_name_can_be_imported_from_its_folder():
    from trl_packing.attention import resolve_attention
    from trl_packing.documents.boundaries import cu_seqlens_from_lengths
    from trl_packing.isolation import check_isolation
    from trl_packing.packing import pack
    from trl_packing.plain_trainer import PackedDataset, enable_packing

    found = {resolve_attention, cu_seqlens_from_lengths, check_isolation, pack}
    for thing in found | {PackedDataset, enable_packing}:
        assert thing is getattr(trl_packing, thing.__name__)
