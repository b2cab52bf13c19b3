"""Packed rows become their documents again, in order, each with what belongs to it."""

import pytest
from datasets import Dataset

from trl_packing.data.unpack import unpack_rows

ROWS = [
    {
        "input_ids": [11, 12, 13, 21, 22],
        "labels": [-100, 12, 13, -100, 22],
        "loss_weights": [0.0, 1.0, 0.5, 0.0, 2.0],
        "seq_lengths": [3, 2],
        "source": "web",
    },
    {
        "input_ids": [31],
        "labels": [31],
        "loss_weights": [1.0],
        "seq_lengths": [1],
        "source": "code",
    },
]
DOCUMENTS = [
    {"input_ids": [11, 12, 13], "labels": [-100, 12, 13], "loss_weights": [0.0, 1.0, 0.5]},
    {"input_ids": [21, 22], "labels": [-100, 22], "loss_weights": [0.0, 2.0]},
    {"input_ids": [31], "labels": [31], "loss_weights": [1.0]},
]


@pytest.mark.parametrize("stream", [False, True])
def test_rows_become_their_documents_in_order(stream):
    dataset = Dataset.from_list(ROWS)
    documents = list(unpack_rows(dataset.to_iterable_dataset() if stream else dataset))
    expected = [d | {"source": s} for d, s in zip(DOCUMENTS, ("web", "web", "code"), strict=True)]
    assert documents == expected


def test_selected_rows_are_unpacked():
    documents = unpack_rows(Dataset.from_list(ROWS * 3).select([1, 2]))
    assert documents["input_ids"][:] == [[31], [11, 12, 13], [21, 22]]


def test_rows_without_labels_are_trained_throughout():
    rows = [{"input_ids": row["input_ids"], "seq_lengths": row["seq_lengths"]} for row in ROWS]
    documents = unpack_rows(Dataset.from_list(rows))
    assert documents["labels"][:] == documents["input_ids"][:]
