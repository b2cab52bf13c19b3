"""Search for the documents that belong together by their common prefixes.

    documents by tokens     S Q a   S Q b   S R c   S T d   S T e        S: a prefix of most of them
    common beyond S             Q       0       0       T
    clusters                S Q a   S Q b | S R c | S T d   S T e

Sorted neighbors are linked if they share a substantial part of the shorter one, beyond the
background: the longest prefix that over half of all documents share. The background links nobody,
because nearly every bin shares it anyway. Linked documents are a cluster if they fit into a bin and
are not too many.

Larger sets are searched again, and the tokens that all documents of a set share are its background.
The clusters of a set then join at random. Documents that share tool definitions thus meet at
random, and not by the first words of their questions.
"""

from typing import NamedTuple

import numpy as np

from trl_packing.packing.prefix_index import shared_depths
from trl_packing.packing.tree_row import MIN_SHARED

_SUBSTANTIAL = 4  # a link shares at least 1/4 of the shorter document, beyond the background
_DEEPEST = 100  # documents of sets that are searched more often than that join at random
_SCALE = 1 << 16  # of one document, in shares of a full cluster


class _Clusters(NamedTuple):
    """Documents in C clusters.

    Attributes:
        of: number of the cluster of each document, ``(documents,)``.
        sizes: documents of each cluster, ``(C,)``.
        tokens: tokens that a row of each cluster computes, at most, ``(C,)``.
        sets: the set that each cluster is a part of, ``(C,)``.
    """

    of: np.ndarray
    sizes: np.ndarray
    tokens: np.ndarray
    sets: np.ndarray


def prefix_clusters(
    common: np.ndarray, lengths: np.ndarray, capacity: int | None, most: int
) -> np.ndarray:
    """Return the number of the cluster of each document, ``(N,)`` int64; O(N log N) in a search.

    Args:
        common: tokens that sorted documents share with the one before, ``(N,)``.
        lengths: tokens of the sorted documents, ``(N,)``.
        capacity: tokens that a row of a cluster may compute; None sets no limit. A longer document
            is a cluster of its own.
        most: documents of a cluster.
    """
    search = _Search(common.astype(np.int64), lengths.astype(np.int64), capacity, most)
    return search.clusters_of_sets(
        np.arange(len(common)), np.zeros(len(common), np.int64), background(common, lengths)
    ).of


def background(common: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first tokens of each document that over half of all documents share, ``(N,)``."""
    if not len(common):
        return lengths
    middle = len(common) // 2  # over half of all places include the middle
    before = np.minimum.accumulate(common[middle:0:-1])[::-1]
    behind = np.minimum.accumulate(common[middle + 1 :])
    with_middle = np.concatenate([before, lengths[middle : middle + 1], behind])
    shared = np.partition(with_middle, -(middle + 1))[-(middle + 1)]
    return np.where(with_middle >= shared, shared, 0)


class _Search:
    """Finds clusters among sorted documents, which it calls by their places."""

    def __init__(self, common: np.ndarray, lengths: np.ndarray, capacity: int | None, most: int):
        self.common = common
        self.lengths = lengths
        self.capacity = capacity
        self.most = most
        self.rng = np.random.default_rng(0)
        self.depths = np.zeros(len(lengths), np.int64)
        self.depths[1:] = shared_depths(common[1:], lengths[:-1])
        self.own = np.concatenate([[0], np.cumsum(lengths - self.depths)])

    def clusters_of_sets(
        self, places: np.ndarray, sets: np.ndarray, base: np.ndarray, level: int = 0
    ) -> _Clusters:
        """Return all of `places` in clusters.

        Args:
            places: the documents of some sets, ascending.
            sets: number of the set of each, ascending.
            base: tokens of each that link nobody.
            level: searches before this one.
        """
        is_linked = np.zeros(len(places), bool)
        if level < _DEEPEST:
            is_linked[1:] = self._links(places, base) & (sets[1:] == sets[:-1])
        firsts = np.flatnonzero(~is_linked)
        sizes, first = np.diff(firsts, append=len(places)), places[firsts]
        # The first document of a cluster shares with nobody.
        tokens = self.own[first + sizes] - self.own[first] + self.depths[first]
        fits = sizes <= self.most
        if self.capacity is not None:
            fits &= (tokens <= self.capacity) | (sizes == 1)
        number = np.repeat(np.cumsum(fits) - 1, sizes)
        if fits.all():
            return _Clusters(number, sizes, tokens, sets[firsts])

        is_large = np.repeat(~fits, sizes)
        large, size = places[is_large], sizes[~fits]
        shared = self.common[large]
        start = np.cumsum(size) - size
        shared[start] = self.lengths[large[start]]
        shared = np.minimum.reduceat(shared, start)
        within = np.repeat(np.arange(len(size)), size)
        found = self.clusters_of_sets(large, within, shared[within], level + 1)
        joined = self._joined(found, shared)
        number[is_large] = fits.sum() + joined.of
        return _Clusters(
            number,
            np.concatenate([sizes[fits], joined.sizes]),
            np.concatenate([tokens[fits], joined.tokens]),
            np.concatenate([sets[firsts[fits]], sets[firsts[~fits][joined.sets]]]),
        )

    def _links(self, places: np.ndarray, base: np.ndarray) -> np.ndarray:
        """Return whether each document but the first is linked to the one before it."""
        base = np.minimum(base[1:], base[:-1])
        beyond = self.common[places[1:]] - base
        shorter = np.minimum(self.lengths[places[1:]], self.lengths[places[:-1]]) - base
        return (beyond >= MIN_SHARED) & (beyond * _SUBSTANTIAL >= shorter)

    def _joined(self, clusters: _Clusters, shared: np.ndarray) -> _Clusters:
        """Join clusters of each set, large ones first, equal ones in random order (next fit).

        Args:
            clusters: of sets of documents.
            shared: tokens that the documents of each set share.
        """
        _, sizes, tokens, sets = clusters
        # Each cluster but the first adds at most what is behind these tokens.
        saved = np.where(shared > MIN_SHARED, shared - 1, 0)[sets]
        full = self.most * _SCALE
        weights = sizes * _SCALE
        if self.capacity is not None:
            room = np.maximum(self.capacity - saved, 1)
            weights = np.maximum(weights, -(-(tokens - saved) * full // room))
        weights = np.minimum(weights, full)  # a document that is too long is refused later
        order = np.lexsort((self.rng.random(len(sets)), -weights, sets))
        filled = np.concatenate([[0], np.cumsum(weights[order])])
        jump = np.searchsorted(filled, filled[:-1] + full, side="right") - 1
        ends = np.searchsorted(sets[order], sets[order], side="right")
        jump, at, starts = np.minimum(jump, ends).tolist(), 0, []
        while at < len(order):
            starts.append(at)
            at = jump[at]
        is_start = np.zeros(len(order), np.int64)
        is_start[starts] = 1
        joined = np.empty(len(order), np.int64)
        joined[order] = np.cumsum(is_start) - 1
        computed = np.add.reduceat((tokens - saved)[order], starts) + saved[order][starts]
        return _Clusters(
            joined[clusters.of],
            np.add.reduceat(sizes[order], starts),
            computed,
            sets[order][starts],
        )
