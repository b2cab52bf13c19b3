"""Assign bins to optimizer steps so that ranks rarely wait for each other.

    window      some steps of the shuffled epoch, their bins by cost
                    9 8 8 7 5 . . . . . . . . . . .          . ordinary: not sorted, at random
    costly      a share of each step is gathered by cost, one step after the other
                    step 0: 9 8       step 1: 8 7       step 2: 5 .       step 3: . .
    fill        the other bins fill the steps so that all have about the same mean document length
    step        bins -> micro-batches of equal cost -> the costliest first, so that the
                micro-batches of a slot, which run on different ranks at once, cost about the same

A slot lasts as long as its costliest micro-batch. Bins of one capacity differ in cost by their long
documents, and with many ranks nearly every random step has such a bin. Sorting the whole epoch by
cost would gather them in steps of their own. Here, only a share of each step is gathered, within
windows of a random epoch: the smallest share that makes slots even, among those that keep steps
fair. Every document is equally likely in every step, and the mean document length of steps varies
no more than in random steps. Limitation: tokens of long documents still cluster
(benchmarks/results/balance.md).

Steps of a mixture are then made fair: they exchange bins, or documents, of several sources.

    bins of 4 tokens       step 0        step 1        step 2        tokens of b
    at random              aaab aaaa     abbb aabb     aaaa aaaa     1 5 0
    exchanged              aaab aaaa     abbb aaaa     aabb aaaa     1 3 2

Two steps exchange a bin of each if that brings both closer to the shares that sources have of the
tokens of the epoch, and to its mean document length. Only bins of about equal cost change places,
so ranks wait no longer than before. Every document remains equally likely in every full step,
because the rule does not depend on the number of a step.

All sums are of integers, or exact, so that every machine finds the same order.
"""

import math

import numpy as np

EVEN = 1.05  # max / mean cost of micro-batches, averaged over steps, that is good enough
FAIR = 1.15  # limit on the variation of document length between steps, ÷ that of random steps
SHARES = tuple(i / 16 for i in range(2, 16))  # share of a step's bins that is gathered by cost
COSTLY_FROM = 1.01  # a bin is costly from this multiple of its window's median cost

_ROUNDS = 48  # in each, a step exchanges at most once
_CANDIDATES = 8  # bins of a step that are compared in a round
_PAIRS_AT_ONCE = 1024  # their comparisons stay in the processor's cache
_MOST_SOURCES = 8  # beside them, all smaller ones count as one source
_MOST_NUMBERS = 1 << 25  # of sources × documents, 256 MiB; above, fewer sources


