"""The command `trl-packing`: the function that pyproject.toml names, called in this process."""

import tomllib
from importlib.metadata import EntryPoint
from typing import Any

from helpers.repository import ROOT

_SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
#: Takes the words behind the command's name, and returns its exit status.
run_command = EntryPoint("trl-packing", _SCRIPTS["trl-packing"], "console_scripts").load()


def says(capsys: Any, *words: str, status: int = 0) -> str:
    """Run the command, and return what it prints: of status 2 its errors, else its output."""
    capsys.readouterr()
    assert run_command([*words]) == status
    out, err = capsys.readouterr()
    return err if status == 2 else out
