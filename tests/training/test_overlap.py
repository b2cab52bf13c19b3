"""Runs with `overflow="overlap"`: pieces repeat a context, and each token is trained once."""

import pytest
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from harness import alone, assert_exact, run
from helpers.by_hand import weighted
from helpers.tiny import tiny_model

CUT = {"overflow": "overlap", "max_length": 24}
PER_TOKEN = ("input_ids", "labels", "loss_weights")


def pieces_by_hand(documents, masked=True):
    """Return the pieces of all documents, cut one after the other; `masked`: with contexts."""
    pieces = []
    for document in documents:
        start = 0
        length = len(document["input_ids"])
        while True:
            stop = min(start + 24, length)
            cut = {k: v[start:stop] if k in PER_TOKEN else v for k, v in document.items()}
            if start and masked:
                cut["labels"] = [-100] * 3 + list(cut["labels"][3:])
            if any(label != -100 for label in cut["labels"][1:]):
                pieces.append(cut)
            if stop == length:
                break
            start = stop - 3
    return pieces


@pytest.mark.parametrize("name", ["packed", "padding-free", "a stream"])
def test_a_step_is_that_of_the_pieces_one_at_a_time(name, tmp_path):
    documents = [d | {"loss_weight": 1.0 + n} for n, d in enumerate(weighted(tiny_documents()))]
    options = CUT | {"per_device_train_batch_size": 99}
    model = tiny_model("llama")
    options["packing"] = name != "padding-free"
    rows = Dataset.from_list(documents)
    rows = rows.to_iterable_dataset() if name == "a stream" else rows
    found = run(model, rows, tmp_path, **options)
    assert_exact(found, alone(model, pieces_by_hand(documents)))
    # The control: contexts that are trained again are another step.
    again = pieces_by_hand(documents, masked=False)
    with pytest.raises(AssertionError):
        assert_exact(found, alone(model, again))
