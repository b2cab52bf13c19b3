"""Groups of documents with a long common prefix, which are packed as one.

documents by tokens     S Q a   S Q b   S R c   S T d   S T e        S: a prefix of most of them
groups                  S Q a   S Q b | S R c | S T d   S T e        prefix_clusters.py
bins                    S Q a b T d e | S R c ...                    of whole groups
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trl_packing.packing.bins import PackingPlan, checked_lengths, pack
from trl_packing.packing.prefix_clusters import prefix_clusters
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
