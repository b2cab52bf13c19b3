"""Documents are read out of Arrow as they are; lengths are known without reading any."""

import pickle

import numpy as np
import pytest
from datasets import Dataset, Features, LargeList, List, Value, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.weights import check_token_weights
from trl_packing.packing.collator import PackedCollator

ROWS = [
    {"input_ids": [11, 12, 13], "labels": [11, -100, 13]},
    {"input_ids": [], "labels": []},
    {"input_ids": [21], "labels": [21]},
    {"input_ids": [31, 32, 33, 34], "labels": [-100, -100, -100, 34]},
]
COLUMNS = ["input_ids", "labels"]

# Two workers are tested on machines with one core too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def lists(documents) -> list[dict]:
    return [{name: values.tolist() for name, values in d.items()} for d in documents]


@settings(max_examples=30, deadline=None)
@given(
    chunks=st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=4), min_size=1, max_size=4),
    seed=st.one_of(st.none(), st.integers(0, 100)),
    kinds=st.sampled_from([(List, "int32"), (LargeList, "uint16"), (List, "int8")]),
)
def test_any_chunks_mapping_and_integers_read_as_the_data_set_does(chunks, seed, kinds):
    """The reference is `datasets` itself, one Python list a row."""
    rng = np.random.default_rng(0)
    (list_type, integers) = kinds
    features = Features(input_ids=list_type(Value(integers)), labels=List(Value("int64")))

    def row(length: int) -> dict:
        return {
            "input_ids": rng.integers(1, 99, length).tolist(),
            "labels": rng.choice([-100, 7], length).tolist(),
        }

    dataset = concatenate_datasets(
        [Dataset.from_list([row(n) for n in lengths], features=features) for lengths in chunks]
    )
    if seed is not None:
        dataset = dataset.shuffle(seed=seed).select(range(max(1, len(dataset) - 2)))
    documents = ArrowDocuments(dataset, COLUMNS)
    expected = list(dataset)
    assert lists([*documents, documents[-1]]) == [*expected, expected[-1]]
    assert documents.lengths().tolist() == [len(r["input_ids"]) for r in expected]
    assert documents.num_trained().tolist() == [
        sum(label != -100 for label in r["labels"][1:]) for r in expected
    ]
    found = documents.rows_where("input_ids", lambda ids: ids > 50).tolist()
    assert found == [i for i, r in enumerate(expected) if max(r["input_ids"], default=0) > 50]


def test_workers_of_a_loader_read_the_same_documents_and_carry_no_copy_of_what_was_read():
    documents = ArrowDocuments(Dataset.from_list(ROWS * 500).select([3, 0, *range(900)]), COLUMNS)
    before = len(pickle.dumps(documents))
    documents.lengths()
    assert len(pickle.dumps(documents)) < before + 100
    batches = [[0, 1], [4, 0]]
    options = {"num_workers": 2, "collate_fn": PackedCollator()}
    loader = DataLoader(documents, batch_sampler=batches, **options)
    expected = [[[31, 32, 33, 34, 11, 12, 13]], [[21, 31, 32, 33, 34]]]
    assert [batch["input_ids"].tolist() for batch in loader] == expected


# --- loss weights ---------------------------------------------------------------------------------

WEIGHTED = [
    {"input_ids": [11, 12, 13], "loss_weights": [0, 1, 2]},
    {"input_ids": [], "loss_weights": []},
    {"input_ids": [21, 22], "loss_weights": [3, 4]},
]
WITH_WEIGHTS = ["input_ids", "loss_weights"]


def with_weights(rows, numbers):
    features = Features(input_ids=List(Value("int64")), loss_weights=List(Value(numbers)))
    return Dataset.from_list(rows, features=features)


@pytest.mark.parametrize("numbers", ["float16", "float64", "uint8"])
def test_weights_of_any_numbers_are_given_as_float32(numbers):
    documents = ArrowDocuments(with_weights(WEIGHTED, numbers), WITH_WEIGHTS)
    assert lists(documents) == WEIGHTED
    assert {d["loss_weights"].dtype for d in documents} == {np.dtype(np.float32)}
    check_token_weights(documents)


@pytest.mark.parametrize("wrong", [-0.5, float("nan"), 1e39])
def test_the_first_document_of_impossible_weights_is_named(wrong):
    rows = [*WEIGHTED, {"input_ids": [1, 2], "loss_weights": [1.0, wrong]}]
    dataset = with_weights(rows, "float64")
    with pytest.raises(ValueError, match=r"document 1: loss_weights has .* at token 1; give"):
        check_token_weights(ArrowDocuments(dataset.select([2, 3, 3, 0]), WITH_WEIGHTS))
    check_token_weights(ArrowDocuments(dataset.select([2, 0]), WITH_WEIGHTS))
