"""Lengths in, bins out: the documents that share a row. Needs NumPy only.

lengths   5 3 2 2 1 1        tokens of each document
capacity  7                  tokens that a bin holds

bin 0     5 2                plan[0] -> documents 0, 2      full
bin 1     3 2 1 1            plan[1] -> documents 1, 3 4 5  full
"""

from bisect import bisect_left, insort
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_packing.packing.remixing import random_order_within, remix, stable_argsort


@dataclass(frozen=True)
class Strategy:
    """The meaning of a strategy's name.

    Attributes:
        packs_as: the strategy that makes the same bins of documents that fit.
        order_dependent: The number of bins depends on the order of documents, so all epochs share
            one plan: an epoch's length must not change.
        shuffles: a seed shuffles the documents.
        overflow: the overflow policy that the name implies, or None.
    """

    packs_as: str
    order_dependent: bool = False
    shuffles: bool = True
    overflow: str | None = None


STRATEGIES = {
    "bfd": Strategy("bfd"),
    "bfd_split": Strategy("bfd", overflow="split"),
    "next_fit": Strategy("next_fit", order_dependent=True),
    "greedy": Strategy("greedy"),
    "wrapped": Strategy("wrapped", order_dependent=True, shuffles=False, overflow="wrapped"),
}


def find_strategy(name: str) -> Strategy:
    """Return the strategy called `name`. Raise ValueError if there is none."""
    if name not in STRATEGIES:
        raise ValueError(f"unknown packing strategy {name!r}; choose one of {tuple(STRATEGIES)}")
    return STRATEGIES[name]


