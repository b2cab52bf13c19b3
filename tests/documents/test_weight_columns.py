"""Values of documents are read in data-set order, whatever lies in the Arrow table."""

import numpy as np
import pytest
from datasets import Dataset, concatenate_datasets

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.weights import document_weights_from_rows


def dataset_of(*weights):
    return Dataset.from_list([{"input_ids": [1], "loss_weight": w} for w in weights])


def test_weights_are_read_through_select_and_chunks():
    dataset = concatenate_datasets([dataset_of(1, 2), dataset_of(3, 4)]).select([3, 0, 2])
    weights = document_weights_from_rows(dataset, "it")
    assert weights.dtype == np.float32
    assert weights.tolist() == [4.0, 1.0, 3.0]


def test_rows_that_were_left_out_may_be_wrong():
    dataset = dataset_of(1.0, -1.0, 2.0)
    assert document_weights_from_rows(dataset.select([0, 2]), "it").tolist() == [1.0, 2.0]
    with pytest.raises(ValueError, match=r"row 0 of the shuffled set has loss_weight=-1\.0; give"):
        document_weights_from_rows(dataset.select([1, 0]), "the shuffled set")


@pytest.mark.parametrize("wrong", [float("nan"), float("-inf"), 1e300])
def test_impossible_weights_name_their_row(wrong):
    with pytest.raises(ValueError, match="row 1 of it has loss_weight="):
        document_weights_from_rows(dataset_of(1.0, wrong), "it")


@pytest.mark.parametrize("wrong", ["1", True, [1.0]])
def test_only_numbers_are_weights(wrong):
    with pytest.raises(
        ValueError, match=r"column 'loss_weight' of it holds .*convert it to numbers"
    ):
        document_weights_from_rows(dataset_of(wrong), "it")


def test_documents_carry_their_values():
    dataset = dataset_of(0.5, 2.0, 1.0).select([2, 1])
    documents = ArrowDocuments(dataset, ["input_ids"], {"loss_weight": np.array([1.0, 2.0])})
    assert [d["loss_weight"] for d in documents] == [1.0, 2.0]
    assert [d["loss_weight"] for d in documents.__getitems__([1, 0, 1])] == [2.0, 1.0, 2.0]
