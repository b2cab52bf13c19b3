"""`benchmarks/prefix_runs.py`: runs that differ in their results are not compared in speed."""

import importlib
from pathlib import Path

import pytest

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def prefix_runs(monkeypatch):
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prefix_runs")


@pytest.mark.parametrize(
    ("run", "change", "message"),
    [
        ("group", {"losses": [1.0, 3.0], "norms": [1.0, 3.0], "trained": [3, 3]}, None),
        ("bin", {"losses": [3.0, 1.5]}, "losses of a step differ: 4.0 apart, 3.0 shared"),
        ("group", {"losses": [4.0, 1.001]}, r"tools, group: loss 2\.0006"),
        ("TRL, packed", {"trained": [2, 3]}, "tools, TRL, packed trained 5 tokens, not 6"),
    ],
)
def test_other_results_stop_the_benchmark(prefix_runs, run, change, message):
    """Runs in other steps pass if their epoch has the same loss."""
    same = {"losses": [4.0, 1.0], "norms": [2.0, 2.0], "trained": [2, 4], "reason": None}
    found = {name: same | (change if name == run else {}) for name in prefix_runs.RUNS}
    if message is None:
        prefix_runs.check("tools", found)
        return
    with pytest.raises(SystemExit, match=message):
        prefix_runs.check("tools", found)