@dataclass(frozen=True, eq=False, repr=False)
class PackingPlan:
    """Bins of document indices, stored flat: bin i is ``indices[offsets[i]:offsets[i + 1]]``.

    Attributes:
        indices: every document once, (documents,) int32 (int64 beyond 2³¹ documents).
        offsets: (bins + 1,) int64, first 0.
        tokens: tokens in each bin, (bins,) int64, at most `capacity`.
        capacity: tokens that a bin may hold.

    Examples:
        >>> plan = pack([5, 3, 2, 2, 1, 1], 7)
        >>> len(plan), plan.utilization, [documents.tolist() for documents in plan]
        (2, 1.0, [[0, 2], [1, 3, 4, 5]])
    """

    indices: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    capacity: int

    def __len__(self) -> int:
        return len(self.offsets) - 1

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the documents of one bin; negative indices count from the end."""
        at = range(len(self))[index]
        return self.indices[self.offsets[at] : self.offsets[at + 1]]

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    @property
    def num_tokens(self) -> int:
        """Return the tokens of all documents."""
        return int(self.tokens.sum())

    @property
    def utilization(self) -> float:
        """Return real tokens / (bins × capacity), in [0, 1]."""
        return self.num_tokens / (len(self) * self.capacity)

    def __repr__(self) -> str:
        return (
            f"PackingPlan({len(self.indices):,} documents in {len(self):,} bins of "
            f"{self.capacity:,} tokens, {self.utilization:.2%} filled)"
        )


def pack(
    lengths: Any, capacity: int, strategy: str = "bfd", seed: int | Sequence[int] | None = None
) -> PackingPlan:
    """Return a plan in which every document is in exactly one bin and no bin exceeds `capacity`.

    Args:
        lengths: tokens of each document: a sequence, NumPy or Arrow array of integers.
        capacity: tokens that a bin may hold.
        strategy: "bfd", best-fit decreasing over the whole set (fewest bins; for language models:
            arXiv 2404.10830). "next_fit", documents in order; a bin closes as soon as the next
            document does not fit. "greedy", the same from the longest document to the shortest
            ("Packing Analysis", arXiv 2410.08081). "wrapped", next-fit in data-set order, whatever
            the seed: pieces cut where rows end fill these rows again. "bfd_split" packs like "bfd".
        seed: None keeps data-set order among equal lengths. Anything `numpy.random.default_rng`
            takes, such as ``(seed, epoch)``, draws other partners for every document and a random
            order of bins. The number of bins stays the same, except for "next_fit", which shuffles
            first.

    Raises:
        ValueError: the strategy is unknown, lengths are missing or no integers, one is below 1, or
            a document is longer than `capacity`.

    Examples:
        >>> [documents.tolist() for documents in pack([2, 4, 3, 1], 5, "next_fit")]
        [[0], [1], [2, 3]]
    """
    chosen = find_strategy(strategy)
    capacity = int(capacity)
    sizes = checked_lengths(lengths, capacity)
    rng = None if seed is None or not chosen.shuffles else np.random.default_rng(seed)
    order = np.arange(len(sizes), dtype=_smallest_integer(len(sizes)))
    if chosen.order_dependent:
        if rng is not None:
            rng.shuffle(order)
    elif rng is None:
        order = order[stable_argsort(capacity - sizes, capacity)]
    else:  # equal lengths in random order
        order = random_order_within(capacity - sizes, capacity, rng).astype(order.dtype)
    in_order = sizes[order]
    if chosen.packs_as == "bfd":
        bin_of = _best_fit_decreasing(in_order, capacity)
        if rng is not None:
            remix(in_order, bin_of, capacity, rng)
    else:  # a bin that starts at a document ends before the first one that exceeds it
        ends = np.append(0, np.cumsum(in_order, dtype=np.int64))
        bin_of = numbered_by_jumps(np.searchsorted(ends, ends[:-1] + capacity, side="right") - 1)
    num_bins = int(bin_of.max()) + 1
    if rng is not None:  # a step takes neighboring bins, which must be a fair sample
        bin_of = rng.permutation(num_bins).astype(bin_of.dtype)[bin_of]
    counts = np.bincount(bin_of, minlength=num_bins)
    return plan_of(order[stable_argsort(bin_of, num_bins)], counts, sizes, capacity)


def checked_lengths(lengths: Any, capacity: int) -> np.ndarray:
    """Return lengths as integers. Raise ValueError for those that cannot be packed."""
    sizes = np.asarray(lengths)
    if not sizes.size or sizes.dtype.kind not in "iu" or sizes.ndim != 1:
        raise ValueError(
            f"lengths must be one integer per document, got {sizes.dtype} of shape {sizes.shape}; "
            "pass len(input_ids) of each document"
        )
    if sizes.min() < 1 or sizes.max() > capacity:
        at = int(np.argmax((sizes < 1) | (sizes > capacity)))
        raise ValueError(
            f"document {at} has {sizes[at]} tokens but capacity is {capacity}; "
            "raise max_length or set overflow='truncate' or 'drop', and drop empty documents"
        )
    return sizes.astype(_smallest_integer(capacity), copy=False)


def _best_fit_decreasing(sizes: np.ndarray, capacity: int) -> np.ndarray:
    """Return the bin of each document, given `sizes` in descending order.

    Bins with the same space left are interchangeable, so a whole run of them takes documents of one
    length at once: O(distinct lengths × runs touched), and linear array work.
    """
    starts = np.flatnonzero(np.diff(sizes, prepend=0))
    counts = np.diff(starts, append=len(sizes)).tolist()
    shortest = int(sizes[-1])
    spaces: list[int] = []  # ascending: the space left in at least one open bin
    runs: dict[int, list[tuple[int, int]]] = {}  # space -> runs of bins (first, number)
    filled: list[tuple[int, int, int]] = []  # (first bin, number of bins, documents for each)
    num_bins = 0

    def reopen(first: int, number: int, space: int) -> None:
        if number and space >= shortest:
            if space in runs:
                runs[space].append((first, number))
            else:
                insort(spaces, space)
                runs[space] = [(first, number)]

    for length, count in zip(sizes[starts].tolist(), counts, strict=True):
        while count:
            at = bisect_left(spaces, length)  # the tightest space that fits
            if at < len(spaces):
                space = spaces[at]
                first, number = runs[space].pop()
                if not runs[space]:
                    del spaces[at], runs[space]
            else:
                space = capacity
                first = num_bins
                number = -(-count // (capacity // length))
                num_bins += number
            # No other space lies in [length, space), so after one document the bin is still the
            # tightest fit for the next one. It takes as many as it holds, then the next bin does.
            each = space // length
            used = min(number, count // each)
            count -= used * each
            filled.append((first, used, each))
            reopen(first, used, space - each * length)
            if count and used < number:  # the last one of them takes the documents left
                filled.append((first + used, 1, count))
                reopen(first + used, 1, space - count * length)
                used += 1
                count = 0
            reopen(first + used, number - used, space)
    first, number, each = np.array(filled, dtype=_smallest_integer(len(sizes))).T
    return np.repeat(ranges(first, number).astype(first.dtype), np.repeat(each, number))


def numbered_by_jumps(next_starts: np.ndarray) -> np.ndarray:
    """Return the part of each element, ``(N,)``, where a part that starts at i ends before [i]."""
    jump = next_starts.data
    start = 0
    starts = []
    while start < len(jump):
        starts.append(start)
        start = jump[start]
    opens = np.zeros(len(jump), dtype=_smallest_integer(len(jump)))
    opens[starts[1:]] = 1
    return np.cumsum(opens, dtype=opens.dtype)


def plan_of(
    indices: np.ndarray, sizes: np.ndarray, lengths: np.ndarray, capacity: int
) -> PackingPlan:
    """Return the plan of bins that hold `sizes` documents each, the next ones of `indices`."""
    offsets = np.append(0, np.cumsum(sizes, dtype=np.int64))
    tokens = np.add.reduceat(lengths[indices], offsets[:-1], dtype=np.int64)
    for array in (indices, offsets, tokens):
        array.setflags(write=False)
    return PackingPlan(indices, offsets, tokens, capacity)


def ranges(starts: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return ``start, start + 1, ...``, `lengths` numbers for each of `starts`."""
    before = np.cumsum(lengths) - lengths
    found = np.repeat(starts - before, lengths)
    found += np.arange(len(found), dtype=found.dtype)
    return found


def _smallest_integer(largest: int) -> type[np.signedinteger]:
    return np.int32 if largest <= np.iinfo(np.int32).max else np.int64
