"""The common prefixes of a data set, and the tokens that shared rows of its documents compute.

    documents    0: S S Q a    1: S S R     2: S S Q b b      S S Q: the tokens of a prefix
    order        0   2   1                                    sorted by tokens
    common       0   3   2                                    tokens shared with the one before
    ranks        0   2   1                                    place of each document in the order

Two documents share the least `common` between their places. So lengths and these numbers tell the
length of any row with shared prefixes (tree_row.py) without a look at tokens. Documents that may
not share, because their labels are not their tokens, lie in groups of their own.

PyArrow sorts the documents as strings of bytes, without a copy of their tokens.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from trl_packing.documents.arrow import ArrowDocuments, FlatLists, ListColumn, is_packed
from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, document_labels
from trl_packing.packing.tree_row import MIN_SHARED

_AT_ONCE = 65_536  # documents whose labels are compared at once


@dataclass(frozen=True, eq=False)
class PrefixIndex:
    """The documents of a data set in sorted order.

    Attributes:
        order: documents by group and tokens, ``(N,)`` int64.
        common: tokens that each shares with the one before it in `order`, ``(N,)`` int32; 0 for the
            first one of a group.
    """

    order: np.ndarray
    common: np.ndarray

    @classmethod
    def of(cls, documents: ArrowDocuments) -> "PrefixIndex":
        """Return the index of `documents`; O(tokens of common prefixes), 16 bytes a document.

        Raises:
            ValueError: the rows hold several documents each.
        """
        if is_packed(documents):
            raise ValueError(
                f"rows that were packed before (they have {SEQ_LENGTHS}) have no prefixes of "
                "their own; pass the documents"
            )
        stored = documents.stored_rows(np.arange(len(documents)))
        order, common = prefix_order_of_rows(documents.readers["input_ids"].chunks, stored)
        index = cls(order, common.astype(np.int32))
        is_own = np.zeros(len(stored), bool)
        if "labels" in documents.columns:
            is_own = _own_labels(documents.readers["input_ids"], documents.readers["labels"])[
                stored
            ]
        return index if not is_own.any() else index.grouped(_groups(is_own))

    @classmethod
    def of_loaded(cls, documents: Sequence[Mapping[str, Any]]) -> "PrefixIndex":
        """Return the index of documents in memory, such as a window of a stream."""
        ids = [np.asarray(document["input_ids"]) for document in documents]
        offsets = np.cumsum([0, *map(len, ids)])
        values = np.concatenate([np.zeros(0, np.int64), *ids]).astype(np.int64)
        order, common = prefix_order_of_rows([(values, offsets)], np.arange(len(ids)))
        index = cls(order, common.astype(np.int32))
        labels = [document_labels(x, y) for x, y in zip(documents, ids, strict=True)]
        targets = np.concatenate([np.zeros(0, np.int64), *labels])
        is_own = _has_own_labels(values, targets, offsets)
        return index if not is_own.any() else index.grouped(_groups(is_own))

    @cached_property
    def ranks(self) -> np.ndarray:
        """Place of each document in `order`, ``(N,)`` int64."""
        ranks = np.empty(len(self.order), np.int64)
        ranks[self.order] = np.arange(len(self.order))
        return ranks

    @cached_property
    def _minima(self) -> "RangeMinima":
        return RangeMinima(self.common)

    def grouped(self, groups: np.ndarray) -> "PrefixIndex":
        """Return the index in which only documents with the same number in `groups` share."""
        places = np.argsort(groups[self.order], kind="stable")
        order = self.order[places]
        common = self._common_of(places)
        common[1:][np.diff(groups[order]) != 0] = 0
        return PrefixIndex(order, common)

    def _common_of(self, places: np.ndarray) -> np.ndarray:
        """Return the common tokens of each of `places`, ascending by group, with the one before."""
        common = np.zeros(len(places), np.int32)
        low, high = np.minimum(places[:-1], places[1:]), np.maximum(places[:-1], places[1:])
        common[1:] = self._minima.of(low + 1, high + 1)
        return common

    def common_between(self, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the tokens that pairs of documents share, ``(pairs,)`` int32.

        Args:
            before: documents, ``(pairs,)``.
            after: another document for each of them.
        """
        one, other = self.ranks[before], self.ranks[after]
        return self._minima.of(np.minimum(one, other) + 1, np.maximum(one, other) + 1)

    def computed_tokens(
        self, lengths: np.ndarray, documents: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Return the tokens that rows compute, padding left out, ``(M,)`` int64.

        They are the lengths of the rows that `tree_row.share_prefixes` makes.

        Args:
            lengths: tokens of every document of the data set, ``(N,)`` integers.
            documents: those of all rows, row by row, ``(D,)`` integers.
            offsets: row m holds ``documents[offsets[m]:offsets[m + 1]]``, ``(M + 1,)``.
        """
        places = self.ranks[documents]
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        order = np.argsort(row * len(self.order) + places)
        places = places[order]
        own = lengths[self.order[places]].astype(np.int64)
        is_neighbor = row[1:] == row[:-1]
        before, after = places[:-1][is_neighbor], places[1:][is_neighbor]
        common = self._minima.of(before + 1, after + 1)
        own[1:][is_neighbor] -= shared_depths(common, lengths[self.order[before]])
        return np.diff(np.concatenate([[0], np.cumsum(own)])[offsets])


def shared_depths(common: np.ndarray, lengths_before: np.ndarray) -> np.ndarray:
    """Return the tokens that documents take from those before them in a row, as `prefix_tree` does.

    Args:
        common: tokens with which both begin, ``(N,)``.
        lengths_before: tokens of the document before each, ``(N,)``.
    """
    # A branch repeats the last common token, unless the document before ends with it.
    depths = np.where(common == lengths_before, common, common - 1)
    return np.where(depths >= MIN_SHARED, depths, 0)


def _groups(is_own: np.ndarray) -> np.ndarray:
    """Return a number for each document, as `tree_row._groups` does.

    Args:
        is_own: whether a document has labels of its own, ``(N,)`` bool.
    """
    groups = np.zeros(len(is_own), np.int64)
    groups[is_own] = -1 - np.arange(is_own.sum())
    return groups


def _own_labels(ids: ListColumn, labels: ListColumn) -> np.ndarray:
    """Return for each stored row whether a label is another id than that of its token."""
    found = np.zeros(len(ids.lengths), bool)
    cuts = np.unique([*ids.first_row, *labels.first_row, *range(0, len(found), _AT_ONCE)])
    for start, stop in zip(cuts[:-1].tolist(), cuts[1:].tolist(), strict=True):
        (tokens, offsets), (targets, others) = (_slice(x, start, stop) for x in (ids, labels))
        # If lengths differ, the collator refuses the document by name.
        is_equal = np.array_equal(offsets, others)
        found[start:stop] = not is_equal or _has_own_labels(tokens, targets, offsets)
    return found


def _has_own_labels(tokens: np.ndarray, targets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return for each document whether a label is another id than that of its token."""
    found = np.zeros(len(offsets) - 1, bool)
    own = np.flatnonzero((targets != IGNORE_INDEX) & (targets != tokens))
    row = np.searchsorted(offsets, own, side="right") - 1
    found[row[own > offsets[row]]] = True  # the first token is never a target
    return found


def _slice(column: ListColumn, start: int, stop: int) -> tuple[np.ndarray, np.ndarray]:
    """Return values ``(T,)`` and offsets of stored rows that lie in one chunk."""
    chunk = int(np.searchsorted(column.first_row, start, side="right")) - 1
    first = int(column.first_row[chunk])
    values, offsets = column.chunks[chunk]
    offsets = offsets[start - first : stop - first + 1].astype(np.int64)
    return values[offsets[0] : offsets[-1]], offsets - offsets[0]


# --- minima of ranges -----------------------------------------------------------------------------


_BLOCK = 16


class RangeMinima:
    """Answers minima of ranges of `values` ``(N,)`` integers.

    Examples:
        >>> RangeMinima(np.array([5, 2, 7, 3])).of(np.array([0, 2]), np.array([3, 3])).tolist()
        [2, 7]
    """

    def __init__(self, values: np.ndarray):
        self.values = values
        size = -(-len(values) // _BLOCK) * _BLOCK
        most = np.iinfo(values.dtype).max
        blocks = np.full(size, most, values.dtype)
        blocks[: len(values)] = values
        blocks = blocks.reshape(-1, _BLOCK)
        self._from_start = np.minimum.accumulate(blocks, axis=1).ravel()
        self._to_end = np.minimum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
        self._levels = [blocks.min(1, initial=most)]
        while (width := 1 << (len(self._levels) - 1)) * 2 <= len(blocks):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))

    def of(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return ``values[start:stop].min()`` of each range, none empty, ``(ranges,)``."""
        first, last = starts // _BLOCK, (stops - 1) // _BLOCK
        minima = np.minimum(self._to_end[starts], self._from_start[stops - 1])
        between = last - first - 1
        exponents = np.frexp(np.maximum(between, 1))[1] - 1
        for level in np.unique(exponents[between > 0]).tolist():
            at = np.flatnonzero((between > 0) & (exponents == level))
            table = self._levels[level]
            left, right = table[first[at] + 1], table[last[at] - (1 << level)]
            minima[at] = np.minimum(minima[at], np.minimum(left, right))
        inside = np.flatnonzero(first == last)  # those took too much of their block
        minima[inside] = self.values[starts[inside]]
        for step in range(1, _BLOCK):
            inside = inside[starts[inside] + step < stops[inside]]
            if not len(inside):
                break
            minima[inside] = np.minimum(minima[inside], self.values[starts[inside] + step])
        return minima


# --- the order ------------------------------------------------------------------------------------


_COMPARED = 32_768  # documents whose tokens are compared at once
_FEW = 8  # a smaller part of the column is copied, and sorted by itself
_NARROW, _WIDE = 16, 128  # tokens compared at once, first and at most


def prefix_order(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents in the order of their bytes, and how many tokens neighbors share.

    Args:
        values: token ids of all documents, ``(T,)`` integers.
        offsets: document n is ``values[offsets[n]:offsets[n + 1]]``, ``(N + 1,)``.

    Returns:
        The order ``(N,)`` int64, equal documents in their given order; and the common tokens
        ``(N,)`` int64 of each with the one before it, 0 for the first.

    Examples:
        >>> order, common = prefix_order(np.array([5, 6, 7, 5, 6, 1, 9]), np.array([0, 3, 6, 7]))
        >>> order.tolist(), common.tolist()
        ([1, 0, 2], [0, 2, 0])
    """
    return prefix_order_of_rows([(values, offsets)], np.arange(len(offsets) - 1))


def prefix_order_of_rows(
    chunks: Sequence[FlatLists], stored: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the same for a column in several chunks, without a copy of it.

    Equal documents are in any order.

    Args:
        chunks: values and offsets of each chunk.
        stored: the row of the column that holds each document, ``(N,)`` integers.
    """
    strings = pa.chunked_array([_strings(*chunk) for chunk in chunks], pa.large_binary())
    if len(stored) < len(strings) // _FEW:
        order = pc.sort_indices(strings.take(stored)).to_numpy().astype(np.int64)
    else:
        rank = np.empty(len(strings), np.int64)
        rank[pc.sort_indices(strings).to_numpy()] = np.arange(len(strings))
        order = np.argsort(rank[stored], kind="stable")
    rows, common = stored[order], np.zeros(len(stored), np.int64)
    lengths = np.concatenate([*(np.diff(offsets) for _, offsets in chunks), np.zeros(0, int)])[rows]
    first_row = np.cumsum([0, *(len(offsets) - 1 for _, offsets in chunks)])
    for start in range(1, len(rows), _COMPARED):
        at, depth, width = np.arange(start, min(start + _COMPARED, len(rows))), 0, _NARROW
        while len(at):
            # Most documents are compared with both neighbors: their tokens are read once.
            needed = np.union1d(at - 1, at)
            block = _block(chunks, first_row, rows[needed], depth, width)
            place = np.searchsorted(needed, at)
            left = np.minimum(lengths[at], lengths[at - 1])[:, None] - depth
            differs = (block[place] != block[place - 1]) | (np.arange(width) >= left)
            ends = differs.any(1)
            common[at] = depth + np.where(ends, differs.argmax(1), width)
            at, depth, width = at[~ends], depth + width, min(2 * width, _WIDE)
    return order, common


def _strings(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Return rows as strings of bytes, which are sorted alike if they begin alike."""
    values = np.ascontiguousarray(values)
    buffers = (offsets.astype(np.int64) * values.itemsize, values)
    return pa.LargeBinaryArray.from_buffers(
        pa.large_binary(), len(offsets) - 1, [None, *map(pa.py_buffer, buffers)]
    )


def _block(
    chunks: Sequence[FlatLists], first_row: np.ndarray, rows: np.ndarray, depth: int, width: int
) -> np.ndarray:
    """Return tokens ``[depth, depth + width)`` of `rows`; anything behind their ends."""
    chunk_of = np.searchsorted(first_row, rows, side="right") - 1
    block = np.empty((len(rows), width), chunks[0][0].dtype)
    for chunk in np.unique(chunk_of).tolist():
        at, (values, offsets) = np.flatnonzero(chunk_of == chunk), chunks[chunk]
        starts = offsets[rows[at] - first_row[chunk]].astype(np.int64) + depth
        fits = starts + width <= len(values)
        if fits.any():
            block[at[fits]] = sliding_window_view(values, width)[starts[fits]]
        for row, start in zip(at[~fits].tolist(), starts[~fits].tolist(), strict=True):
            last = values[start:]
            block[row, : len(last)] = last
    return block
