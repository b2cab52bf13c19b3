"""Runs with `overflow="overlap"`: pieces repeat a context, and each token is trained once."""

import pytest
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import alone, assert_exact, run
from helpers.by_hand import weighted
from helpers.distributed.same_steps import Run, assert_same_steps, joined, on_ranks, trained
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing.documents.labels import IGNORE_INDEX

CUT = {"overflow": "overlap", "max_length": 24}
PER_TOKEN = ("input_ids", "labels", "loss_weights")


def pieces_by_hand(documents, masked=True):
    """Return the pieces of all documents, cut one after the other; `masked`: with contexts."""
    pieces = []
    for document in documents:
        start, length = 0, len(document["input_ids"])
        while True:
            stop = min(start + 24, length)
            cut = {k: v[start:stop] if k in PER_TOKEN else v for k, v in document.items()}
            if start and masked:
                cut["labels"] = [IGNORE_INDEX] * 3 + list(cut["labels"][3:])
            if any(label != IGNORE_INDEX for label in cut["labels"][1:]):
                pieces.append(cut)
            if stop == length:
                break
            start = stop - 3
    return pieces


RUNS = {
    "packed": {},
    "padding-free": {"packing": False, "per_device_train_batch_size": 99},
    "documents weighted": {"loss_weighting": "document"},
    "processes": {"dataset_num_proc": 2, "dataloader_num_workers": 1},
    "a stream": {},
}


@pytest.mark.parametrize(
    "name",
    [n if n in ("packed", "a stream") else pytest.param(n, marks=pytest.mark.slow) for n in RUNS],
)
def test_a_step_is_that_of_the_pieces_one_at_a_time(name, tmp_path):
    documents = [d | {"loss_weight": 1.0 + n} for n, d in enumerate(weighted(tiny_documents()))]
    options = CUT | {"per_device_train_batch_size": 40} | RUNS[name]
    weighting, model = options.get("loss_weighting", "token"), tiny_model("llama")
    rows = Dataset.from_list(documents)
    rows = rows.to_iterable_dataset() if name == "a stream" else rows
    found = run(model, rows, tmp_path, **options)
    assert_exact(found, alone(model, pieces_by_hand(documents), weighting=weighting))
    # The control: contexts that are trained again are another step.
    again = pieces_by_hand(documents, masked=False)
    with pytest.raises(AssertionError):
        assert_exact(found, alone(model, again, weighting=weighting))


LONG = documents_of_lengths([5 + (i * 23) % 71 for i in range(24)])
KINDS = {
    "packed": {"packing": True, "per_device_train_batch_size": 1},
    "documents_per_step": {"documents_per_step": 6},
    "a stream": {"packing": True, "per_device_train_batch_size": 1, "max_steps": 8},
}


def run_of(folder, kind, accumulation=1):
    settings = CUT | KINDS[kind] | {"gradient_accumulation_steps": accumulation}
    shards = 2 if kind == "a stream" else None
    return Run(str(folder / kind), "PackedSFTTrainer", LONG, settings=settings, shards=shards)


@pytest.mark.slow
def test_two_ranks_train_the_pieces_that_one_trains(tmp_path):
    runs = {kind: run_of(tmp_path, kind) for kind in KINDS}
    expected = {tuple(p["input_ids"]) for p in pieces_by_hand(LONG)}
    for kind, ranks in on_ranks(runs, tmp_path / "ranks").items():
        found = joined(ranks)
        assert len(found["losses"]) > 7
        documents = {d for step in found["documents"].values() for d in step}
        assert documents <= expected
        if kind != "a stream":  # one rank reads its shards in another order
            assert_same_steps(trained(run_of(tmp_path / "one", kind, accumulation=2)), found)
            assert documents == expected
