"""Micro-batches of a slot cost about the same, and every optimizer step stays a fair sample.

Steps of a mixture exchange bins until each holds its share of every source.
"""

from functools import cache

import numpy as np

from trl_packing import PackedBatchSampler, pack
from trl_packing.packing.balance import COSTLY_FROM, balanced_order
from trl_packing.packing.draw import MixtureDraw

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


# --- sources --------------------------------------------------------------------------------------

FAIR_CAPACITY = 2048


def three_sources(number: int = 8000):
    """Return lengths and sources: 92 % of the tokens, 6 %, and 2 % in short documents."""
    rng = np.random.default_rng(1)
    sources = rng.choice(3, number, p=[0.87, 0.03, 0.1])
    means = np.array([350, 700, 70])[sources]
    lengths = rng.lognormal(np.log(means) - 0.2, 0.6).astype(int).clip(8, FAIR_CAPACITY)
    return lengths, sources


def drawn_once(sources) -> MixtureDraw:
    return MixtureDraw(sources, np.bincount(sources), seed=3)


def shares_of_steps(steps, lengths, sources) -> np.ndarray:
    """Return the share of each source in the tokens of every step, (steps, sources)."""
    tokens = [np.bincount(sources[step], lengths[step], sources.max() + 1) for step in steps]
    return np.array([of_step / of_step.sum() for of_step in tokens])


def packed(lengths, sources, *, fair: bool):
    """Return the micro-batches of an epoch of bins on two ranks, without the last step."""
    draw = drawn_once(sources) if fair else None
    options = {"num_ranks": 2, "accumulation": 4, "attention_cost": 1e-4, "draw": draw}
    batches = PackedBatchSampler(lengths, FAIR_CAPACITY, **options).micro_batches()
    return batches[: len(batches) // 8 * 8]


def in_steps(batches, slots: int = 8) -> list[np.ndarray]:
    return [np.concatenate(batches[at : at + slots]) for at in range(0, len(batches), slots)]


def test_steps_of_bins_hold_a_fair_share_of_every_source():
    lengths, sources = three_sources()
    random, fair = (
        shares_of_steps(in_steps(packed(lengths, sources, fair=fair)), lengths, sources).std(0)
        for fair in (False, True)
    )
    assert len(random) == 3
    assert (fair < 0.35 * random).all(), (fair, random)
    # Control: random steps vary by more than half of what the small sources have.
    assert random[2] > 0.01


def test_exchanged_bins_leave_ranks_as_even_and_documents_as_they_are():
    lengths, sources = three_sources()
    batches = {fair: packed(lengths, sources, fair=fair) for fair in (False, True)}
    assert {tuple(batch) for batch in batches[True]} != {tuple(batch) for batch in batches[False]}
    unevenness, variation = {}, {}
    for fair, found in batches.items():
        costs = np.array([lengths[b].sum() + 1e-4 * (lengths[b] ** 2).sum() for b in found])
        slots = costs.reshape(-1, 2)  # two ranks
        unevenness[fair] = (slots.max(1) / slots.mean(1)).mean()
        variation[fair] = np.std([lengths[step].mean() for step in in_steps(found)])
    assert unevenness[True] <= unevenness[False] * COSTLY_FROM
    assert variation[True] < 0.5 * variation[False], "mean length of the documents of a step"
