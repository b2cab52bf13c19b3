"""Facts about plans: nothing lost, nothing over capacity, as few bins as the slow algorithm."""

import numpy as np
import pyarrow as pa
import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_packing.packing.bins import STRATEGIES, PackingPlan, pack

CAPACITY = 64
LENGTHS = st.lists(st.integers(1, CAPACITY), min_size=1, max_size=80)
SEEDS = st.one_of(st.none(), st.integers(0, 2**32), st.tuples(st.integers(0, 9), st.integers(0, 9)))


def assert_every_document_once_within_capacity(plan: PackingPlan, lengths: list[int]) -> None:
    documents = np.concatenate(list(plan))
    assert sorted(documents.tolist()) == list(range(len(lengths)))
    tokens = [sum(lengths[document] for document in documents) for documents in plan]
    assert tokens == plan.tokens.tolist()
    assert all(0 < total <= plan.capacity for total in tokens)


def slow_best_fit_decreasing(lengths: list[int], capacity: int) -> list[int]:
    """One document at a time, every open bin looked at; return the spaces left."""
    spaces: list[int] = []
    for length in sorted(lengths, reverse=True):
        fits = [i for i, space in enumerate(spaces) if space >= length]
        if not fits:
            spaces.append(capacity)
            fits = [len(spaces) - 1]
        spaces[min(fits, key=lambda i: spaces[i])] -= length
    return spaces


@given(lengths=LENGTHS, strategy=st.sampled_from(list(STRATEGIES)), seed=SEEDS)
def test_every_document_lands_in_exactly_one_bin_within_capacity(lengths, strategy, seed):
    plan = pack(lengths, CAPACITY, strategy, seed)
    assert_every_document_once_within_capacity(plan, lengths)
    assert plan.utilization == sum(lengths) / (len(plan) * CAPACITY)


@given(lengths=LENGTHS, seed=SEEDS, unit=st.sampled_from([1, 5000]))
def test_bfd_leaves_the_spaces_of_best_fit_decreasing_one_document_at_a_time(lengths, seed, unit):
    """Also for capacities beyond 16 bits; with a seed, the bins are others, and as many."""
    lengths = [unit * length for length in lengths]
    capacity = unit * CAPACITY
    slow = slow_best_fit_decreasing(lengths, capacity)
    assert sorted((capacity - pack(lengths, capacity).tokens).tolist()) == sorted(slow)
    plan = pack(lengths, capacity, seed=seed)
    assert_every_document_once_within_capacity(plan, lengths)
    assert len(plan) == len(slow)


IN_ORDER = {"next_fit": [[0, 1], [2, 3], [4], [5, 6]], "greedy": [[4], [1], [2, 3], [0, 5, 6]]}


@pytest.mark.parametrize("strategy", IN_ORDER)
def test_bins_are_filled_in_order_of_the_data_set_or_from_the_longest_document(strategy):
    plan = pack([2, 5, 4, 3, 7, 2, 1], 7, strategy)
    assert [documents.tolist() for documents in plan] == IN_ORDER[strategy]


def test_seeded_bins_come_in_random_order():
    drawn = np.random.default_rng(0).lognormal(5.4, 0.9, 5000)
    lengths = drawn.astype(int).clip(1, 4096)

    def contrast(seed):
        means = [lengths[documents].mean() for documents in pack(lengths, 4096, "greedy", seed)]
        half = len(means) // 2
        return np.mean(means[:half]) / np.mean(means[half:])

    assert contrast(None) > 2, "greedy without a seed starts with the longest documents"
    assert 0.7 < contrast(0) < 1.4


REFUSED = [
    (([1], 4, "best"), r"unknown packing strategy 'best'; choose one of \('bfd'"),
    (([1], 0), "document 0 has 1 tokens but capacity is 0; raise max_length"),
    ((pa.array([1, None]), 4), "one integer per document, got float64"),
    (([1, 0, 2], 4), "document 1 has 0 tokens .*drop empty documents"),
]


@pytest.mark.parametrize(("arguments", "message"), REFUSED)
def test_bad_input_is_refused_with_its_value_and_the_way_out(arguments, message):
    with pytest.raises(ValueError, match=message):
        pack(*arguments)
