"""Bins are halved, the fullest first, until their number is the one that is wanted."""

import numpy as np
from hypothesis import given
from hypothesis import strategies as st

from trl_packing.packing.epoch import split_bins


def bins_of(sizes: list[int]) -> list[np.ndarray]:
    return np.split(np.arange(sum(sizes)), np.cumsum(sizes)[:-1])


def slow_split(bins: list[np.ndarray], number: int) -> list[list[int]]:
    """One bin at a time, all of them looked at."""
    lists = [documents.tolist() for documents in bins]
    while len(lists) < number and max(map(len, lists)) > 1:
        fullest = max(range(len(lists)), key=lambda at: len(lists[at]))
        half = len(lists[fullest]) // 2
        lists.append(lists[fullest][half:])
        lists[fullest] = lists[fullest][:half]
    return lists


SIZES = st.lists(st.integers(1, 9), min_size=1, max_size=12)


@given(sizes=SIZES, number=st.integers(1, 30))
def test_the_fullest_bin_is_halved_again_and_again(sizes, number):
    split = [documents.tolist() for documents in split_bins(bins_of(sizes), number)]
    assert split == slow_split(bins_of(sizes), number)
    assert sorted(document for documents in split for document in documents) == [*range(sum(sizes))]


@given(sizes=SIZES, number=st.integers(1, 30))
def test_once_halved_a_bin_is_left_alone(sizes, number):
    bins = bins_of(sizes)
    split = split_bins(bins, number, repeatedly=False)
    assert sorted(np.concatenate(split).tolist()) == list(range(sum(sizes)))
    num_split = len(split) - len(bins)
    chosen = sorted(range(len(bins)), key=lambda at: -len(bins[at]))[:num_split]
    for at, documents in enumerate(bins):
        size = len(documents) // 2 if at in chosen else len(documents)
        assert split[at].tolist() == documents[:size].tolist()
    assert len(split) >= min(number, len(bins) + sum(size > 1 for size in sizes))
