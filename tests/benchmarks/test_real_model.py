"""`benchmarks/real_model.py` compares runs only if they trained the same documents alike."""

import importlib
from pathlib import Path

import pytest


def test_other_losses_or_documents_stop_the_benchmark(monkeypatch):
    monkeypatch.syspath_prepend(str(Path(__file__).parents[2] / "benchmarks"))
    module = importlib.import_module("real_model")

    def turn(**changes):
        """Return results of the three runs on two documents of 5 tokens, with `changes` by run."""
        same = {"seconds": 2.0, "cpu_seconds": 3.0, "gib": 1.5, "losses": [4.0]}
        counts = {"documents": [2], "tokens": [10], "computed": [12]}
        return {run: same | counts | changes.get(run, {}) for run in module.RUNS}

    module.check(turn(), documents=2)
    with pytest.raises(SystemExit, match=r"4\.0 padded, 4\.001 here"):
        module.check(turn(**{module.OURS: {"losses": [4.001]}}), documents=2)
    with pytest.raises(SystemExit, match=r"trl_packing trained \(2, 9\)"):
        module.check(turn(**{module.OURS: {"tokens": [9]}}), documents=2)
