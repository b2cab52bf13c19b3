"""Steps exchange bins until each holds its share of every source, and nothing else changes."""

import numpy as np

from trl_packing import PackedBatchSampler
from trl_packing.packing.balance import COSTLY_FROM
from trl_packing.packing.draw import MixtureDraw

CAPACITY = 2048


def three_sources(number: int = 8000):
    """Return lengths and sources: 92 % of the tokens, 6 %, and 2 % in short documents."""
    rng = np.random.default_rng(1)
    sources = rng.choice(3, number, p=[0.87, 0.03, 0.1])
    means = np.array([350, 700, 70])[sources]
    lengths = rng.lognormal(np.log(means) - 0.2, 0.6).astype(int).clip(8, CAPACITY)
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
    batches = PackedBatchSampler(lengths, CAPACITY, **options).micro_batches()
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
