"""Documents are sorted by their tokens, and neighbors know what they share."""

from itertools import pairwise
from unittest import mock

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.packing import prefix_order as prefix_order_module
from trl_packing.packing.prefix_order import prefix_order

SHARED = [0] * 20  # more than a narrow block
DOCUMENTS = st.lists(
    st.tuples(st.booleans(), st.lists(st.integers(0, 2), max_size=40)).map(
        lambda pair: (SHARED if pair[0] else []) + pair[1]
    ),
    min_size=1,
    max_size=12,
)


def flat(documents):
    values = np.array([token for document in documents for token in document], np.int64)
    return values, np.cumsum([0, *map(len, documents)])


def common_by_hand(a, b):
    return next(
        (i for i, (x, y) in enumerate(zip(a, b, strict=False)) if x != y), min(len(a), len(b))
    )


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.sampled_from([1, 3, prefix_order_module._AT_ONCE]))
def test_order_and_common_tokens_are_those_of_sorted_lists(documents, at_once):
    with mock.patch.object(prefix_order_module, "_AT_ONCE", at_once):
        order, common = prefix_order(*flat(documents))
    ordered = [documents[i] for i in order]
    assert ordered == sorted(documents)
    assert order.tolist() == sorted(range(len(documents)), key=documents.__getitem__)
    expected = [common_by_hand(*pair) for pair in pairwise(ordered)]
    assert common.tolist() == [0, *expected]


@pytest.mark.parametrize("dtype", [np.int32, np.int64, np.uint32])
def test_large_ids_are_ordered_as_numbers(dtype):
    values = np.array([200_000, 70_000, 255, 256], dtype)
    assert prefix_order(values, np.arange(5))[0].tolist() == [2, 3, 1, 0]
