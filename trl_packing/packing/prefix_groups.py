"""Groups of documents with a long common prefix, which are packed as one.

documents by tokens     S Q a   S Q b   S R c   S T d   S T e        S: a prefix of most of them
groups                  S Q a   S Q b | S R c | S T d   S T e
bins                    S Q a b T d e | S R c ...                    of whole groups

Sorted neighbors are linked if they share a substantial part of the shorter one, beyond the
background: the longest prefix that over half of all documents share. The background links nobody,
because nearly every bin shares it anyway. Linked documents are a cluster if they fit into a bin and
are not too many.

Larger sets are searched again, and the tokens that all documents of a set share are its background.
The clusters of a set then join at random. Documents that share tool definitions thus meet at
random, and not by the first words of their questions.

An order of documents may keep groups in one optimizer step:

    drawn              a0 b0 c0 a1 d0 b1 e0 ...          groups: a of 3 documents, b of 2, ...
    groups as drawn    a a a | b b | c | d | e | ...
    steps of 4         a a a c | b b d e | ...           b does not fit behind a: c comes first
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import numpy as np

from trl_packing.packing.bins import PackingPlan, checked_lengths, pack
from trl_packing.packing.prefix_index import PrefixIndex, shared_depths
from trl_packing.packing.tree_row import MIN_SHARED

# Most tokens that the documents of a bin have, for each token of its capacity. Kernels gather the
# keys of each document: 100 branches of 80 tokens behind a prompt of 8,192 would take 19 GiB in one
# layer of an 8B model.
_MOST_KEYS = 8


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """Every document of a data set in one group; most groups may hold one document.

    Attributes:
        index: of the data set.
        lengths: tokens of every document, ``(N,)`` integers.
        documents: documents group by group, in the order of the index within a group, ``(N,)``.
        offsets: group g is ``documents[offsets[g]:offsets[g + 1]]``, ``(G + 1,)``.
        tokens: tokens that a row of each group computes, ``(G,)`` int64.
    """

    index: PrefixIndex
    lengths: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray

    @cached_property
    def numbers(self) -> np.ndarray:
        """The group of each document, ``(N,)`` int64."""
        numbers = np.empty(len(self.documents), np.int64)
        numbers[self.documents] = np.repeat(np.arange(len(self.tokens)), np.diff(self.offsets))
        return numbers

    @cached_property
    def depths(self) -> np.ndarray:
        """Tokens that each document takes from the one before it in its group, ``(N,)`` int64."""
        before, after = self.documents[:-1], self.documents[1:]
        depths = np.zeros(len(self.documents), np.int64)
        common = self.index.common_between(before, after)
        found = shared_depths(common, self.lengths[before])
        depths[after] = np.where(self.numbers[before] == self.numbers[after], found, 0)
        return depths

    @cached_property
    def squares(self) -> np.ndarray:
        """Pairs of query and key that each document computes in its group, twice, ``(N,)``."""
        return self.lengths.astype(np.int64) ** 2 - self.depths**2

    def pack(self, capacity: int, strategy: str, seed: Sequence[int] | None) -> PackingPlan:
        """Return a plan with each group in one bin; `tokens` are those that a bin computes.

        Args:
            capacity: computed tokens that a bin may hold.
            strategy: as in `bins.pack`.
            seed: as in `bins.pack`.

        Raises:
            ValueError: a document is longer than `capacity`, or there is none.
        """
        checked_lengths(self.lengths, capacity)
        # Tokens that any two documents share are in a bin once.
        common = max(int(self.index.common[1:].min(initial=capacity)) - 1, 0)
        common = min(common, int(self.tokens.min()) - 1) if common >= MIN_SHARED else 0
        room = capacity - common
        keys = np.add.reduceat(self.lengths[self.documents].astype(np.int64), self.offsets[:-1])
        least = np.minimum(-(-keys * room // (_MOST_KEYS * capacity)), room)
        plan = pack(np.maximum(self.tokens - common, least), room, strategy, seed)
        sizes = np.diff(self.offsets)[plan.indices]
        within = np.arange(len(self.documents)) - np.repeat(np.cumsum(sizes) - sizes, sizes)
        indices = self.documents[np.repeat(self.offsets[plan.indices], sizes) + within]
        offsets = np.concatenate([[0], np.cumsum(sizes)])[plan.offsets]
        tokens = self.index.computed_tokens(self.lengths, indices, offsets)
        return PackingPlan(indices, offsets, tokens, capacity)


def group_documents(
    index: PrefixIndex, lengths: np.ndarray, capacity: int | None, most: int
) -> PrefixGroups:
    """Return the groups of a data set; the same for every seed and epoch.

    Args:
        index: of the data set.
        lengths: tokens of every document, ``(N,)`` integers.
        capacity: computed tokens that a group may have; None sets no limit. A longer document is a
            group of its own.
        most: documents that a group may have.
    """
    number_of = prefix_clusters(index.common, lengths[index.order], capacity, most)
    if capacity is not None:
        number_of = _with_few_keys(number_of, lengths[index.order], _MOST_KEYS * capacity)
    order = np.argsort(number_of, kind="stable")
    documents, sizes = index.order[order], np.bincount(number_of)
    firsts = np.cumsum(sizes) - sizes
    # Groups in the order of their first document, as evaluation and "sequential" keep it.
    first = np.minimum.reduceat(documents, firsts) if len(firsts) else firsts
    documents = documents[np.argsort(np.repeat(first, sizes), kind="stable")]
    offsets = np.concatenate([[0], np.cumsum(sizes[np.argsort(first)])])
    tokens = index.computed_tokens(lengths, documents, offsets)
    return PrefixGroups(index, lengths, documents, offsets, tokens)


def _with_few_keys(number_of: np.ndarray, lengths: np.ndarray, most: int) -> np.ndarray:
    """Return `number_of` ``(N,)`` with groups cut where their documents have `most` tokens."""
    order = np.argsort(number_of, kind="stable")
    before = np.cumsum(lengths[order]) - lengths[order]  # tokens
    group = number_of[order]
    part = (before - before[np.searchsorted(group, group)]) // most
    is_first = np.append(True, (np.diff(group) != 0) | (np.diff(part) != 0))[: len(group)]
    numbers = np.empty_like(number_of)
    numbers[order] = np.cumsum(is_first) - 1
    return numbers


# --- the search for groups ------------------------------------------------------------------------


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


# --- groups in optimizer steps --------------------------------------------------------------------


# Most groups that wait for a step with room, before one is cut. Few, to keep steps random.
_MOST_WAITING = 64


def keep_groups_together(
    order: np.ndarray, groups: PrefixGroups, documents_per_step: int
) -> np.ndarray:
    """Return `order` with the documents of each group next to each other, ``(documents,)`` int64.

    A group comes where the first of its documents was drawn. It comes a little later if it does not
    fit into what is left of a step, and it is cut if no other group fits there. O(documents).

    Args:
        order: documents as drawn; some of the data set may be missing.
        groups: of the data set.
        documents_per_step: documents in a step.
    """
    numbers = groups.numbers[order]
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    drawn = np.argsort(np.argsort(first))[group]  # groups by the draw of their first document
    place = np.empty(len(groups.documents), np.int64)
    place[groups.documents] = np.arange(len(place))
    order = order[np.lexsort((place[order], drawn))]
    sizes = np.bincount(drawn)
    if sizes.max(initial=1) == 1:
        return order
    starts = (np.cumsum(sizes) - sizes).tolist()
    parts = _in_steps(sizes.tolist(), documents_per_step)
    return np.concatenate([order[starts[n] + a : starts[n] + b] for n, a, b in parts])


def _in_steps(sizes: list[int], room_of_step: int) -> list[tuple[int, int, int]]:
    """Return parts of groups, step by step: the group, its first document and the one behind."""
    parts: list[tuple[int, int, int]] = []
    waiting: list[tuple[int, int, int]] = []  # parts as well, in the order of drawing
    drawn, room = 0, room_of_step
    while drawn < len(sizes) or waiting:
        kept = []
        for part in waiting:
            if part[2] - part[1] <= room:
                parts.append(part)
                room -= part[2] - part[1]
            else:
                kept.append(part)
        waiting = kept
        while room and drawn < len(sizes) and len(waiting) < _MOST_WAITING:
            size = sizes[drawn]
            if size <= room:
                parts.append((drawn, 0, size))
                room -= size
            else:
                waiting.append((drawn, 0, size))
            drawn += 1
        if room and waiting:
            number, start, stop = waiting[0]
            parts.append((number, start, start + room))
            waiting[0] = (number, start + room, stop)
        room = room_of_step
    return parts
