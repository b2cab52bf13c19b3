"""Every name of another library on which this package leans is where it was read.

A failure here names the seam that a new release has moved: read its new source, then change the
package and the table in `tests/seams.py` together.
"""

import ast
import inspect
import re
from importlib import import_module
from pathlib import Path
from types import FunctionType

import pytest
import transformers
from seams import ATTRIBUTES, CACHED, FORWARDS, FUNCTIONS, METHODS, NAMES
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer
from trl_packing.attention.calls import CACHES

PACKAGE = Path(__file__).parent.parent / "trl_packing"
LIBRARIES = {"accelerate", "datasets", "peft", "transformers", "trl"}

# Private names that are no library's: Python's, and PyTorch's documented or decades-old ones.
PLAIN = {"_buffers", "_replace", "_version"}


def look_up(path: str) -> object:
    """Return the object at a dotted path, which may pass through classes."""
    parts = path.split(".")
    for at in range(len(parts), 0, -1):
        try:
            found: object = import_module(".".join(parts[:at]))
        except ImportError:
            continue
        for name in parts[at:]:
            found = getattr(found, name)
        return found
    raise ImportError(path)


def parameters(function: object) -> str:
    return ", ".join(inspect.signature(function).parameters)


def moved(path: str, expected: str | None) -> str | None:
    """Return what is wrong with a callable seam, or None."""
    try:
        found = look_up(path)
    except (ImportError, AttributeError):
        return f"{path} is gone"
    if expected is None or parameters(found) == expected:
        return None
    return f"{path} takes ({parameters(found)}), and was read with ({expected})"


def sets(owner: type, name: str) -> bool:
    """Whether a class or its bases have the attribute, or assign it to `self` somewhere."""
    return hasattr(owner, name) or any(
        f"self.{name} =" in source or f"self.{name}:" in source
        for base in owner.__mro__
        if base is not object and (source := inspect.getsource(base))
    )


CALLABLES = {f"trl.SFTTrainer.{name}": takes for name, takes in METHODS.items()} | FUNCTIONS


@pytest.mark.parametrize("path", [*CALLABLES, *NAMES])
def test_what_is_overridden_called_or_imported_is_where_and_as_it_was_read(path):
    problem = moved(path, CALLABLES.get(path))
    assert problem is None, problem


@pytest.mark.parametrize("name", ATTRIBUTES)
def test_an_attribute_that_is_read_is_still_set(name):
    owner = look_up(ATTRIBUTES[name])
    assert sets(owner, name), f"{ATTRIBUTES[name]} no longer has {name}"


@pytest.mark.parametrize("path", FORWARDS)
def test_a_call_of_a_model_has_the_names_by_which_it_is_read(path):
    found = look_up(path)
    names = inspect.signature(found).parameters if inspect.isfunction(found) else vars(found)
    taken = names.get("__annotations__", names)
    assert [name for name in FORWARDS[path].split() if name not in taken] == []


@pytest.mark.parametrize("model", CACHED)
def test_the_name_of_a_cache_is_known(model):
    taken = inspect.signature(getattr(transformers, model).forward).parameters
    found = [x for x in taken if re.search("cache|past|mems|state$", x) and "use_" not in x]
    assert len(found) == 1
    assert found[0] in CACHES, f"{model} takes its cache as {found[0]}"


# --- the table is complete ------------------------------------------------------------------------


def overridden_methods(cls: type) -> set[str]:
    return {
        name
        for name, value in vars(cls).items()
        if isinstance(value, FunctionType) and hasattr(SFTTrainer, name) and name != "__init__"
    }


def modules() -> list[ast.Module]:
    return [ast.parse(path.read_text()) for path in PACKAGE.rglob("*.py")]


def inner_imports() -> set[str]:
    """Return names imported from a module inside a library, or private ones."""
    return {
        f"{node.module}.{alias.name}"
        for tree in modules()
        for node in ast.walk(tree)
        if isinstance(node, ast.ImportFrom) and node.module
        if node.module.split(".")[0] in LIBRARIES
        for alias in node.names
        if "." in node.module or alias.name.startswith("_")
    }


def foreign_private_attributes() -> set[str]:
    """Return private attributes that are read, and that nothing of ours defines or assigns."""
    read, ours = set(), set()
    for tree in modules():
        for node in ast.walk(tree):
            if isinstance(node, ast.FunctionDef | ast.ClassDef):
                ours.add(node.name)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                ours.add(node.id)
            elif isinstance(node, ast.Attribute):
                (ours if isinstance(node.ctx, ast.Store) else read).add(node.attr)
    return {name for name in read - ours if name.startswith("_") and not name.startswith("__")}


def test_every_overridden_method_is_in_the_table():
    assert overridden_methods(PackedSFTTrainer) == set(METHODS)


def test_one_class_is_between_the_trainer_of_trl_and_a_users():
    assert PackedSFTTrainer.__bases__ == (SFTTrainer,)


def test_every_import_from_inside_a_library_is_in_the_table():
    assert inner_imports() <= {*FUNCTIONS, *NAMES}


def test_every_private_attribute_of_others_is_in_the_table():
    imported = {path.rpartition(".")[2] for path in (*FUNCTIONS, *NAMES)}
    assert foreign_private_attributes() <= {*ATTRIBUTES, *METHODS, *PLAIN, *imported}


def test_every_row_of_the_table_is_used():
    source = "".join(path.read_text() for path in PACKAGE.rglob("*.py"))
    last = [path.rpartition(".")[2] for path in (*METHODS, *FUNCTIONS, *NAMES, *ATTRIBUTES)]
    assert [name for name in last if name not in source] == []
