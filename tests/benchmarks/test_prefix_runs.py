"""`benchmarks/prefix_runs.py`: runs that differ in their results are not compared in speed."""

import importlib
from pathlib import Path
from types import ModuleType

import pytest
from datasets import Dataset
from helpers.tiny import tiny_model, tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer

FOLDER = Path(__file__).parents[2] / "benchmarks"


@pytest.fixture
def prefix_runs(monkeypatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(FOLDER))
    return importlib.import_module("prefix_runs")


def turn(module: ModuleType, **changes: dict) -> dict:
    """Return results of all runs on two steps of 6 trained tokens, with `changes` by run."""
    same = {"losses": [4.0, 1.0], "norms": [2.0, 2.0], "trained": [2, 4], "reason": None}
    return {run: same | changes.get(run, {}) for run in module.RUNS}


def test_runs_in_other_steps_pass_if_their_epoch_has_the_same_loss(prefix_runs):
    other = {"losses": [1.0, 3.0], "norms": [1.0, 3.0], "trained": [3, 3]}
    prefix_runs.check("tools", turn(prefix_runs, group=other))


@pytest.mark.parametrize(
    ("run", "change", "message"),
    [
        ("bin", {"losses": [3.0, 1.5]}, "losses of a step differ: 4.0 apart, 3.0 shared"),
        ("bin", {"norms": [2.0, 2.1]}, "norms of a step differ: 2.0 apart, 2.1 shared"),
        ("group", {"losses": [4.0, 1.001]}, r"tools, group: loss 2\.0006"),
        ("TRL, packed", {"trained": [2, 3]}, "tools, TRL, packed trained 5 tokens, not 6"),
        ("bin", {"reason": "a balance"}, "tools, bin did not share: a balance"),
    ],
)
def test_other_results_stop_the_benchmark(prefix_runs, run, change, message):
    with pytest.raises(SystemExit, match=message):
        prefix_runs.check("tools", turn(prefix_runs, **{run: change}))


def test_a_measured_run_still_shares(prefix_runs, tmp_path):
    rows = [{"input_ids": [*range(3, 43), end], "labels": [-100] * 40 + [end]} for end in (4, 5)]
    args = PackedSFTConfig(
        str(tmp_path),
        max_length=128,
        prefix_sharing="bin",
        max_steps=1,
        report_to="none",
        bf16=False,
    )
    trainer = PackedSFTTrainer(
        tiny_model(), args, train_dataset=Dataset.from_list(rows), processing_class=tiny_tokenizer()
    )
    steps = prefix_runs.watch(trainer)
    trainer.train()
    assert (len(steps["began"]), steps["trained"], steps["computed"]) == (1, [2], [43])
    assert trainer._isolation.sharing.reason is None
