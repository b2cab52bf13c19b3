"""Metadata agrees: addresses, versions, PEP 723 headers, and the files for GitHub."""

import ast
import re
import tomllib

import pytest
import yaml
from helpers.repository import ROOT, files_of_repository
from packaging.requirements import Requirement

import trl_packing

PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
REPOSITORY = PROJECT["urls"]["Repository"]
RECIPES = [p for p in sorted((ROOT / "recipes").glob("*.py")) if "__main__" in p.read_text()]

# The same project under another account, or its pages.
ADDRESS = re.compile(r"(?:github\.com/([\w-]+)/|([\w-]+)\.github\.io/)trl_packing\b")


def tracked_texts() -> dict[str, str]:
    names = [n for n in files_of_repository() if not n.endswith((".png", ".svg"))]
    return {name: (ROOT / name).read_text(encoding="utf-8", errors="ignore") for name in names}


def accounts_in(text: str) -> set[str]:
    return {first or second for first, second in ADDRESS.findall(text)}


def test_every_address_of_the_project_names_one_account():
    (account,) = accounts_in(REPOSITORY)
    found = {name: accounts_in(text) for name, text in tracked_texts().items()}
    found.pop("tests/test_metadata.py", None)
    others = {name: accounts for name, accounts in found.items() if accounts - {account}}
    assert others == {}
    assert sum(map(bool, found.values())) > 10, "the test finds no addresses"


def test_versions_agree():
    citation = yaml.safe_load((ROOT / "CITATION.cff").read_text())
    assert trl_packing.__version__ == PROJECT["version"] == str(citation["version"])
    assert citation["license"] == PROJECT["license"]
    assert citation["repository-code"] == REPOSITORY
    assert {"title", "authors", "message", "cff-version"} <= citation.keys()


# --- PEP 723 --------------------------------------------------------------------------------------


def header_of(text: str) -> dict:
    """Return the metadata of a script, by the regular expression of PEP 723."""
    block = r"(?m)^# /// (?P<type>[a-zA-Z0-9-]+)$\s(?P<content>(^#(| .*)$\s)+)^# ///$"
    (found,) = [m for m in re.finditer(block, text) if m["type"] == "script"]
    lines = found["content"].splitlines()
    return tomllib.loads("\n".join(line.removeprefix("#").removeprefix(" ") for line in lines))


@pytest.mark.parametrize("path", RECIPES, ids=lambda p: p.stem)
def test_the_header_of_a_recipe_installs_this_package(path):
    header = header_of(path.read_text())
    assert header["requires-python"] == PROJECT["requires-python"]
    (requirement,) = map(Requirement, header["dependencies"])
    assert requirement.name == PROJECT["name"]
    assert requirement.url == f"git+{REPOSITORY}"
    assert requirement.extras <= PROJECT["optional-dependencies"].keys()
    assert ast.get_docstring(ast.parse(path.read_text())), "the header hides the docstring"
