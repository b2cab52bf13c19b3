"""An epoch goes from stage to stage, holds every document once, and stays random within a stage."""

from itertools import pairwise

import numpy as np
import pytest
import torch
from datasets import Dataset
from harness import TWO_RUNS, make_trainer
from helpers.combinations import fast
from helpers.distributed.same_steps import documents_of
from helpers.distributed.train import Scenario, assert_continues, run, run_on_ranks

from trl_packing import PackedBatchSampler
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.draw import numbers_of, stages_of

CAPACITY = 64
RNG = np.random.default_rng(0)
LENGTHS = RNG.integers(1, CAPACITY + 1, 3000)
DIFFICULTY = RNG.normal(size=3000)


def sampler(numbers, *, lengths=LENGTHS, descending=False, seed=0, **options):
    capacity = None if "documents_per_step" in options else CAPACITY
    stages = stages_of(numbers, lengths, capacity=capacity, descending=descending, seed=seed)
    return PackedBatchSampler(lengths, CAPACITY, seed=seed, stages=stages, **options)


def steps_of(made, epoch=0):
    """Return the documents of each optimizer step of all ranks."""
    made.set_epoch(epoch)
    batches = made.micro_batches()
    size = made.num_ranks * made.accumulation
    return [np.concatenate(batches[i : i + size]) for i in range(0, len(batches), size)]


MODES = {
    "bins": {"bins_per_batch": 2, "accumulation": 4},
    "documents_per_step": {"documents_per_step": 32, "accumulation": 2},
    "greedy": {"strategy": "greedy", "accumulation": 8},
    "next_fit": {"strategy": "next_fit", "accumulation": 8},
}


@pytest.mark.parametrize("mode", MODES)
@pytest.mark.parametrize(("numbers", "descending"), [(LENGTHS, True), (DIFFICULTY, False)])
def test_steps_ascend_or_descend(numbers, mode, descending):
    made = sampler(numbers, descending=descending, **MODES[mode])
    steps = steps_of(made)
    assert sorted(np.concatenate(steps).tolist()) == list(range(len(numbers)))
    means = np.array([numbers[step].mean() for step in steps[:-1]])
    rank = np.corrcoef(means, np.arange(len(means)))[0, 1]
    assert (-rank if descending else rank) > 0.9
    # No document comes before one of an earlier stage, but within one step.
    for before, after in pairwise(steps):
        assert made.stages[before].max() <= made.stages[after].min()
    # The control: an epoch without stages does not.
    drawn = PackedBatchSampler(LENGTHS, CAPACITY, seed=0, **MODES[mode])
    others = [numbers[step].mean() for step in steps_of(drawn)[:-1]]
    assert abs(np.corrcoef(others, np.arange(len(others)))[0, 1]) < 0.3


def test_documents_with_equal_numbers_are_drawn_from_all_of_the_data_set():
    numbers = np.repeat([0, 1], 1500)
    stages = stages_of(numbers, np.full(3000, 8), capacity=None)
    assert len(np.unique(stages)) == 64
    assert (stages[:1500] < 32).all()
    assert (stages[1500:] >= 32).all()
    in_first = np.flatnonzero(stages == 0)
    assert in_first.min() < 200
    assert in_first.max() > 1300
    assert not np.array_equal(stages, stages_of(numbers, np.full(3000, 8), capacity=None, seed=1))


# --- the numbers ----------------------------------------------------------------------------------


def test_numbers_are_read_through_a_shuffle():
    dataset = Dataset.from_dict(
        {"input_ids": [[1]] * 4, "hard": [0.5, 3.0, -1.0, float("inf")]}
    ).select([3, 2, 0])
    documents = ArrowDocuments(dataset, ["input_ids"])
    assert numbers_of(documents, "hard").tolist() == [float("inf"), -1.0, 0.5]
    assert numbers_of(documents, "length").tolist() == [1, 1, 1]
    stages = stages_of(numbers_of(documents, "hard"), np.array([1, 1, 1]), capacity=None)
    assert stages.argsort().tolist() == [1, 2, 0]


NO_NUMBERS = [
    ({"other": [1]}, "curriculum='hard' must name a column with a number.*'other'"),
    ({"hard": ["much"]}, "curriculum='hard' must name .*string"),
    ({"hard": [None, 1.0]}, "curriculum='hard' must name .*for each document"),
]


@pytest.mark.parametrize(("column", "problem"), NO_NUMBERS)
def test_a_column_without_numbers_is_refused(column, problem):
    rows = len(next(iter(column.values())))
    dataset = Dataset.from_dict({"input_ids": [[1]] * rows, **column})
    with pytest.raises(ValueError, match=problem):
        numbers_of(ArrowDocuments(dataset, ["input_ids"]), "hard")


def test_a_minus_begins_with_the_largest(tmp_path):
    rows = [{"input_ids": [7] * n} for n in DOCUMENTS]
    options = {"max_length": 32, "isolation_check": "off"}
    trainer = make_trainer(tmp_path, rows, curriculum="-length", **options)
    batches = list(trainer.get_train_dataloader().batch_sampler)
    longest = [max(DOCUMENTS[i] for i in batch) for batch in batches]
    assert longest[0] == max(DOCUMENTS)
    assert longest[-1] == min(longest)


# --- runs -----------------------------------------------------------------------------------------

DOCUMENTS = [3 + (i * 7) % 29 for i in range(90)]
RUNS = {"packed": {}, "documents_per_step": {"documents_per_step": 6}}


def scenario(folder, kind, accumulation=2, **arguments) -> Scenario:
    options = {"curriculum": "length", **RUNS[kind]}
    return Scenario(str(folder), DOCUMENTS, accumulation=accumulation, options=options, **arguments)


def trained_steps(*ranks):
    """Return the documents of each step of all ranks, by their tokens."""
    found = {}
    for result in ranks:
        for step, inputs in zip(result["trained_in"], result["inputs"], strict=True):
            found.setdefault(step, []).extend(documents_of(inputs))
    return [sorted(found[step]) for step in sorted(found)]


@pytest.mark.slow
def test_two_ranks_train_the_curriculum_of_one(tmp_path):
    made = {kind: scenario(tmp_path / kind, kind, accumulation=1) for kind in RUNS}
    for kind, ranks in run_on_ranks(made, tmp_path / "ranks").items():
        alone = run(scenario(tmp_path / f"{kind}, alone", kind))
        assert trained_steps(*ranks) == trained_steps(alone)
        assert len(trained_steps(alone)) > 5
        for name, value in alone["parameters"].items():
            found = ranks[0]["parameters"][name]
            torch.testing.assert_close(found, value, rtol=1e-4, atol=TWO_RUNS)


@pytest.mark.parametrize("kind", fast(RUNS, ("packed",)))
def test_a_run_resumes_to_the_bit(kind, tmp_path):
    whole = run(scenario(tmp_path, kind, epochs=2, save_steps=5))
    resume = str(tmp_path / "checkpoint-5")
    assert_continues(run(scenario(tmp_path, kind, epochs=2, save_steps=5, resume=resume)), whole)
