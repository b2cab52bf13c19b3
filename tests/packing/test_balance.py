"""Micro-batches of a slot cost about the same, and every optimizer step stays a fair sample."""

from functools import cache

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.packing.balance import balanced_order
from trl_packing.packing.bins import STRATEGIES, pack
from trl_packing.packing.sampler import PackedBatchSampler

CAPACITY = 32_768
C = 1 / (12 * 4096)  # an 8B Llama
RANKS = 64
DEFAULT = PackedBatchSampler.__init__.__kwdefaults__["balance_window"]


@cache
def heavy_tail() -> np.ndarray:
    """Return lengths, most of some hundred tokens, a few up to capacity: about 8,000 bins."""
    rng = np.random.default_rng(0)
    lengths = rng.lognormal(np.log(500) - 0.4, 0.9, 400_000)
    is_long = rng.random(len(lengths)) < 0.03
    lengths[is_long] = 2000 * (1 + rng.pareto(1.1, is_long.sum()))
    return lengths.clip(16, CAPACITY).astype(int)


@cache
def planned():
    return pack(heavy_tail(), CAPACITY, seed=0)


@cache
def costs() -> np.ndarray:
    plan, lengths = planned(), heavy_tail()
    squares = np.add.reduceat(lengths[plan.indices] ** 2, plan.offsets[:-1])
    return (plan.tokens + C * squares).astype(int)


def steps_of(window: int, slots: int = RANKS, bins_per_batch: int = 1) -> np.ndarray:
    """Return the bins of every step, (steps, slots, bins_per_batch); bins are in random order."""
    return balanced_order(
        costs(),
        tokens=planned().tokens,
        documents=np.diff(planned().offsets),
        slots=slots,
        bins_per_batch=bins_per_batch,
        window=window,
        rng=np.random.default_rng(0),
    )


