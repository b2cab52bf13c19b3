"""`packing=False` trains, step by step, on the documents of TRL's padded run."""

import pytest
import torch
from helpers.combinations import fast
from helpers.distributed import same_steps
from helpers.distributed.same_steps import (
    TOLERANCE,
    TRAINERS,
    Run,
    assert_same_steps,
    joined,
    on_ranks,
    trained,
)
from helpers.tiny import documents_of_lengths

LENGTHS = [3 + (i * 7) % 27 for i in range(41)]
ROWS = documents_of_lengths(LENGTHS)
TWO_EPOCHS = {"num_train_epochs": 2}

SAME = {
    "accumulated, with a smaller last step": {"gradient_accumulation_steps": 3},
    "a seed": {"seed": 7},
    "a seed of the data": {"seed": 7, "data_seed": 11},
    "incomplete batches dropped": {"dataloader_drop_last": True, "gradient_accumulation_steps": 2},
    "in data-set order": {"train_sampling_strategy": "sequential"},
    "grouped by length": {
        "train_sampling_strategy": "group_by_length",
        "gradient_accumulation_steps": 2,
        "num_train_epochs": 3,
    },
    "rebalanced, incomplete steps dropped": {
        "train_sampling_strategy": "batch_rebalance",
        "gradient_accumulation_steps": 2,
        "dataloader_drop_last": True,
    },
    "a shuffled data set": {"shuffle_dataset": True},
}


def both(folder, ours=None, **arguments) -> list[dict]:
    settings = TWO_EPOCHS | arguments.pop("settings", {})
    return same_steps.both(folder, ours, settings=settings, **({"rows": ROWS} | arguments))


@pytest.mark.parametrize("name", fast(SAME, [*SAME][:3]))
def test_every_step_holds_the_documents_of_the_padded_run(tmp_path, name):
    assert_same_steps(*both(tmp_path, settings=SAME[name]))


def some_untrained() -> list[dict]:
    """A third trains nothing: one token, a label on the first token only, or none at all."""
    rows = [dict(row) for row in ROWS]
    for at in range(0, len(rows), 9):
        rows[at] = {"input_ids": [7 + at], "labels": [7 + at]}
    for at in (*range(3, len(rows), 9), *range(6, len(rows), 9)):
        ids = rows[at]["input_ids"]
        rows[at]["labels"] = [-100 if at % 9 == 6 else ids[0]] + [-100] * (len(ids) - 1)
    return rows


@pytest.mark.parametrize("settings", fast([{}, {"max_length": None}], [{}]))
def test_documents_that_train_nothing_take_their_place_in_a_step(tmp_path, settings):
    assert_same_steps(*both(tmp_path, rows=some_untrained(), settings=settings))


def test_another_seed_fails_the_same_comparison(tmp_path):
    theirs, ours = both(tmp_path, {"seed": 43}, settings={"seed": 42})
    assert [*theirs["documents"]] == [*ours["documents"]]
    with pytest.raises(AssertionError, match="step 0"):
        assert_same_steps(theirs, ours)


def test_a_seed_given_to_torch_before_training_counts_as_in_a_padded_run(tmp_path):
    theirs, ours = both(tmp_path, seeded_before_training=3)
    assert_same_steps(theirs, ours)
    plain = trained(Run(str(tmp_path), "PackedSFTTrainer", ROWS, TWO_EPOCHS))
    assert plain["documents"] != ours["documents"]


@pytest.mark.parametrize("step", [pytest.param(3, marks=pytest.mark.slow), 15])
def test_a_resumed_run_holds_the_documents_of_the_padded_run(tmp_path, step):
    """Eleven steps an epoch; both runs save, and go on from, the same step."""
    settings = {"save_strategy": "steps", "save_steps": step}
    whole = both(tmp_path, settings=settings)
    resumed = both(tmp_path, settings=settings, resume=step)
    assert_same_steps(*resumed)
    later = {s: documents for s, documents in whole[0]["documents"].items() if s >= step}
    assert resumed[1]["documents"].keys() == later.keys()
    for s, documents in later.items():
        assert sorted(resumed[1]["documents"][s]) == sorted(documents)


# --- two ranks ------------------------------------------------------------------------------------

# Documents, and settings.
ON_RANKS = {
    "a full epoch": (40, {}),
    "accumulated": (32, {"gradient_accumulation_steps": 2}),
    "a last step that is filled up": (37, {}),
    "incomplete batches dropped": (41, {"dataloader_drop_last": True}),
    "grouped by length": (40, {"train_sampling_strategy": "group_by_length"}),
}


@pytest.fixture(scope="module")
def runs_of_two_ranks(tmp_path_factory) -> dict[str, list[dict]]:
    folder = tmp_path_factory.mktemp("ranks")
    runs = {}
    for trainer in TRAINERS:
        for name, (number, settings) in ON_RANKS.items():
            where = str(folder / trainer / name)
            runs[f"{trainer}: {name}"] = Run(where, trainer, ROWS[:number], TWO_EPOCHS | settings)
        saving = TWO_EPOCHS | {"save_strategy": "steps", "save_steps": 7}
        for name, step in (("saving", None), ("resumed", 7)):
            where = str(folder / trainer / "saved")
            runs[f"{trainer}: {name}"] = Run(where, trainer, ROWS[:40], saving, resume=step)
    return {name: joined(found) for name, found in on_ranks(runs, folder / "results", 2).items()}


def of_both(runs, name) -> list[dict]:
    return [runs[f"{trainer}: {name}"] for trainer in TRAINERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*(n for n in ON_RANKS if "filled up" not in n), "resumed"])
def test_two_ranks_train_the_steps_of_two_padded_ranks(runs_of_two_ranks, name):
    assert_same_steps(*of_both(runs_of_two_ranks, name))


@pytest.mark.slow
def test_two_ranks_do_not_repeat_the_documents_that_fill_up_a_padded_step(runs_of_two_ranks):
    """37 documents in steps of 8: accelerate repeats three in the fifth, and ours trains five."""
    theirs, ours = of_both(runs_of_two_ranks, "a last step that is filled up")
    for step, documents in theirs["documents"].items():
        expected = documents
        if step % 5 == 4:
            seen = [d for s in range(step - 4, step) for d in theirs["documents"][s]]
            expected = [document for document in documents if document not in seen]
            assert len(expected) == 5 < len(documents) == 8
        assert sorted(expected) == sorted(ours["documents"][step])
    torch.testing.assert_close(ours["losses"][:4], theirs["losses"][:4], rtol=0, atol=TOLERANCE)
