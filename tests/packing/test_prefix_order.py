"""Documents are sorted by their tokens, and neighbors know what they share."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.documents.arrow import ListColumn
from trl_packing.packing import prefix_index

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
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


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
