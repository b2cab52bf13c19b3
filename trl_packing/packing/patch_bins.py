"""Bins with two limits: tokens of the text model, and patches of the vision tower.

    document      tokens   image tokens   patches      limits: 7 tokens, 8 patches
    0  [t i i t t]   5          2            8
    1  [t t t]       3          0            0          bin 0: documents 0 2    5 2    8 0
    2  [t t]         2          0            0          bin 1: documents 1 3    3 2    0 8
    3  [i i]         2          2            8

Memory grows with the tokens and the patches of a micro-batch. A bin that is full of patches takes
documents without images. The first plan depends on the documents alone; a seed then moves documents
between bins (remixing). Every epoch therefore has the same number of bins, and other partners for
each document.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from trl_packing.packing.bins import (
    PackingPlan,
    checked_lengths,
    find_strategy,
    next_fit,
    plan_of_bins,
)
from trl_packing.packing.remixing import Limit, remix

# Best fit looks at all open bins for each document, so large sets are packed in parts.
_DOCUMENTS_OF_A_PART = 8192


@dataclass(frozen=True, eq=False)
class ImageLoads:
    """Images of the documents of a data set, ``(documents,)`` int64 each.

    Attributes:
        images: number of images.
        tokens: tokens that come from images.
        patches: positions of the vision tower.
        most_patches: that a bin may hold; None without a limit.
    """

    images: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    most_patches: int | None = None

    def limited(self, most_patches: int | None) -> "ImageLoads":
        """Return the same loads with another limit."""
        return replace(self, most_patches=most_patches)


@dataclass(frozen=True, eq=False)
class PatchBins:
    """Packs documents with images.

    Args:
        lengths: tokens of each document, ``(documents,)`` integers from 1 to `capacity`.
        patches: of each document, ``(documents,)`` integers.
        capacity: tokens that a bin may hold.
        most: patches that a bin may hold. A document with more of them shares its bin with no other
            image.
        strategy: as in `bins.pack`.
    """

    lengths: np.ndarray
    patches: np.ndarray
    capacity: int
    most: int
    strategy: str = "bfd"

    def pack(self, seed: int | Sequence[int] | None) -> PackingPlan:
        """Return a plan with each document in one bin and no bin beyond a limit; seed as `pack`.

        Raises:
            ValueError: a document has more tokens than `capacity`.
        """
        checked_lengths(self.lengths, self.capacity)
        chosen = find_strategy(self.strategy)
        rng = None if seed is None or not chosen.shuffles else np.random.default_rng(seed)
        if chosen.packs_as == "bfd":
            order, fitted = self._fitted
            bin_of = fitted.copy()
            if rng is not None:
                remix(self._limits(order), bin_of, rng)
        else:
            number = len(self.lengths)
            order = np.arange(number) if rng is None else rng.permutation(number)
            if not chosen.order_dependent:
                (tokens, _), (patches, _) = self._limits(order)
                order = order[np.lexsort((-patches, -tokens))]
            bin_of = next_fit(self._limits(order))
        return plan_of_bins(order, bin_of, self.lengths, self.capacity, rng)

    def of(self, documents: np.ndarray) -> "PatchBins":
        """Return the same of some documents."""
        return replace(self, lengths=self.lengths[documents], patches=self.patches[documents])

    def _limits(self, order: np.ndarray) -> list[Limit]:
        patches = np.minimum(
            self.patches[order].astype(np.int64), self.most
        )  # as far as they count
        return [(self.lengths[order].astype(np.int64), self.capacity), (patches, self.most)]

    @cached_property
    def _fitted(self) -> tuple[np.ndarray, np.ndarray]:
        """Documents, the fullest by either limit first, and the bin of each."""
        (tokens, _), (patches, _) = self._limits(np.arange(len(self.lengths)))
        order = np.argsort(-np.maximum(tokens * self.most, patches * self.capacity), kind="stable")
        bin_of = np.empty(len(order), np.int64)
        number = -(-len(order) // _DOCUMENTS_OF_A_PART)
        bins_before = 0
        for part in range(number):
            chosen = order[part::number]
            found = _best_fit(tokens[chosen], patches[chosen], self.capacity, self.most)
            bin_of[part::number] = found + bins_before
            bins_before += int(found.max()) + 1
        return order, bin_of


def _best_fit(tokens: np.ndarray, patches: np.ndarray, capacity: int, most: int) -> np.ndarray:
    """Return the bin of each document, in the order given: the fullest one that has room for it.

    O(documents × open bins), in array operations over the open bins.
    """
    least, num_open, num_bins = int(tokens.min()), 0, 0
    space = np.zeros((2, len(tokens)), np.int64)  # left in each open bin: tokens, patches
    number = np.zeros(len(tokens), np.int64)  # of each open bin
    bin_of = np.empty(len(tokens), np.int64)
    for at, amounts in enumerate(np.stack([tokens, patches], 1)):
        open_bins = space[:, :num_open]
        fits = np.flatnonzero((open_bins >= amounts[:, None]).all(0))
        if len(fits):
            left = open_bins[0, fits] * most + open_bins[1, fits] * capacity
            chosen = int(fits[left.argmin()])
        else:
            chosen, num_open = num_open, num_open + 1
            space[:, chosen], number[chosen] = (capacity, most), num_bins
            num_bins += 1
        bin_of[at] = number[chosen]
        space[:, chosen] -= amounts
        if space[0, chosen] < least:  # the last open bin takes the place of a full one
            num_open -= 1
            space[:, chosen], number[chosen] = space[:, num_open], number[num_open]
    return bin_of