def balanced_order(
    costs: np.ndarray,
    tokens: np.ndarray,
    documents: np.ndarray,
    slots: int,
    bins_per_batch: int,
    window: int,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return the order of the bins of an epoch, (steps, slots, bins_per_batch) int64.

    Random steps that are even enough already stay as they are. O(bins · log bins).

    Args:
        costs: cost of each bin, in a random order, (bins,) integers. Bins at the end that do not
            fill a step are left out.
        tokens: tokens in each bin, (bins,) integers.
        documents: documents in each bin, (bins,) integers.
        slots: micro-batches in a step, ranks × accumulation. The order depends on the product only.
        bins_per_batch: bins in a micro-batch.
        window: number of steps that exchange bins; 1 leaves every step as it is.
        rng: shuffles the new steps of each window.

    Examples:
        >>> order = balanced_order(
        ...     np.array([9, 1, 1, 9, 9, 1, 1, 9]),
        ...     tokens=np.full(8, 8),
        ...     documents=np.full(8, 2),
        ...     slots=2,
        ...     bins_per_batch=1,
        ...     window=4,
        ...     rng=np.random.default_rng(0),
        ... )
        >>> order[..., 0].tolist()
        [[6, 2], [4, 0], [5, 1], [7, 3]]
    """
    size = slots * bins_per_batch
    random_steps = np.arange(len(costs) // size * size).reshape(-1, size)
    best = arranged(random_steps, costs, slots)
    if min(window, slots, len(random_steps)) < 2:
        return best
    # Steps with equal sums of it have equal mean document lengths; integers add up exactly.
    excess = tokens - documents * (tokens.sum() // documents.sum())
    # Windows of nearly equal size: some are a step wider.
    num_windows = -(-len(random_steps) // window)
    width, num_wider = divmod(len(random_steps), num_windows)
    halves = np.split(random_steps, [num_wider * (width + 1)])
    windows = []
    for half, number in zip(halves, (num_wider, num_windows - num_wider), strict=True):
        if number:
            bins = half.reshape(number, -1, size)
            places = np.tile(np.arange(bins.shape[1]), (number, 1))
            windows.append((*_by_cost(bins, costs, excess), rng.permuted(places, axis=1)))
    lowest, limit = _unevenness(best, costs), FAIR * _variation(best, tokens, documents)
    for num_costly in sorted({round(share * size) for share in SHARES} - {0}):
        if lowest <= EVEN:
            break
        steps = np.concatenate([_dealt(*bins, num_costly, excess) for bins in windows])
        order = arranged(steps, costs, slots)
        unevenness = _unevenness(order, costs)
        if unevenness < lowest and _variation(order, tokens, documents) <= limit:
            best, lowest = order, unevenness
    return best


def _by_cost(
    windows: np.ndarray, costs: np.ndarray, excess: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins of each window by falling cost, and the order in which they fill steps.

    Bins of ordinary cost stay in random order. Steps that already have costly bins are filled first
    with ordinary bins of many short documents, then with other ordinary bins, then with costly
    bins, the cheapest first.
    """
    bins = windows.reshape(len(windows), -1)
    cost = costs[bins]
    median = np.partition(cost, cost.shape[1] // 2, axis=1)[:, cost.shape[1] // 2, None]
    keys = np.maximum(cost, COSTLY_FROM * median)
    order = np.argsort(-keys, axis=1, kind="stable")
    bins, keys = np.take_along_axis(bins, order, 1), np.take_along_axis(keys, order, 1)
    fill_order = np.lexsort((excess[bins] * (keys == keys[:, -1:]), keys), axis=1)
    return bins.reshape(windows.shape), fill_order


def _dealt(
    windows: np.ndarray,
    fill_order: np.ndarray,
    positions: np.ndarray,
    num_costly: int,
    excess: np.ndarray,
) -> np.ndarray:
    """Return the bins of each window dealt to its steps, (steps, bins per step).

    Args:
        windows: bins by falling cost, (windows, steps, bins).
        fill_order: order in which bins are chosen to fill steps, (windows, steps · bins). Of the
            others, each step takes the next `num_costly`.
        positions: new places of the steps, (windows, steps); without them the costliest is first.
        num_costly: bins of each step that are gathered by cost.
        excess: of each bin, tokens above the mean for its number of documents.
    """
    num_windows, width, size = windows.shape
    fills = np.zeros(fill_order.shape, dtype=bool)
    np.put_along_axis(fills, fill_order[:, : width * (size - num_costly)], True, 1)
    order = np.argsort(fills, axis=1, kind="stable")
    bins = np.take_along_axis(windows.reshape(num_windows, -1), order, 1)
    dealt = np.empty_like(windows)
    dealt[..., :num_costly] = bins[:, : width * num_costly].reshape(num_windows, width, -1)
    sums = excess[dealt[..., :num_costly]].sum(axis=2)
    for at in range(num_costly, size):
        layer = bins[:, width * at : width * (at + 1)]
        layer = np.take_along_axis(layer, np.argsort(excess[layer], axis=1, kind="stable"), 1)
        highest = np.argsort(-sums, axis=1, kind="stable")  # gets the bin of least excess
        np.put_along_axis(dealt[..., at], highest, layer, 1)
        sums += excess[dealt[..., at]]
    return np.take_along_axis(dealt, positions[..., None], 1).reshape(-1, size)


def arranged(steps: np.ndarray, costs: np.ndarray, slots: int) -> np.ndarray:
    """Return micro-batches of about equal cost, the costliest first, (steps, slots, bins in each).

    The bins of a step are dealt in layers, the costliest layer first. In each layer, the costliest
    bin goes to the micro-batch that is the cheapest so far.
    """
    by_cost = np.take_along_axis(steps, np.argsort(-costs[steps], axis=1, kind="stable"), 1)
    layers = by_cost.reshape(len(steps), steps.shape[1] // slots, slots)
    sums = costs[layers[:, 0]]
    for at in range(1, layers.shape[1]):
        cheapest = np.argsort(sums, axis=1, kind="stable")
        layer = layers[:, at].copy()
        np.put_along_axis(layers[:, at], cheapest, layer, 1)
        sums += costs[layers[:, at]]
    order = np.argsort(-sums, axis=1, kind="stable")
    return np.take_along_axis(layers, order[:, None], 2).transpose(0, 2, 1)


def _unevenness(order: np.ndarray, costs: np.ndarray) -> float:
    """Return max / mean cost of the micro-batches of a step, averaged over steps."""
    cost = costs[order].sum(axis=2)
    return math.fsum(cost.max(axis=1) * cost.shape[1] / cost.sum(axis=1)) / len(cost)


def _variation(order: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> float:
    """Return the standard deviation, over steps, of the mean document length of a step."""
    lengths = tokens[order].sum(axis=(1, 2)) / documents[order].sum(axis=(1, 2))
    return math.sqrt(math.fsum((lengths - math.fsum(lengths) / len(lengths)) ** 2) / len(lengths))


# --- fair steps --------------------------------------------------------------------------------


def excess_of_parts(
    sources: np.ndarray, lengths: np.ndarray, part_of: np.ndarray, number: int
) -> np.ndarray:
    """Return how far each part is from a fair one: in its documents, and in the tokens of sources.

    A step is fair where the sums of its parts, bins or single documents, are 0. In the first row
    are the tokens beyond those of as many documents of mean length. The others have the tokens of
    sources beyond their share of the part, ÷ √share: a small source varies as much as a large one
    in random steps. The largest source is left out, because it has the remaining tokens; of many
    sources, the smallest are one.

    Args:
        sources: source of each document, ``(documents,)`` integers from 0.
        lengths: tokens of each, ``(documents,)`` integers.
        part_of: part of each, ``(documents,)`` integers from 0.
        number: of parts.

    Returns:
        Whole numbers, (sources, parts) float64, none with a single source.

    Examples:
        >>> sources, lengths = np.array([0, 0, 0, 1]), np.array([4, 1, 4, 3])
        >>> excess_of_parts(sources, lengths, np.array([0, 1, 2, 1]), 3).tolist()
        [[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0]]
    """
    by_size = np.argsort(-np.bincount(sources, lengths), kind="stable")
    most = min(_MOST_SOURCES, max(_MOST_NUMBERS // number, 1))
    group = np.minimum(np.argsort(by_size), most)[sources]
    num_groups = int(group.max()) + 1
    tokens = np.bincount(group * number + part_of, lengths, num_groups * number)
    tokens = tokens.reshape(num_groups, number)
    total, of_parts = lengths.sum(dtype=np.int64), tokens.sum(0)
    shares = np.bincount(group, lengths)[:, None] / total
    of_sources = (tokens - shares * of_parts) / np.sqrt(shares)
    of_documents = of_parts - total // len(lengths) * np.bincount(part_of, minlength=number)
    return np.rint([of_documents, *of_sources[1:]])[: None if num_groups > 1 else 0]


def exchange_between_steps(
    order: np.ndarray, size: int, *, excess: np.ndarray, keys: np.ndarray, rng: np.random.Generator
) -> np.ndarray:
    """Return `order` with elements exchanged until steps are as fair as they can be made.

    Those of a step are then in the order of their keys. O(rounds × candidates² × steps).

    Args:
        order: bins or documents in the order of training, ``(N,)`` integers.
        size: of them in a step; the last step may have fewer.
        excess: of all bins or documents, as `excess_of_parts` returns it.
        keys: integers; two of equal keys may change places. Each step keeps as many of each key.
        rng: draws the steps and elements that are compared.
    """
    num_steps, nobody = -(-len(order) // size), len(keys)
    if min(num_steps, size) < 2 or not len(excess):
        return order
    # The last step may be shorter; the places that it lacks are filled, and never exchanged.
    steps = np.full(num_steps * size, nobody, order.dtype)
    steps[: len(order)] = order
    steps = steps.reshape(num_steps, size)
    excess = np.pad(excess, ((0, 0), (0, 1)))
    keys = np.append(keys, keys.max() + 1)
    steps = np.take_along_axis(steps, np.argsort(keys[steps], axis=1, kind="stable"), 1)
    sums, half = excess[:, steps].sum(2), num_steps // 2
    for turn in range(_ROUNDS):
        # Steps with too little of a source exchange with those that have too much.
        by_sum = np.argsort(sums[turn % len(sums)], kind="stable")
        pairs = np.stack([rng.permutation(by_sum[:half]), rng.permutation(by_sum[-half:])])
        columns = rng.permutation(size)[:_CANDIDATES]
        for at in range(0, half, _PAIRS_AT_ONCE):
            one, other = pairs[:, at : at + _PAIRS_AT_ONCE]
            mine, yours = steps[one][:, columns, None], steps[other][:, None, columns]
            # Of Σ excess² of both steps, ÷ 2: (pairs, columns, columns).
            change = np.zeros((len(one), len(columns), len(columns)))
            for values, of_steps in zip(excess, sums, strict=True):
                moved = values[yours] - values[mine]
                change += moved * (moved + (of_steps[one] - of_steps[other])[:, None, None])
            change[keys[yours] != keys[mine]] = 0
            changes = change.reshape(len(one), -1)
            best = changes.argmin(1)
            better = np.flatnonzero(changes[np.arange(len(one)), best] < 0)
            one, other, best = one[better], other[better], best[better]
            at_one, at_other = columns[best // len(columns)], columns[best % len(columns)]
            given, taken = steps[one, at_one], steps[other, at_other]
            steps[one, at_one], steps[other, at_other] = taken, given
            moved = excess[:, taken] - excess[:, given]
            sums[:, one] += moved
            sums[:, other] -= moved
    return steps.ravel()[: len(order)]