def sorted_by_cost() -> np.ndarray:
    """Return steps of a whole epoch sorted by cost."""
    return np.argsort(-costs())[: len(costs()) // RANKS * RANKS].reshape(-1, RANKS, 1)


def imbalance(steps: np.ndarray, ranks: int = RANKS) -> float:
    """Return the mean over slots of max / mean cost of their micro-batches."""
    slots = costs()[steps].sum(2).reshape(-1, ranks)
    return float((slots.max(1) / slots.mean(1)).mean())


def variation(steps: np.ndarray) -> float:
    """Return the std over steps of the mean length of their documents."""
    bins, plan = steps.reshape(len(steps), -1), planned()
    return float((plan.tokens[bins].sum(1) / np.diff(plan.offsets)[bins].sum(1)).std())


def assert_balanced(steps):
    assert imbalance(steps) <= 1.05


def assert_fair(steps):
    assert variation(steps) <= 1.2 * variation(steps_of(1))


def test_ranks_that_wait_wait_little():
    assert_balanced(steps_of(DEFAULT))


def test_random_steps_fail_the_bound_of_balance():
    """Control of the test above."""
    with pytest.raises(AssertionError):
        assert_balanced(steps_of(1))
    assert imbalance(steps_of(1)) > 1.2


def test_steps_vary_no_more_than_random_ones():
    assert_fair(steps_of(DEFAULT))


def test_an_epoch_sorted_by_cost_is_balanced_but_fails_the_bound_of_fairness():
    """Control of the test above."""
    assert_balanced(sorted_by_cost())
    with pytest.raises(AssertionError):
        assert_fair(sorted_by_cost())
    assert variation(sorted_by_cost()) > 3 * variation(steps_of(1))


def test_within_a_step_micro_batches_are_matched_without_a_window():
    """8 ranks × 8: the same random steps, but the costly micro-batches run at the same moment."""
    arranged = steps_of(1)
    as_they_came = np.arange(arranged.size).reshape(arranged.shape)
    np.testing.assert_array_equal(np.sort(arranged, axis=1), as_they_came)
    assert imbalance(arranged, ranks=8) - 1 < 0.4 * (imbalance(as_they_came, ranks=8) - 1)


def test_costly_and_cheap_bins_share_a_micro_batch():
    arranged = steps_of(1, bins_per_batch=4)
    in_order = np.arange(arranged.size).reshape(arranged.shape)
    np.testing.assert_array_equal(
        np.sort(arranged.reshape(len(arranged), -1)), in_order.reshape(len(in_order), -1)
    )
    assert imbalance(arranged) - 1 < 0.4 * (imbalance(in_order) - 1)


def test_the_costliest_bin_is_as_likely_in_every_step():
    """Of 30 steps in windows of 10, over 600 epochs: 20 times each, within 4.5 σ of binomial."""
    rng, found = np.random.default_rng(0), np.zeros(30)
    each = np.full(120, 100)
    each[:12] = np.arange(200, 80, -10)
    for _ in range(600):
        shuffled = rng.permutation(120)
        order = balanced_order(
            each[shuffled],
            tokens=np.full(120, 100),
            documents=1 + rng.integers(0, 9, 120) * (each[shuffled] == 100),
            slots=4,
            bins_per_batch=1,
            window=10,
            rng=rng,
        )
        found[np.argmax((shuffled[order] == 0).any(axis=(1, 2)))] += 1
    assert abs(found - 20).max() <= 4.5 * np.sqrt(20)


@settings(max_examples=60, deadline=None)
@given(
    number=st.integers(0, 200),
    slots=st.integers(1, 9),
    bins_per_batch=st.integers(1, 3),
    window=st.integers(1, 12),
    seed=st.integers(0, 5),
)
def test_every_bin_of_the_full_steps_is_used_once(number, slots, bins_per_batch, window, seed):
    rng = np.random.default_rng(seed)
    order = balanced_order(
        (100 * (1 + rng.pareto(1, number))).astype(int),
        tokens=np.full(number, 100),
        documents=rng.integers(1, 50, number),
        slots=slots,
        bins_per_batch=bins_per_batch,
        window=window,
        rng=rng,
    )
    full = number // (slots * bins_per_batch)
    assert order.shape == (full, slots, bins_per_batch)
    assert sorted(order.ravel().tolist()) == list(range(full * slots * bins_per_batch))


# --- through the sampler --------------------------------------------------------------------------

layouts = {
    "lengths": st.lists(st.integers(1, 64), min_size=8, max_size=120),
    "bins_per_batch": st.integers(1, 3),
    "strategy": st.sampled_from(list(STRATEGIES)),
    "seed": st.integers(0, 100),
    "balance_window": st.integers(1, 9),
}


def sampler_of(num_ranks=1, rank=0, **options) -> PackedBatchSampler:
    return PackedBatchSampler(
        capacity=64, attention_cost=0.02, num_ranks=num_ranks, rank=rank, **options
    )


@settings(max_examples=60, deadline=None)
@given(
    layout=st.fixed_dictionaries(layouts),
    num_ranks=st.integers(1, 5),
    accumulation=st.integers(1, 4),
    epoch=st.integers(0, 3),
)
def test_every_document_once_and_equal_counts(layout, num_ranks, accumulation, epoch):
    ranks = []
    for rank in range(num_ranks):
        sampler = sampler_of(num_ranks, rank, accumulation=accumulation, **layout)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    seen = sorted(document for batches in ranks for batch in batches for document in batch)
    assert seen == list(range(len(layout["lengths"])))
    assert len({len(batches) for batches in ranks}) == 1


def micro_batches_by_step(num_ranks, accumulation, epoch, **layout) -> list[set[frozenset[int]]]:
    sampler = sampler_of(num_ranks, accumulation=accumulation, **layout)
    sampler.set_epoch(epoch)
    each = [frozenset(batch.tolist()) for batch in sampler.micro_batches()]
    size = num_ranks * accumulation
    return [set(each[at : at + size]) for at in range(0, len(each), size)]


@settings(max_examples=60, deadline=None)
@given(layout=st.fixed_dictionaries(layouts), epoch=st.integers(0, 3), per_rank=st.integers(1, 2))
def test_steps_hold_the_same_micro_batches_for_1x4_2x2_and_4x1(layout, epoch, per_rank):
    """The last step is cut by ranks; there only the documents are the same."""
    one, *others = (
        micro_batches_by_step(num_ranks, 4 * per_rank // num_ranks, epoch, **layout)
        for num_ranks in (1, 2, 4)
    )
    for other in others:
        assert other[:-1] == one[:-1]
        assert frozenset().union(*other[-1]) == frozenset().union(*one[-1])


@settings(max_examples=30, deadline=None)
@given(layout=st.fixed_dictionaries(layouts), epochs=st.lists(st.integers(0, 5), max_size=4))
def test_an_epoch_is_the_same_whatever_was_drawn_before_it(layout, epochs):
    """A run that is resumed draws only the epochs that are left."""
    resumed, ran = sampler_of(2, **layout), sampler_of(2, **layout)
    for epoch in [*epochs, 3]:
        ran.set_epoch(epoch)
        list(ran)
    resumed.set_epoch(3)
    assert list(resumed) == list(ran)


def test_every_rank_draws_the_same_epoch():
    lengths = heavy_tail()[:2000]
    first, *others = (
        PackedBatchSampler(lengths, CAPACITY, num_ranks=4, rank=rank, attention_cost=C)
        for rank in range(4)
    )
    for other in others:
        for ours, theirs in zip(first.micro_batches(), other.micro_batches(), strict=True):
            np.testing.assert_array_equal(ours, theirs)


def test_bins_and_steps_are_drawn_anew_every_epoch():
    sampler = PackedBatchSampler(heavy_tail()[:4000], CAPACITY, num_ranks=4, attention_cost=C)
    epochs = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        epochs.append({frozenset(batch) for batch in sampler if len(batch) > 1})
    assert not epochs[0] & epochs[1]
    assert not epochs[1] & epochs[2]


def test_the_window_changes_which_bins_share_a_step():
    """Control: the invariance above is not that of a window that does nothing."""
    layout = {"lengths": heavy_tail()[:2000] % 60 + 4, "bins_per_batch": 1}
    assert micro_batches_by_step(4, 1, 0, balance_window=8, **layout) != micro_batches_by_step(
        4, 1, 0, balance_window=1, **layout
    )
