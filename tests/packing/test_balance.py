"""Micro-batches of a slot cost about the same, and every optimizer step stays a fair sample."""

from functools import cache

import numpy as np

from trl_packing.packing.balance import balanced_order
from trl_packing.packing.bins import pack
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


def steps_of(window: int) -> np.ndarray:
    """Return the bins of every step, (steps, RANKS, 1); bins are in random order."""
    return balanced_order(
        costs(),
        tokens=planned().tokens,
        documents=np.diff(planned().offsets),
        slots=RANKS,
        bins_per_batch=1,
        window=window,
        rng=np.random.default_rng(0),
    )


def imbalance(steps: np.ndarray) -> float:
    """Return the mean over steps of max / mean cost of their micro-batches."""
    slots = costs()[steps].sum(2)
    return float((slots.max(1) / slots.mean(1)).mean())


def variation(steps: np.ndarray) -> float:
    """Return the std over steps of the mean length of their documents."""
    bins = steps.reshape(len(steps), -1)
    plan = planned()
    return float((plan.tokens[bins].sum(1) / np.diff(plan.offsets)[bins].sum(1)).std())


def test_ranks_wait_little_and_steps_vary_no_more_than_random_ones():
    random, found = steps_of(1), steps_of(DEFAULT)
    assert imbalance(found) <= 1.05
    assert variation(found) <= 1.2 * variation(random)
    # The controls: random steps are uneven, and an epoch sorted by cost is unfair.
    assert imbalance(random) > 1.2
    by_cost = np.argsort(-costs())[: len(costs()) // RANKS * RANKS].reshape(-1, RANKS, 1)
    assert imbalance(by_cost) <= 1.05
    assert variation(by_cost) > 3 * variation(random)


def test_the_costliest_bin_is_as_likely_in_every_step():
    """Of 30 steps in windows of 10, over 600 epochs: 20 times each, within 4.5 σ of binomial."""
    rng = np.random.default_rng(0)
    found = np.zeros(30)
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
