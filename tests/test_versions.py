"""The promised, the tested and the documented versions agree."""

import logging
import re
import tomllib
from pathlib import Path

from packaging.requirements import Requirement
from packaging.version import Version

from trl_packing import versions

ROOT = Path(__file__).parent.parent


def pins(name: str) -> dict[str, str]:
    lines = (ROOT / name).read_text().splitlines()
    # A pin of newer Pythons only is not the oldest.
    pinned = [line for line in lines if "==" in line and line[0] != "#" and '>= "3' not in line]
    return dict(line.partition(";")[0].split("==") for line in pinned)


def test_the_table_of_tested_versions_is_that_of_the_constraints():
    oldest, newest = pins("constraints-oldest.txt"), pins("constraints.txt")
    assert {name: (oldest[name], newest[name]) for name in versions.TESTED} == versions.TESTED


def test_the_lowest_version_that_is_promised_is_tested():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    lines = [*project["dependencies"], *project["optional-dependencies"]["peft"]]
    promised = {r.name: r.specifier for r in map(Requirement, lines)}
    for name in promised.keys() - {"torch"}:
        floor = next(Version(s.version) for s in promised[name] if s.operator == ">=")
        tested = Version(pins("constraints-oldest.txt")[name])
        assert tested.release[:2] == floor.release[:2], name


def test_the_docs_name_the_tested_versions():
    text = (ROOT / "docs/releasing.md").read_text()
    for name, (oldest, newest) in versions.TESTED.items():
        assert re.search(rf"\| {name} +\| {re.escape(oldest)} +\| {re.escape(newest)} +\|", text)


def test_a_version_outside_of_the_tested_ones_is_named_once(caplog, monkeypatch):
    tested = {name: newest for name, (_, newest) in versions.TESTED.items()}
    for installed, named in (
        ({}, ""),
        ({"transformers": "5.24.7", "accelerate": "1.12.1"}, ""),  # patch releases
        ({"trl": "1.17.0"}, "trl 1.17.0 (tested: "),
        ({"datasets": "4.0.0"}, "datasets 4.0.0 (tested: "),
    ):
        monkeypatch.setattr(versions, "installed_version", (tested | installed).get)
        versions.warn_of_untested_versions.cache_clear()
        caplog.clear()
        with caplog.at_level(logging.WARNING, "trl_packing.versions"):
            versions.warn_of_untested_versions()
            versions.warn_of_untested_versions()
        assert len(caplog.records) == bool(named)
        assert named in caplog.text
