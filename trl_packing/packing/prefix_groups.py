"""Groups of documents with a long common prefix, which are packed as one.

documents by tokens     S Q a   S Q b   S R c   S T d   S T e        S: a prefix of most of them
groups                  S Q a   S Q b | S R c | S T d   S T e
bins                    S Q a b T d e | S R c ...                    of whole groups

Sorted neighbors are linked if they share a substantial part of the shorter one, beyond the
background: the longest prefix that over half of all documents share, as nearly every bin does.
Linked documents that fit into a bin are a cluster; larger sets are searched again with a background
of their own. Clusters fill groups in random order, so documents with one system prompt meet at
random, and not by the first words of their questions.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trl_packing.packing.bins import PackingPlan, checked_lengths, numbered_by_jumps, pack, ranges
from trl_packing.packing.prefix_index import MIN_SHARED, PrefixIndex, shared_depths

# Most tokens that the documents of a bin have, for each token of its capacity: kernels gather the
# keys of each document.
_MOST_KEYS = 8

_SUBSTANTIAL = 4  # a link shares at least 1/4 of the shorter document, beyond the background


@dataclass(frozen=True, eq=False)
class PrefixGroups:
    """Every document of a data set in one group; most groups may hold one document.

    Attributes:
        index: of the data set.
        lengths: tokens of every document, ``(N,)`` integers.
        documents: group by group, in the order of the index within a group, ``(N,)``.
        offsets: group g is ``documents[offsets[g]:offsets[g + 1]]``, ``(G + 1,)``.
    """

    index: PrefixIndex
    lengths: np.ndarray
    documents: np.ndarray
    offsets: np.ndarray

    @cached_property
    def numbers(self) -> np.ndarray:
        """The group of each document, ``(N,)`` int64."""
        numbers = np.empty(len(self.documents), np.int64)
        numbers[self.documents] = np.repeat(np.arange(len(self.offsets) - 1), np.diff(self.offsets))
        return numbers

    @cached_property
    def tokens(self) -> np.ndarray:
        """Tokens that a row of each group computes, ``(G,)`` int64."""
        return self.index.computed_tokens(self.lengths, self.documents, self.offsets)

    @cached_property
    def squares(self) -> np.ndarray:
        """Pairs of query and key that each document computes in its group, twice, ``(N,)``."""
        before, after = self.documents[:-1], self.documents[1:]
        depths = self.index.depths(self.lengths, before, after).astype(np.int64)
        squares = self.lengths.astype(np.int64) ** 2
        squares[after] -= np.where(self.numbers[before] == self.numbers[after], depths, 0) ** 2
        return squares

    def pack(self, capacity: int, strategy: str, seed: Sequence[int] | None) -> PackingPlan:
        """Return a plan with each group in one bin, as `bins.pack`; `tokens` are those computed."""
        checked_lengths(self.lengths, capacity)
        # Tokens that any two documents share are in a bin once.
        common = max(int(self.index.common[1:].min(initial=capacity)) - 1, 0)
        common = min(common, int(self.tokens.min()) - 1) if common >= MIN_SHARED else 0
        room = capacity - common
        keys = np.add.reduceat(self.lengths[self.documents].astype(np.int64), self.offsets[:-1])
        least = np.minimum(-(-keys * room // (_MOST_KEYS * capacity)), room)
        plan = pack(np.maximum(self.tokens - common, least), room, strategy, seed)
        sizes = np.diff(self.offsets)[plan.indices]
        indices = self.documents[ranges(self.offsets[plan.indices], sizes)]
        offsets = np.append(0, np.cumsum(sizes))[plan.offsets]
        tokens = self.index.computed_tokens(self.lengths, indices, offsets)
        return PackingPlan(indices, offsets, tokens, capacity)


def group_documents(
    index: PrefixIndex, lengths: np.ndarray, capacity: int, most: int
) -> PrefixGroups:
    """Return the groups of a data set; the same for every seed and epoch.

    Args:
        index: of the data set.
        lengths: tokens of every document, ``(N,)`` integers.
        capacity: computed tokens that a group may have; a longer document is a group of its own.
        most: documents that a group may have.
    """
    number = len(lengths)
    of_order = lengths[index.order].astype(np.int64)
    order, sets = _clusters(index.common.astype(np.int64), of_order, capacity, most)
    documents = index.order[order]
    # Clusters fill groups in this order, until the next one does not fit or is of another family.
    firsts = np.flatnonzero(np.diff(sets[:, 1], prepend=-1))
    depths = np.zeros(number, np.int64)
    depths[1:] = index.depths(lengths, documents[:-1], documents[1:])
    stops = np.searchsorted(sets[:, 0], sets[firsts, 0], side="right")
    for given, room in ((depths, capacity), (0 * depths, _MOST_KEYS * capacity)):
        before = np.append(0, np.cumsum(lengths[documents] - given))
        reached = before[firsts] - given[firsts] + room
        stops = np.minimum(stops, np.searchsorted(before, reached, side="right") - 1)
    stops = np.minimum(stops, firsts + most)
    jumps = np.searchsorted(np.append(firsts, number), stops, side="right") - 1
    group = numbered_by_jumps(np.maximum(jumps, np.arange(1, len(firsts) + 1)))
    group = np.repeat(group, np.diff(firsts, append=number))
    # Groups in the order of their first document, as evaluation and "sequential" keep it.
    documents = documents[np.lexsort((index.ranks[documents], group))]
    sizes = np.bincount(group)
    starts = np.cumsum(sizes) - sizes
    by_first = np.argsort(np.minimum.reduceat(documents, starts))
    documents = documents[ranges(starts[by_first], sizes[by_first])]
    return PrefixGroups(index, lengths, documents, np.append(0, np.cumsum(sizes[by_first])))


def _clusters(
    common: np.ndarray, lengths: np.ndarray, capacity: int, most: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return sorted documents with their clusters next to each other, O(N log N) in a search.

    Args:
        common: tokens that sorted documents share with the one before, ``(N,)``.
        lengths: tokens of the sorted documents, ``(N,)``.
        capacity: tokens that a row of a cluster may compute.
        most: documents of a cluster.

    Returns:
        Their order, ``(N,)``; and for each, the number of the set linked to it in the first search,
        and of its cluster, ``(N, 2)``.
    """
    rng = np.random.default_rng(0)
    order = np.arange(len(common))
    depths = np.append(0, shared_depths(common[1:], lengths[:-1]))
    own = np.append(0, np.cumsum(lengths - depths))
    keys = np.append(0, np.cumsum(lengths))
    starts = np.zeros((2, len(common)), bool)
    starts_family, starts_cluster = starts
    places = order  # in `order` of documents that are in no cluster yet, set by set
    sets = np.zeros(len(common), np.int64)
    base = _background(common, lengths)
    level = 0
    while len(places):  # the background of a set grows in each search
        documents = order[places]
        least = np.minimum(base[1:], base[:-1])
        beyond = common[documents[1:]] - least
        shorter = np.minimum(lengths[documents[1:]], lengths[documents[:-1]]) - least
        is_linked = (beyond >= MIN_SHARED) & (beyond * _SUBSTANTIAL >= shorter)
        is_linked &= sets[1:] == sets[:-1]
        firsts = np.flatnonzero(np.append(True, ~is_linked))
        sizes = np.diff(firsts, append=len(places))
        first = documents[firsts]
        # The first document of a cluster shares with nobody.
        tokens = own[first + sizes] - own[first] + depths[first]
        held = keys[first + sizes] - keys[first]
        fits = (sizes <= most) & (tokens <= capacity) & (held <= _MOST_KEYS * capacity)
        fits |= sizes == 1
        # Clusters of a set change places at random, but not two, such as turns of a conversation.
        of_set = sets[firsts]
        moves = (np.bincount(of_set)[of_set] > 2) & (level > 0)
        by_chance = np.lexsort((rng.random(len(firsts)) * moves, of_set))
        order[places] = documents[ranges(firsts[by_chance], sizes[by_chance])]
        sizes, fits = sizes[by_chance], fits[by_chance]
        firsts = places[np.cumsum(sizes) - sizes]
        if not level:
            starts_family[firsts] = True
        starts_cluster[firsts[fits]] = True
        places = places[np.repeat(~fits, sizes)]
        sizes = sizes[~fits]
        level += 1
        sets = np.repeat(np.arange(len(sizes)), sizes)
        start = np.cumsum(sizes) - sizes
        shared = common[order[places]]
        shared[start] = lengths[order[places[start]]]
        base = np.minimum.reduceat(shared, start)[sets]
    return order, starts.cumsum(1).T


def _background(common: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the first tokens of each document that over half of all documents share, ``(N,)``."""
    middle = len(common) // 2  # over half of all places include the middle
    before = np.minimum.accumulate(common[middle:0:-1])[::-1]
    behind = np.minimum.accumulate(common[middle + 1 :])
    with_middle = np.concatenate([before, lengths[middle : middle + 1], behind])
    shared = np.partition(with_middle, -(middle + 1))[-(middle + 1)]
    return np.where(with_middle >= shared, shared, 0)
