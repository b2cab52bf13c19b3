"""`packing=False` trains a stream, step by step, on the documents of TRL's run on that stream.

An `IterableDataset` has no sampler, so the order is the stream's; what can differ is how ranks and
workers divide it, where it is shuffled, and what becomes of the end of an epoch.
"""

import pytest
from helpers.distributed.same_steps import (
    TRAINERS,
    Run,
    assert_same_steps,
    both,
    joined,
    on_ranks,
    trained,
)
from helpers.tiny import documents_of_lengths

ROWS = documents_of_lengths([3 + (i * 7) % 27 for i in range(48)])
SHUFFLE = {"seed": 5, "buffer_size": 10}
ACCUMULATED = {"gradient_accumulation_steps": 2}


def with_untrained(rows: list[dict]) -> list[dict]:
    """Every fifth has no label: TRL drops it, and what is behind it moves up."""
    labels = [
        [-100] * len(r["input_ids"]) if i % 5 == 4 else r["input_ids"] for i, r in enumerate(rows)
    ]
    return [row | {"labels": label} for row, label in zip(rows, labels, strict=True)]


# Twelve steps an epoch, unless accumulated.
SAME = {
    "in its order": {"shards": 1, "settings": {"max_steps": 6}},
    "accumulated, two epochs": {"shards": 3, "settings": {"max_steps": 9} | ACCUMULATED},
    "shuffled, two epochs": {"shards": 3, "shuffle": SHUFFLE, "settings": {"max_steps": 16}},
    "shuffled by the trainer": {
        "rows": with_untrained(ROWS),
        "shards": 3,
        "settings": {"max_steps": 14, "shuffle_dataset": True},
    },
    "shuffled by the trainer, without a capacity": {
        "shards": 3,
        "settings": {"max_steps": 16, "shuffle_dataset": True, "max_length": None},
    },
}


@pytest.mark.parametrize("name", SAME)
def test_every_step_of_a_stream_holds_the_documents_of_the_padded_run(tmp_path, name):
    assert_same_steps(*both(tmp_path, **({"rows": ROWS} | SAME[name])))


def test_a_stream_shuffled_otherwise_fails_the_same_comparison(tmp_path):
    theirs, ours = (
        trained(
            Run(
                str(tmp_path),
                trainer,
                ROWS,
                {"max_steps": 4},
                shards=3,
                shuffle=SHUFFLE | {"seed": seed},
            )
        )
        for trainer, seed in zip(TRAINERS, (5, 6), strict=True)
    )
    with pytest.raises(AssertionError, match="step 0"):
        assert_same_steps(theirs, ours)


@pytest.mark.parametrize("step", [3, pytest.param(15, marks=pytest.mark.slow)])
def test_a_resumed_stream_holds_the_documents_of_an_uninterrupted_padded_run(tmp_path, step):
    """Behind the first epoch TRL's own resumed run does not: it skips in the first epoch."""
    arguments = {
        "rows": ROWS,
        "shards": 3,
        "shuffle": SHUFFLE,
        "settings": {"max_steps": 18, "save_strategy": "steps", "save_steps": step},
    }
    theirs, ours = both(tmp_path, **arguments)
    resumed = both(tmp_path, **arguments, resume=step)
    assert_same_steps(theirs, ours)
    rest = {s: documents for s, documents in theirs["documents"].items() if s >= step}
    assert_same_steps({"documents": rest, "losses": theirs["losses"]}, resumed[1])
    is_in_first_epoch = step < 12
    assert (resumed[0]["documents"] == rest) == is_in_first_epoch


# --- two ranks ------------------------------------------------------------------------------------

# Six steps an epoch, unless accumulated.
ON_RANKS = {
    "one shard": {"shards": 1, "settings": {"max_steps": 8} | ACCUMULATED},
    "one shard, shuffled": {"shards": 1, "shuffle": SHUFFLE, "settings": {"max_steps": 8}},
    "two shards": {"shards": 2, "settings": {"max_steps": 8} | ACCUMULATED},
    "four shards": {"shards": 4, "settings": {"max_steps": 8} | ACCUMULATED},
    "four shards, shuffled": {"shards": 4, "shuffle": SHUFFLE, "settings": {"max_steps": 8}},
}


@pytest.fixture(scope="module")
def runs_of_two_ranks(tmp_path_factory) -> dict[str, dict]:
    folder = tmp_path_factory.mktemp("ranks")
    runs = {
        f"{trainer}: {name}": Run(
            str(folder / trainer / name), trainer, **({"rows": ROWS} | arguments)
        )
        for name, arguments in ON_RANKS.items()
        for trainer in TRAINERS
    }
    save = {"max_steps": 10, "save_strategy": "steps", "save_steps": 8}
    for trainer in TRAINERS:
        for name, step in (("saving", None), ("resumed", 8)):
            runs[f"{trainer}: {name}"] = Run(
                str(folder / trainer / "saved"), trainer, ROWS, save, resume=step, shards=4
            )
    results = on_ranks(runs, folder / "results")
    return {name: joined(ranks) for name, ranks in results.items()}


def of_both(runs: dict[str, dict], name: str) -> list[dict]:
    return [runs[f"{trainer}: {name}"] for trainer in TRAINERS]


@pytest.mark.slow
@pytest.mark.parametrize("name", [*ON_RANKS, "saving"])
def test_two_ranks_train_the_steps_of_two_padded_ranks(runs_of_two_ranks, name):
    assert_same_steps(*of_both(runs_of_two_ranks, name))


@pytest.mark.slow
def test_two_resumed_ranks_train_the_steps_of_two_uninterrupted_padded_ranks(runs_of_two_ranks):
    """Of the second epoch."""
    theirs = runs_of_two_ranks["SFTTrainer: saving"]
    rest = {step: documents for step, documents in theirs["documents"].items() if step >= 8}
    theirs = {"documents": rest, "losses": theirs["losses"]}
    assert_same_steps(theirs, runs_of_two_ranks["PackedSFTTrainer: resumed"])
