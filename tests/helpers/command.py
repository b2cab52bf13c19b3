"""The command `trl-packing`: the function that pyproject.toml names, called in this process."""

import tomllib
from importlib.metadata import EntryPoint

from helpers.repository import ROOT

_SCRIPTS = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["scripts"]
#: Takes the words behind the command's name, and returns its exit status.
run_command = EntryPoint("trl-packing", _SCRIPTS["trl-packing"], "console_scripts").load()
