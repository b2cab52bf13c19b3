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

All sums are of integers, or exact, so that every machine finds the same order.
"""

import math

import numpy as np

EVEN = 1.05  # max / mean cost of micro-batches, averaged over steps, that is good enough
FAIR = 1.15  # limit on the variation of document length between steps, ÷ that of random steps
SHARES = tuple(i / 16 for i in range(2, 16))  # share of a step's bins that is gathered by cost
COSTLY_FROM = 1.01  # a bin is costly from this multiple of its window's median cost


def balanced_order(
    costs: np.ndarray,
    *,
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
    windows = [
        (*_by_cost(bins, costs, excess), rng.permuted(_positions(bins), axis=1))
        for bins in _windows(random_steps, window)
    ]
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


def _windows(steps: np.ndarray, window: int) -> list[np.ndarray]:
    """Return the steps in windows of nearly equal size, as arrays of (windows, steps, bins)."""
    num_windows = -(-len(steps) // window)
    width, num_wider = divmod(len(steps), num_windows)
    halves = np.split(steps, [num_wider * (width + 1)])
    shapes = [(num_wider, width + 1), (num_windows - num_wider, width)]
    return [
        half.reshape(*shape, steps.shape[1])
        for half, shape in zip(halves, shapes, strict=True)
        if half.size
    ]


def _positions(windows: np.ndarray) -> np.ndarray:
    return np.tile(np.arange(windows.shape[1]), (len(windows), 1))


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
