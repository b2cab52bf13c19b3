"""A resumed run continues with exactly the batches that the uninterrupted run would have used."""

import shutil
from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path
from unittest import mock

import pytest
import torch
from accelerate import skip_first_batches
from datasets import Dataset
from harness import make_trainer
from helpers.combinations import fast
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.tiny import documents_of_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.training import sampling
from trl_packing.training.resuming import FILE

LENGTHS = [3 + (i * 7) % 29 for i in range(60)]
EPOCHS = 3

MODES = {
    "packed": {"batch_size": 2, "accumulation": 2, "model": "gpt2_dropout"},
    "unpacked": {"packing": False, "batch_size": 3, "accumulation": 2},
    "stream": {"stream": True, "shards": 4, "workers": 1, "batch_size": 2, "max_steps": 18},
    "workers": {"batch_size": 2, "accumulation": 2, "workers": 1},
}


def checkpoint_within_epoch(folder: Path, steps: int, epoch: int) -> str:
    """Return the first checkpoint strictly inside `epoch` of a run of `EPOCHS` epochs."""
    per_epoch = steps / EPOCHS
    saved = sorted(int(path.name.split("-")[1]) for path in folder.glob("checkpoint-*"))
    inside = [step for step in saved if epoch * per_epoch < step < (epoch + 1) * per_epoch]
    return str(folder / f"checkpoint-{inside[0]}")


def assert_continues(resumed, uninterrupted):
    """The same batches to the end, and the same parameters to the last bit."""
    count = len(resumed["batches"])
    assert 0 < count < len(uninterrupted["batches"])
    assert resumed["batches"] == uninterrupted["batches"][-count:]
    assert resumed["steps"] == uninterrupted["steps"]
    for name, parameter in uninterrupted["parameters"].items():
        assert torch.equal(resumed["parameters"][name], parameter), name


@pytest.mark.parametrize("mode", fast(MODES, ("unpacked", "stream")))
def test_one_rank_resumes_within_an_epoch(mode, tmp_path):
    arguments = {"epochs": EPOCHS, "save_steps": 2, **MODES[mode]}
    whole = run(Scenario(str(tmp_path), LENGTHS, **arguments))
    checkpoint = checkpoint_within_epoch(tmp_path, whole["steps"], 1)
    assert_continues(run(Scenario(str(tmp_path), LENGTHS, resume=checkpoint, **arguments)), whole)


def test_resuming_from_another_step_fails_the_same_comparison(tmp_path):
    """Control: batches of another order are not taken for the right ones."""
    arguments = {"epochs": EPOCHS, "save_steps": 2, **MODES["packed"]}
    whole = run(Scenario(str(tmp_path), LENGTHS, **arguments))
    checkpoint = checkpoint_within_epoch(tmp_path, whole["steps"], 1)
    (Path(checkpoint) / "epoch.npz").unlink()  # which would refuse another seed
    resumed = run(
        Scenario(str(tmp_path), LENGTHS, resume=checkpoint, options={"data_seed": 7}, **arguments)
    )
    with pytest.raises(AssertionError):
        assert_continues(resumed, whole)


def test_a_stream_begins_anew_or_needs_its_position(tmp_path):
    """A checkpoint of an earlier version, or one that was killed half written, has none."""
    arguments = {"epochs": EPOCHS, "save_steps": 2, **MODES["stream"]}
    whole = run(Scenario(str(tmp_path), LENGTHS, **arguments))
    checkpoint = checkpoint_within_epoch(tmp_path, whole["steps"], 1)
    options = {"ignore_data_skip": True}
    anew = run(Scenario(str(tmp_path), LENGTHS, resume=checkpoint, options=options, **arguments))
    assert anew["batches"] == whole["batches"][: len(anew["batches"])]
    (Path(checkpoint) / "stream_0.json").unlink()
    again = run(Scenario(str(tmp_path), LENGTHS, resume=checkpoint, **arguments))
    assert "has no position of the stream" in again["error"]


