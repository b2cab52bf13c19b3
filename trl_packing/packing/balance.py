"""Assign bins to optimizer steps so that ranks rarely wait.

A slot lasts as long as its costliest micro-batch, and with many ranks nearly every random step has
one with a long document. So in windows of a random epoch, a share of each step is gathered by cost:
the smallest that makes slots even. The other bins fill steps so that their mean document length
varies no more than at random. Every document is equally likely in every step
(benchmarks/results/balance.md). All sums are of integers, or exact: every machine finds one order.
"""

import math

import numpy as np

_EVEN = 1.05  # max / mean cost of micro-batches, averaged over steps, that is good enough
_FAIR = 1.15  # limit on the variation of document length between steps, ÷ that of random steps
_SHARES = tuple(i / 16 for i in range(2, 16))  # share of a step's bins that is gathered by cost
_COSTLY_FROM = 1.01  # a bin is costly from this multiple of its window's median cost


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
        costs: of each bin, in a random order, (bins,) integers. Bins at the end that do not fill a
            step are left out.
        tokens: in each bin, (bins,) integers.
        documents: in each bin, (bins,) integers.
        slots: micro-batches in a step, ranks × accumulation.
        bins_per_batch: bins in a micro-batch.
        window: number of steps that exchange bins; 1 leaves every step as it is.
        rng: shuffles the new steps of each window.
    """
    size = slots * bins_per_batch
    random_steps = np.arange(len(costs) // size * size).reshape(-1, size)
    best = _arranged(random_steps, costs, slots)
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
    lowest, limit = _unevenness(best, costs), _FAIR * _variation(best, tokens, documents)
    for num_costly in sorted({round(share * size) for share in _SHARES} - {0}):
        if lowest <= _EVEN:
            break
        steps = np.concatenate([_dealt(*bins, num_costly, excess) for bins in windows])
        order = _arranged(steps, costs, slots)
        unevenness = _unevenness(order, costs)
        if unevenness < lowest and _variation(order, tokens, documents) <= limit:
            best, lowest = order, unevenness
    return best


def _by_cost(
    windows: np.ndarray, costs: np.ndarray, excess: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins of each window by falling cost, and the order in which they fill steps.

    Ordinary bins of many short documents come first, then other ordinary ones, in random order,
    then costly bins, the cheapest first.
    """
    bins = windows.reshape(len(windows), -1)
    cost = costs[bins]
    median = np.partition(cost, cost.shape[1] // 2, axis=1)[:, cost.shape[1] // 2, None]
    keys = np.maximum(cost, _COSTLY_FROM * median)
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
        positions: new places of the steps, (windows, steps).
        num_costly: bins of each step that are gathered by cost.
        excess: of each bin, tokens above the mean for its number of documents.
    """
    num_windows, width, size = windows.shape
    fills = np.zeros(fill_order.shape, dtype=bool)
    np.put_along_axis(fills, fill_order[:, : width * (size - num_costly)], True, 1)
    order = np.argsort(fills, axis=1, kind="stable")
    bins = np.take_along_axis(windows.reshape(num_windows, -1), order, 1)
    costly = bins[:, : width * num_costly].reshape(num_windows, width, -1)
    layers = bins[:, width * num_costly :].reshape(num_windows, -1, width)
    layers = np.take_along_axis(layers, np.argsort(excess[layers], axis=2, kind="stable"), 2)
    _deal(layers, -excess, sums=-excess[costly].sum(axis=2))
    dealt = np.concatenate([costly, layers.transpose(0, 2, 1)], axis=2)
    return np.take_along_axis(dealt, positions[..., None], 1).reshape(-1, size)


def _arranged(steps: np.ndarray, costs: np.ndarray, slots: int) -> np.ndarray:
    """Return micro-batches of about equal cost, the costliest first, (steps, slots, bins in each).

    Of each layer of bins, the costliest goes to the micro-batch that is the cheapest so far.
    """
    by_cost = np.take_along_axis(steps, np.argsort(-costs[steps], axis=1, kind="stable"), 1)
    layers = by_cost.reshape(len(steps), steps.shape[1] // slots, slots)
    sums = np.zeros((len(steps), slots), costs.dtype)
    _deal(layers, costs, sums)
    order = np.argsort(-sums, axis=1, kind="stable")
    return np.take_along_axis(layers, order[:, None], 2).transpose(0, 2, 1)


def _deal(layers: np.ndarray, values: np.ndarray, sums: np.ndarray) -> None:
    """Give the first bin of each layer to the column whose sum is the lowest so far, and so on.

    `layers`, (rows, layers, columns), and `sums` of the values of columns are changed in place.
    """
    for at in range(layers.shape[1]):
        lowest = np.argsort(sums, axis=1, kind="stable")
        layer = layers[:, at].copy()
        np.put_along_axis(layers[:, at], lowest, layer, 1)
        sums += values[layers[:, at]]


def _unevenness(order: np.ndarray, costs: np.ndarray) -> float:
    """Return max / mean cost of the micro-batches of a step, averaged over steps."""
    cost = costs[order].sum(axis=2)
    return math.fsum(cost.max(axis=1) * cost.shape[1] / cost.sum(axis=1)) / len(cost)


def _variation(order: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> float:
    """Return the standard deviation, over steps, of the mean document length of a step."""
    lengths = tokens[order].sum(axis=(1, 2)) / documents[order].sum(axis=(1, 2))
    return math.sqrt(math.fsum((lengths - math.fsum(lengths) / len(lengths)) ** 2) / len(lengths))
