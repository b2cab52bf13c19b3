"""From the bins of an epoch to its micro-batches, in the order of training.

bins            in random order, the full steps balanced (balance.py)
full steps      slots × bins_per_batch bins each; a slot is one micro-batch of one rank
last step       the bins that are left, split until every rank has equally many micro-batches

Which bins share an optimizer step, and which run at the same moment, so that ranks rarely wait.

    window     some steps of the shuffled epoch, their bins by cost
                   9 8 8 7 5 . . . . . . . . . . .          . ordinary: not worth sorting, at random
    share      of each step, gathered by cost, one step after the other
                   step 0: 9 8       step 1: 8 7       step 2: 5 .       step 3: . .
    spared     bins fill the steps so that all have about the same mean document length
    step       bins -> micro-batches of equal cost -> the costliest first, so that those of a slot,
               which run on different ranks at the same moment, are alike

A slot lasts as long as its costliest micro-batch. Bins of one capacity differ in cost by their long
documents, and random steps of many ranks nearly all have one. An epoch sorted by cost gathers them,
in steps of nothing else. Here only a share of each step is gathered, inside windows of a random
epoch: the least share that makes slots even, of those that leave steps fair. Every document is
equally likely in every step, and the mean document length of steps varies no more than in random
ones. What cannot be had: tokens of long documents do come together (benchmarks/results/balance.md).

Sums are of integers, or exact, so that every machine finds the same order.
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trl_packing.packing.bins import PackingPlan

EVEN = 1.05  # mean over steps of max / mean cost that is good enough
FAIR = 1.15  # most variation of steps in document length, ÷ that of random steps
SHARES = tuple(i / 16 for i in range(2, 16))  # of the bins of a step, gathered by cost

# How far above the median bin of its window a bin is costly at all.
COSTLY_FROM = 1.01


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

    costs: of each bin in a random order, (bins,) integers; what does not fill a step is left out.
    tokens, documents: of each bin, (bins,) integers.
    slots: micro-batches of a step, ranks × accumulation; nothing here depends on either alone.
    window: steps among which bins are exchanged; 1 leaves every step as it is.

    Steps that are even as they are stay random ones. O(bins · log bins).

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
    at_random = np.arange(len(costs) // size * size).reshape(-1, size)
    best = _arranged(at_random, costs, slots)
    if min(window, slots, len(at_random)) < 2:
        return best
    # Steps of equal sums have documents of equal mean length; whole numbers add up exactly.
    excess = tokens - documents * (tokens.sum() // documents.sum())
    windows = [
        (*_by_cost(bins, costs, excess), rng.permuted(_positions(bins), axis=1))
        for bins in _windows(at_random, window)
    ]
    lowest, limit = _unevenness(best, costs), FAIR * _variation(best, tokens, documents)
    for num_costly in sorted({round(share * size) for share in SHARES} - {0}):
        if lowest <= EVEN:
            break
        parts = [_dealt(*bins, num_costly, excess) for bins in windows]
        order = _arranged(np.concatenate(parts), costs, slots)
        unevenness = _unevenness(order, costs)
        if unevenness < lowest and _variation(order, tokens, documents) <= limit:
            best, lowest = order, unevenness
    return best


def _windows(steps: np.ndarray, window: int) -> list[np.ndarray]:
    """Return the steps in windows of nearly equal size, each array (windows, steps, bins)."""
    num_windows = -(-len(steps) // window)
    width, num_wider = divmod(len(steps), num_windows)
    wider, rest = np.split(steps, [num_wider * (width + 1)])
    sizes = [(num_wider, width + 1), (num_windows - num_wider, width)]
    parts = zip((wider, rest), sizes, strict=True)
    return [part.reshape(*size, steps.shape[1]) for part, size in parts if part.size]


def _positions(windows: np.ndarray) -> np.ndarray:
    return np.tile(np.arange(windows.shape[1]), (len(windows), 1))


def _by_cost(
    windows: np.ndarray, costs: np.ndarray, excess: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins of each window by falling cost, and which of them are spared, first to last.

    Bins of ordinary cost stay in random order. To fill the steps that have costly bins, those of
    many short documents are spared first; then the others; then costly ones, the cheapest first.
    """
    bins = windows.reshape(len(windows), -1)
    each = costs[bins]
    median = np.partition(each, each.shape[1] // 2, axis=1)[:, each.shape[1] // 2, None]
    keys = np.maximum(each, COSTLY_FROM * median)
    order = np.argsort(-keys, axis=1, kind="stable")
    bins, keys = np.take_along_axis(bins, order, 1), np.take_along_axis(keys, order, 1)
    spared = np.lexsort((excess[bins] * (keys == keys[:, -1:]), keys), axis=1)
    return bins.reshape(windows.shape), spared


def _dealt(
    windows: np.ndarray,
    spared: np.ndarray,
    positions: np.ndarray,
    num_costly: int,
    excess: np.ndarray,
) -> np.ndarray:
    """Return the bins of `windows` dealt out to the steps inside each, (steps, bins of a step).

    windows: bins by falling cost, (windows, steps, bins).
    spared: the order in which they leave it to fill the steps, (windows, steps · bins); of those
        that stay, each step takes the next `num_costly`.
    positions: the order of the new steps, which would begin with the costliest, (windows, steps).
    """
    num_windows, width, size = windows.shape
    fills = np.zeros(spared.shape, dtype=bool)
    np.put_along_axis(fills, spared[:, : width * (size - num_costly)], True, 1)
    order = np.argsort(fills, axis=1, kind="stable")
    bins = np.take_along_axis(windows.reshape(num_windows, -1), order, 1)
    dealt = np.empty_like(windows)
    dealt[..., :num_costly] = bins[:, : width * num_costly].reshape(num_windows, width, -1)
    sums = excess[dealt[..., :num_costly]].sum(axis=2)
    for at in range(num_costly, size):
        layer = bins[:, width * at : width * (at + 1)]
        layer = np.take_along_axis(layer, np.argsort(excess[layer], axis=1, kind="stable"), 1)
        highest = np.argsort(-sums, axis=1, kind="stable")  # it gets the bin of least excess
        np.put_along_axis(dealt[..., at], highest, layer, 1)
        sums += excess[dealt[..., at]]
    return np.take_along_axis(dealt, positions[..., None], 1).reshape(-1, size)


def _arranged(steps: np.ndarray, costs: np.ndarray, slots: int) -> np.ndarray:
    """Return micro-batches of equal cost, the costliest first, (steps, slots, bins in each).

    The bins of a step are dealt in layers, the costliest layer first; of each layer the costliest
    bin goes to the cheapest micro-batch so far.
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
    """Return the mean over steps of max / mean cost of their micro-batches."""
    each = costs[order].sum(axis=2)
    return math.fsum(each.max(axis=1) * each.shape[1] / each.sum(axis=1)) / len(each)


def _variation(order: np.ndarray, tokens: np.ndarray, documents: np.ndarray) -> float:
    """Return the standard deviation over steps of the mean length of their documents."""
    lengths = tokens[order].sum(axis=(1, 2)) / documents[order].sum(axis=(1, 2))
    return math.sqrt(math.fsum((lengths - math.fsum(lengths) / len(lengths)) ** 2) / len(lengths))


@dataclass(frozen=True, eq=False)
class PackedSteps:
    """The micro-batches of all ranks; documents are looked up when one is asked for.

    bins: of each micro-batch of the full steps, (micro-batches, bins_per_batch).
    last: documents of each micro-batch of the last step.
    """

    plan: PackingPlan
    bins: np.ndarray
    last: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.bins) + len(self.last)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def most_documents(self) -> int:
        """Return the documents of the micro-batch that has most of them."""
        of_full = np.diff(self.plan.offsets)[self.bins].sum(1)
        return max(int(of_full.max(initial=0)), max(map(len, self.last), default=0))

    def documents_in_first(self, number: int) -> np.ndarray:
        """Return the documents of the first `number` micro-batches, in any order."""
        is_taken = np.zeros(len(self.plan), bool)
        is_taken[self.bins[:number]] = True
        of_full = self.plan.indices[np.repeat(is_taken, np.diff(self.plan.offsets))]
        return np.concatenate([of_full, *self.last[: max(number - len(self.bins), 0)]])

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the documents of a micro-batch."""
        if index >= len(self.bins):
            return self.last[index - len(self.bins)]
        return np.concatenate([self.plan[i] for i in self.bins[index]])


def steps_from_plan(
    plan: PackingPlan,
    lengths: np.ndarray,
    *,
    num_ranks: int,
    accumulation: int,
    bins_per_batch: int,
    attention_cost: float,
    balance_window: int,
    rng: np.random.Generator | None,
) -> PackedSteps:
    """Return an epoch of micro-batches; without `rng` bins keep their order.

    The last step deals what is left to as few rounds of ranks as hold it, evenly; so the bins of
    each step depend on ranks × accumulation alone.
    """
    slots = num_ranks * accumulation
    bins = np.arange(len(plan)) if rng is None else rng.permutation(len(plan))
    num_full = len(bins) - len(bins) % (slots * bins_per_batch)
    full, rest = bins[:num_full].reshape(-1, bins_per_batch), bins[num_full:]
    if rng is not None and len(full):
        order = balanced_order(
            _costs(plan, lengths, attention_cost)[bins],
            tokens=plan.tokens[bins],
            documents=np.diff(plan.offsets)[bins],
            slots=slots,
            bins_per_batch=bins_per_batch,
            window=balance_window,
            rng=rng,
        )
        full = bins[order].reshape(full.shape)
    num_last = -(-len(rest) // (bins_per_batch * num_ranks)) * num_ranks
    return PackedSteps(plan, full, _split_evenly([plan[i] for i in rest], num_last))


def _costs(plan: PackingPlan, lengths: np.ndarray, attention_cost: float) -> np.ndarray:
    """Return tokens + c · Σ len² of each bin, in whole tokens."""
    squares = lengths[plan.indices].astype(np.int64)
    squares *= squares
    squares = np.add.reduceat(squares, plan.offsets[:-1])
    return plan.tokens + (attention_cost * squares).astype(np.int64)


def _split_evenly(bins: list[np.ndarray], number: int) -> list[np.ndarray]:
    """Return `number` micro-batches of about equally many bins, which are split if too few."""
    bins = _split_until(bins, number)
    sizes = [(len(bins) + i) // number for i in reversed(range(number))]
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [_concatenated(bins[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def _concatenated(bins: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(bins) if bins else np.empty(0, dtype=np.int64)


def _split_until(bins: list[np.ndarray], target: int) -> list[np.ndarray]:
    """Return at least `target` bins by halving the fullest ones, where any holds two documents."""
    bins = list(bins)
    while len(bins) < target:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        if len(bins[fullest]) < 2:
            break
        half = len(bins[fullest]) // 2
        bins.append(bins[fullest][half:])
        bins[fullest] = bins[fullest][:half]
    return bins