@pytest.mark.slow
def test_two_ranks_resume_within_a_later_epoch(tmp_path):
    arguments = {"lengths": LENGTHS, "epochs": EPOCHS, "batch_size": 2, "save_steps": 2}
    made = Scenario(str(tmp_path / "run"), **arguments)
    whole = run_on_ranks({"whole": made}, tmp_path / "first")["whole"]
    checkpoint = Path(checkpoint_within_epoch(tmp_path / "run", whole[0]["steps"], 1))
    copied = shutil.copytree(checkpoint, tmp_path / "forgetful" / checkpoint.name)
    (copied / FILE).unlink()
    resumed = replace(made, resume=str(checkpoint))
    forgetful = replace(made, resume=str(copied), forgets_epoch_on_resume=True)
    found = run_on_ranks({"resumed": resumed, "forgetful": forgetful}, tmp_path / "again")
    for rank, expected in enumerate(whole):
        assert_continues(found["resumed"][rank], expected)
        with pytest.raises(AssertionError):  # the control: without the mend of `set_epoch`
            assert_continues(found["forgetful"][rank], expected)


@cache
def documents_of(lengths: tuple[int, ...]) -> Dataset:
    return Dataset.from_list(documents_of_lengths(lengths, prompt=1))


def epoch_of_rank(trainers, layout: dict, rank: int, epoch: int, behind: int = 0) -> list:
    """Return the tokens of a rank's micro-batches in an epoch, without the first `behind`."""
    trainer = trainers[layout["packing"]]
    trainer.train_dataset = documents_of(tuple(layout["lengths"]))
    trainer.args.gradient_accumulation_steps = layout["accumulation"]
    trainer._train_batch_size = layout["batch_size"]
    trainer.args.seed = layout["seed"]
    with mock.patch.object(sampling, "ranks_of", return_value=(layout["ranks"], rank)):
        dataloader = trainer.get_train_dataloader()
    dataloader = skip_first_batches(dataloader, behind) if behind else dataloader
    dataloader.set_epoch(epoch)
    if behind:  # as `Trainer._run_epoch` does
        dataloader.batch_sampler.batch_sampler.set_epoch(epoch)
    return [batch["input_ids"].flatten().tolist() for batch in dataloader]


LAYOUTS = {
    "lengths": st.lists(st.integers(2, 32), min_size=24, max_size=60),
    "packing": st.booleans(),
    "batch_size": st.integers(1, 3),
    "accumulation": st.integers(1, 4),
    "ranks": st.integers(1, 4),
    "seed": st.integers(0, 5),
}


@pytest.fixture(scope="module")
def trainers(tmp_path_factory):
    """Return a trainer that packs, and one that does not."""

    folder, rows = tmp_path_factory.mktemp("any_step"), documents_of_lengths(LENGTHS, prompt=1)
    options = {"max_length": 32, "isolation_check": "off"}
    return {p: make_trainer(folder, rows, packing=p, **options) for p in (True, False)}


@settings(max_examples=50, deadline=None)
@given(
    layout=st.fixed_dictionaries(LAYOUTS),
    epoch=st.integers(0, 3),
    at=st.floats(0, 1, exclude_max=True),
)
def test_any_layout_resumes_at_any_step(trainers, layout, epoch, at):
    """Every document once an epoch over all ranks, and the rest of an epoch from any step of it."""
    documents = documents_of(tuple(layout["lengths"]))
    ranks = [epoch_of_rank(trainers, layout, rank, epoch) for rank in range(layout["ranks"])]
    assert len({len(batches) for batches in ranks}) == 1, "equally many micro-batches"
    seen = [batch for batches in ranks for batch in batches if batch != [0]]  # [0]: an idle rank
    assert Counter(token for batch in seen for token in batch) == Counter(
        token for ids in documents["input_ids"][:] for token in ids
    )
    steps = -(-len(ranks[0]) // layout["accumulation"])
    behind = int(at * steps) * layout["accumulation"]
    for rank, batches in enumerate(ranks):
        assert epoch_of_rank(trainers, layout, rank, epoch, behind) == batches[behind:]


def test_another_step_or_epoch_fails_the_same_comparison(trainers):
    """Control."""
    layout = {"lengths": LENGTHS, "packing": True, "batch_size": 1, "accumulation": 2}
    layout |= {"ranks": 2, "seed": 0}
    batches = epoch_of_rank(trainers, layout, 0, 1)
    assert epoch_of_rank(trainers, layout, 0, 1, 2) == batches[2:]
    assert epoch_of_rank(trainers, layout, 0, 1, 4) != batches[2:]
    assert epoch_of_rank(trainers, layout, 0, 0, 2) != batches[2:]
    assert epoch_of_rank(trainers, layout, 1, 1, 2) != batches[2:]
