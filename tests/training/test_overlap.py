"""Runs with `overflow="overlap"`: pieces repeat a context, and each token is trained once."""

import pytest
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import alone, assert_exact, run
from helpers.by_hand import weighted
from helpers.distributed.same_steps import Run, assert_same_steps, joined, on_ranks, trained
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing.documents.labels import IGNORE_INDEX

OVERLAP = {"overflow": "overlap"}
PER_TOKEN = ("input_ids", "labels", "loss_weights")


def pieces_by_hand(documents, capacity, masked=True):
    """Return the pieces of all documents, cut one after the other; `masked`: with contexts."""
    pieces, overlap = [], capacity // 8
    for document in documents:
        start, length = 0, len(document["input_ids"])
        while True:
            stop = min(start + capacity, length)
            cut = {k: v[start:stop] if k in PER_TOKEN else v for k, v in document.items()}
            if start and masked:
                cut["labels"] = [IGNORE_INDEX] * overlap + list(cut["labels"][overlap:])
            if any(label != IGNORE_INDEX for label in cut["labels"][1:]):
                pieces.append(cut)
            if stop == length:
                break
            start = stop - overlap
    return pieces


def num_trained(documents):
    return sum(label != IGNORE_INDEX for d in documents for label in d["labels"][1:])


def test_pieces_by_hand_train_every_token_once():
    documents = documents_of_lengths([70, 20, 33, 1, 48])
    pieces = pieces_by_hand(documents, 24)
    assert len(pieces) > 8
    assert num_trained(pieces) == num_trained(documents)
    # The control: without a mask on contexts, they are trained again.
    assert num_trained(pieces_by_hand(documents, 24, masked=False)) > num_trained(documents)


RUNS = {
    "packed": {},
    "padding-free": {"packing": False, "per_device_train_batch_size": 99},
    "documents weighted": {"loss_weighting": "document"},
    "processes": {"dataset_num_proc": 2, "dataloader_num_workers": 1},
    "a stream": {"stream": True},
}


@pytest.mark.parametrize(
    "name",
    [n if n in ("packed", "a stream") else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)
def test_a_step_is_that_of_the_pieces_one_at_a_time(name, tmp_path):
    options = dict(RUNS[name])
    documents = [d | {"loss_weight": 1.0 + n} for n, d in enumerate(weighted(tiny_documents()))]
    weighting = options.get("loss_weighting", "token")
    pieces = pieces_by_hand(documents, 24)
    rows = Dataset.from_list(documents)
    rows = rows.to_iterable_dataset() if options.pop("stream", False) else rows
    model = tiny_model("llama")
    options = OVERLAP | {"max_length": 24, "per_device_train_batch_size": 40} | options
    found = run(model, rows, tmp_path, **options)
    assert_exact(found, alone(model, pieces, weighting=weighting))
    # The control: contexts that are trained again are another step.
    again = pieces_by_hand(documents, 24, masked=False)
    with pytest.raises(AssertionError):
        assert_exact(found, alone(model, again, weighting=weighting))


# --- ranks ----------------------------------------------------------------------------------------

LONG = documents_of_lengths([5 + (i * 23) % 71 for i in range(24)])
KINDS = {
    "packed": {"packing": True, "per_device_train_batch_size": 1},
    "documents_per_step": {"documents_per_step": 6},
    "a stream": {"packing": True, "per_device_train_batch_size": 1, "max_steps": 8},
}


def run_of(folder, kind, accumulation=1):
    settings = OVERLAP | KINDS[kind] | {"max_length": 24}
    settings |= {"gradient_accumulation_steps": accumulation}
    shards = 2 if kind == "a stream" else None
    return Run(str(folder / kind), "PackedSFTTrainer", LONG, settings=settings, shards=shards)


@pytest.mark.slow
def test_two_ranks_train_the_pieces_that_one_trains(tmp_path):
    runs = {kind: run_of(tmp_path, kind) for kind in KINDS}
    expected = {tuple(p["input_ids"]) for p in pieces_by_hand(LONG, 24)}
    for kind, ranks in on_ranks(runs, tmp_path / "ranks").items():
        found = joined(ranks)
        documents = {d for step in found["documents"].values() for d in step}
        if kind != "a stream":  # one rank reads its shards in another order
            assert_same_steps(trained(run_of(tmp_path / "one", kind, accumulation=2)), found)
            assert documents == expected
        assert documents <= expected
        assert len(found["losses"]) > 7
