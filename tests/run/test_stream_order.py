"""`packing=False` trains a stream, step by step, on the documents of TRL's run on that stream.

An `IterableDataset` has no sampler, so the order is the stream's; what can differ is how ranks and
workers divide it, where it is shuffled, and what becomes of the end of an epoch.
"""

import pytest
from helpers.distributed.same_steps import TRAINERS, Run, assert_same_steps, both, trained
from helpers.tiny import documents_of_lengths

ROWS = documents_of_lengths([3 + (i * 7) % 27 for i in range(48)])
SHUFFLE = {"seed": 5, "buffer_size": 10}
ACCUMULATED = {"gradient_accumulation_steps": 2}


# Every fifth has no label: TRL drops it, and what is behind it moves up.
MASKED = [row | {"labels": [-100] * len(row["labels"])} for row in ROWS]
UNTRAINED = [MASKED[i] if i % 5 == 4 else row for i, row in enumerate(ROWS)]

# Twelve steps an epoch, unless accumulated.
SAME = {
    "in its order": {"shards": 1, "settings": {"max_steps": 6}},
    "accumulated, two epochs": {"shards": 3, "settings": {"max_steps": 9} | ACCUMULATED},
    "shuffled by the trainer": {
        "rows": UNTRAINED,
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
        trained(Run(str(tmp_path), trainer, ROWS, {"max_steps": 4}, shards=3, shuffle=shuffle))
        for trainer, shuffle in zip(TRAINERS, (SHUFFLE, SHUFFLE | {"seed": 6}), strict=True)
    )
    with pytest.raises(AssertionError, match="step 0"):
        assert_same_steps(theirs, ours)


def test_a_resumed_stream_holds_the_documents_of_an_uninterrupted_padded_run(tmp_path):
    """Behind the first epoch TRL's own resumed run does not: it skips in the first epoch."""
    settings = {"max_steps": 18, "save_strategy": "steps", "save_steps": 15}
    arguments = {"rows": ROWS, "shards": 3, "shuffle": SHUFFLE, "settings": settings}
    theirs, ours = both(tmp_path, **arguments)
    resumed = both(tmp_path, **arguments, resume=15)
    assert_same_steps(theirs, ours)
    rest = theirs | {"documents": {s: d for s, d in theirs["documents"].items() if s >= 15}}
    assert_same_steps(rest, resumed[1])
    assert resumed[0]["documents"] != rest["documents"]
