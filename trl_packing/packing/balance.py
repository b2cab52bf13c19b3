"""Assign bins to optimizer steps so that ranks rarely wait, and steps of a mixture are fair.

A slot lasts as long as its costliest micro-batch, and with many ranks nearly every random step has
one with a long document. So in windows of a random epoch, a share of each step is gathered by cost:
the smallest that makes slots even. The other bins fill steps so that their mean document length
varies no more than at random. Every document is equally likely in every step
(benchmarks/results/balance.md). All sums are of integers, or exact: every machine finds one order.
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
    lowest = _unevenness(best, costs)
    limit = FAIR * _variation(best, tokens, documents)
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

    Ordinary bins of many short documents come first, then other ordinary ones, in random order,
    then costly bins, the cheapest first.
    """
    bins = windows.reshape(len(windows), -1)
    cost = costs[bins]
    middle = cost.shape[1] // 2
    median = np.partition(cost, middle, axis=1)[:, middle, None]
    keys = np.maximum(cost, COSTLY_FROM * median)
    order = np.argsort(-keys, axis=1, kind="stable")
    bins = np.take_along_axis(bins, order, 1)
    keys = np.take_along_axis(keys, order, 1)
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


def arranged(steps: np.ndarray, costs: np.ndarray, slots: int) -> np.ndarray:
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


# --- fair steps --------------------------------------------------------------------------------


def excess_of_parts(
    sources: np.ndarray, lengths: np.ndarray, part_of: np.ndarray, number: int
) -> np.ndarray:
    """Return how far each part, a bin or a document, is from a fair one; 0 for a fair step.

    In the first row are the tokens beyond those of as many documents of mean length; in the others,
    the tokens of sources beyond their share of the part, ÷ √share: a small source varies as much as
    a large one at random. The largest source is left out; of many, the smallest are one.

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
    total = lengths.sum(dtype=np.int64)
    of_parts = tokens.sum(0)
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
        keys: integers; only two of equal keys change places, so ranks wait no longer.
        rng: draws the steps and elements that are compared.
    """
    num_steps = -(-len(order) // size)
    if min(num_steps, size) < 2 or not len(excess):
        return order
    # The last step may be shorter: one more element, which has a key of its own and is never
    # exchanged, fills the places that it lacks.
    steps = np.full(num_steps * size, len(keys), order.dtype)
    steps[: len(order)] = order
    steps = steps.reshape(num_steps, size)
    excess = np.pad(excess, ((0, 0), (0, 1)))
    keys = np.append(keys, keys.max() + 1)
    steps = np.take_along_axis(steps, np.argsort(keys[steps], axis=1, kind="stable"), 1)
    sums = excess[:, steps].sum(2)
    half = num_steps // 2
    for turn in range(_ROUNDS):
        # Steps with too little of a source exchange with those that have too much.
        by_sum = np.argsort(sums[turn % len(sums)], kind="stable")
        pairs = np.stack([rng.permutation(by_sum[:half]), rng.permutation(by_sum[-half:])])
        columns = rng.permutation(size)[:_CANDIDATES]
        for at in range(0, half, _PAIRS_AT_ONCE):
            one, other = pairs[:, at : at + _PAIRS_AT_ONCE]
            mine = steps[one][:, columns, None]
            yours = steps[other][:, None, columns]
            # Of Σ excess² of both steps, ÷ 2: (pairs, columns, columns).
            change = np.zeros((len(one), len(columns), len(columns)))
            for values, of_steps in zip(excess, sums, strict=True):
                moved = values[yours] - values[mine]
                change += moved * (moved + (of_steps[one] - of_steps[other])[:, None, None])
            change[keys[yours] != keys[mine]] = 0
            changes = change.reshape(len(one), -1)
            best = changes.argmin(1)
            better = np.flatnonzero(changes.min(1) < 0)
            one, other, best = one[better], other[better], best[better]
            at_one = columns[best // len(columns)]
            at_other = columns[best % len(columns)]
            given, taken = steps[one, at_one], steps[other, at_other]
            steps[one, at_one], steps[other, at_other] = taken, given
            moved = excess[:, taken] - excess[:, given]
            sums[:, one] += moved
            sums[:, other] -= moved
    return steps.ravel()[: len(order)]
