"""`benchmarks/prefix_runs.py`: runs that differ in their results are not compared in speed."""

import importlib
from pathlib import Path

import pytest

OTHER_RESULTS = [
    ("bin", {"losses": [3.0, 1.5]}, "losses of a step differ: 4.0 apart, 3.0 shared"),
    ("group", {"losses": [4.0, 1.001]}, r"tools, group: loss 2\.0006"),
    ("TRL, packed", {"trained": [2, 3]}, "tools, TRL, packed trained 5 tokens, not 6"),
]


@pytest.mark.parametrize(("run", "change", "message"), OTHER_RESULTS)
def test_other_results_stop_the_benchmark(run, change, message, monkeypatch):
    """Runs in other steps pass if their epoch has the same loss."""
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    prefix_runs = importlib.import_module("prefix_runs")
    same = {"losses": [4.0, 1.0], "norms": [2.0, 2.0], "trained": [2, 4], "reason": None}
    found = dict.fromkeys(prefix_runs.RUNS, same)
    found["group"] = same | {"losses": [1.0, 3.0], "norms": [1.0, 3.0], "trained": [3, 3]}
    prefix_runs.check("tools", found)
    with pytest.raises(SystemExit, match=message):
        prefix_runs.check("tools", found | {run: same | change})
