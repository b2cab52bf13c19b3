"""Metadata agrees: addresses, versions, and the packages that are imported."""

import ast
import re
import sys
import tomllib

import pytest
import yaml
from helpers.repository import ROOT, files_of_repository
from packaging.requirements import Requirement

import trl_packing

PYPROJECT = (ROOT / "pyproject.toml").read_text()
PROJECT = tomllib.loads(PYPROJECT)["project"]

# The same project under another account, or its pages.
ADDRESS = re.compile(r"(?:github\.com/([\w-]+)/|([\w-]+)\.github\.io/)trl_packing\b")
FROM_INDEX = re.compile(r"pip install (?:[\"'\\]*)trl[-_]packing")


def tracked_texts() -> dict[str, str]:
    names = [n for n in files_of_repository() if not n.endswith((".png", ".svg"))]
    names.remove("tests/test_metadata.py")
    return {name: (ROOT / name).read_text(encoding="utf-8", errors="ignore") for name in names}


def accounts_in(text: str) -> set[str]:
    return {first or second for first, second in ADDRESS.findall(text)}


def test_every_address_is_that_of_pyproject_and_before_a_release_there_is_none():
    found = {name: accounts_in(text) for name, text in tracked_texts().items()}
    others = {name: accounts - accounts_in(PYPROJECT) for name, accounts in found.items()}
    assert {name: accounts for name, accounts in others.items() if accounts} == {}
    assert accounts_in("git+https://github.com/A/trl_packing B.github.io/trl_packing") == {"A", "B"}


@pytest.mark.skipif("urls" in PROJECT, reason="it is released")
def test_nobody_is_told_to_install_what_is_not_released():
    told = {name: FROM_INDEX.findall(text) for name, text in tracked_texts().items()}
    assert {name: lines for name, lines in told.items() if lines} == {}
    assert FROM_INDEX.search("pip install 'trl-packing[vision]'"), "the search is blind"


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert trl_packing.__version__ == PROJECT["version"] == str(citation["version"])
    assert citation["license"] == PROJECT["license"]
    assert {"title", "authors", "message", "cff-version"} <= citation.keys()


# --- imports --------------------------------------------------------------------------------------

# The module of a distribution, where it has another name.
MODULES = {"pillow": "PIL", "pyyaml": "yaml"}
EXTRAS = PROJECT["optional-dependencies"]


def modules_of(requirements: list[str]) -> set[str]:
    names = [Requirement(line).name for line in requirements]
    return {MODULES.get(name, name.replace("-", "_")) for name in names}


def imported_in(source: str) -> set[str]:
    """Return the packages that a source imports, anywhere in it."""
    names = []
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Import):
            names += [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            names.append(node.module)
    return {name.split(".")[0] for name in names} - {"trl_packing", *sys.stdlib_module_names}


def test_what_is_imported_is_declared_and_what_is_declared_is_imported():
    files = [n for n in files_of_repository("trl_packing", "recipes") if n.endswith(".py")]
    imported = set().union(*(imported_in((ROOT / name).read_text()) for name in files))
    required = modules_of(PROJECT["dependencies"])
    optional = modules_of([*EXTRAS["peft"], *EXTRAS["vision"], *EXTRAS["deepspeed"]])
    assert imported - optional == required
    required.discard("pyarrow")
    assert imported - optional - required == {"pyarrow"}, "the comparison is blind"
    assert imported_in("def f():\n    import a.b\n    from c.d import e") == {"a", "c"}
