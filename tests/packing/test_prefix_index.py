"""The index of prefixes sorts documents by tokens, and knows the length of every shared row."""

from itertools import pairwise, takewhile
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import PackedCollator
from trl_packing.documents.arrow import ArrowDocuments, ListColumn
from trl_packing.packing import prefix_index
from trl_packing.packing.prefix_index import PrefixIndex


def random_rows(rng, number=40, *, own_labels=False):
    prompts = [rng.integers(5, 9, rng.integers(10, 60)).tolist() for _ in range(4)]
    rows = []
    for _ in range(number):
        ids = prompts[rng.integers(4)][: rng.integers(10, 60)]
        ids = ids + rng.integers(5, 9, rng.integers(0, 6)).tolist()
        labels = [-100 if i < len(ids) // 2 else token for i, token in enumerate(ids)]
        if own_labels and rng.random() < 0.3:
            labels[rng.integers(len(labels))] = 3
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def lengths_of_rows(documents, rows):
    """Return the tokens of each row as the collator makes it."""
    collate = PackedCollator(shares_prefixes=True)
    return [collate(documents.__getitems__(row))["input_ids"].shape[1] for row in rows]


def assert_knows(documents, rng, number=30):
    index = PrefixIndex.of(documents)
    lengths = documents.lengths()
    sizes = rng.integers(1, min(12, len(documents)), number)
    rows = [rng.permutation(len(documents))[:size].tolist() for size in sizes]
    computed = index.computed_tokens(lengths, np.concatenate(rows), np.cumsum([0, *sizes]))
    assert computed.tolist() == lengths_of_rows(documents, rows)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_computed_tokens_are_those_of_the_rows(seed):
    rng = np.random.default_rng(seed)
    columns = ["input_ids", "labels"]
    assert_knows(ArrowDocuments(Dataset.from_list(random_rows(rng)), columns), rng)


def test_labels_of_their_own_are_not_shared():
    rng = np.random.default_rng(1)
    rows = random_rows(rng, own_labels=True)
    documents = ArrowDocuments(Dataset.from_list(rows), ["input_ids", "labels"])
    assert not PrefixIndex.of(documents).common.any()
    assert not PrefixIndex.of_loaded(rows).common.any()
    without = PrefixIndex.of(ArrowDocuments(Dataset.from_list(rows), ["input_ids"])).common
    assert without.sum() > 0
    assert "key_index" not in PackedCollator(shares_prefixes=True)(rows)


def test_chunks_and_indices_of_the_table_are_followed():
    rng = np.random.default_rng(3)
    parts = [Dataset.from_list(random_rows(rng, number)) for number in (7, 1, 12, 30)]
    dataset = concatenate_datasets(parts)
    assert dataset.data.column("input_ids").num_chunks == 4
    for chosen in (dataset, dataset.shuffle(seed=1), dataset.select(range(5, 45, 2))):
        assert_knows(ArrowDocuments(chosen, ["input_ids", "labels"]), rng)


# --- the order ------------------------------------------------------------------------------------

SHARED = [0] * 20  # more than a narrow block
DOCUMENTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=40)).map(
        lambda pair: (SHARED if pair[0] else []) + pair[1]
    ),
    min_size=1,
    max_size=12,
)


def column(chunks, dtype=np.int64):
    kind = pa.list_(pa.from_numpy_dtype(dtype))
    return ListColumn("input_ids", pa.chunked_array(chunks, kind))


def common_by_hand(a, b):
    return sum(1 for _ in takewhile(lambda pair: pair[0] == pair[1], zip(a, b, strict=False)))


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS, st.integers(1, 12), st.sampled_from([1, 3, 32_768]), st.data())
def test_order_and_common_tokens_are_those_of_sorted_lists(documents, size, at_once, data):
    """Documents are some rows of a column in chunks, in any order, also few of many and none."""
    parts = [documents[i : i + size] for i in range(0, len(documents), size)]
    rows = st.integers(0, len(documents) - 1)
    stored = np.array(data.draw(st.lists(rows, max_size=20)), np.int64)
    with mock.patch.object(prefix_index, "_AT_ONCE", at_once):
        order, common = prefix_index.prefix_order(column(parts), stored)
    assert sorted(order.tolist()) == list(range(len(stored)))
    chosen = [documents[n] for n in stored[order]]
    # Any order of single tokens sorts documents so that those with a common prefix are neighbors.
    assert chosen == sorted(chosen, key=lambda document: np.array(document, np.int64).tobytes())
    expected = [common_by_hand(*pair) for pair in pairwise(chosen)]
    assert common.tolist() == [0, *expected][: len(stored)]
    assert sum(expected) == sum(common_by_hand(*pair) for pair in pairwise(sorted(chosen)))


@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.int32, np.int64])
def test_ids_of_any_width_share_whole_tokens(dtype):
    """256 and 0 begin with the same byte."""
    lists = [[1, 256 % (np.iinfo(dtype).max + 1)], [1, 0]]
    _order, common = prefix_index.prefix_order(column([lists], dtype), np.arange(2))
    assert common.tolist() == [0, 2 if dtype == np.uint8 else 1]
