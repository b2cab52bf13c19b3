"""The common prefixes of a data set, and the tokens that shared rows of its documents compute.

    documents    0: S S Q a    1: S S R     2: S S Q b b      S S Q: the tokens of a prefix
    order        0   2   1                                    sorted by tokens
    common       0   3   2                                    tokens shared with the one before
    ranks        0   2   1                                    place of each document in the order

Two documents share the least `common` between their places. So lengths and these numbers tell the
length of any row with shared prefixes (prefix_tree.py) without a look at tokens. Documents that may
not share, because their labels are not their tokens, stand at the end and share nothing.

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

from trl_packing.documents.arrow import ArrowDocuments, FlatLists, is_packed, lists_of
from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, document_labels

# A shorter prefix costs more as a segment of its own than it saves.
MIN_SHARED = 16

_AT_ONCE = 65_536  # documents whose labels are compared at once
_COMPARED = 32_768  # and whose tokens are compared with those of their neighbors
_FEW = 8  # a smaller part of the column is copied, and sorted by itself
_NARROW, _WIDE = 16, 128  # tokens compared at once, first and at most


@dataclass(frozen=True, eq=False)
class PrefixIndex:
    """The documents of a data set in sorted order.

    Attributes:
        order: documents by tokens, ``(N,)`` int64.
        common: tokens that each shares with the one before it in `order`, ``(N,)`` int32; 0 for the
            first one.
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
        is_own = None
        if "labels" in documents.columns:
            table = documents.dataset.data.select(["input_ids", "labels"])
            batches = [*map(_have_own_labels, table.to_batches(max_chunksize=_AT_ONCE))]
            is_own = np.concatenate([np.zeros(0, bool), *batches])[stored]
        return cls(*prefix_order(documents.readers["input_ids"].chunks, stored, is_own))

    @classmethod
    def of_loaded(cls, documents: Sequence[Mapping[str, Any]]) -> "PrefixIndex":
        """Return the index of documents in memory, such as a window of a stream."""
        ids = [np.asarray(document["input_ids"]) for document in documents]
        labels = [document_labels(x, y) for x, y in zip(documents, ids, strict=True)]
        offsets, empty = np.cumsum([0, *map(len, ids)]), np.zeros(0, np.int64)
        tokens = np.concatenate([empty, *ids]).astype(np.int64)
        is_own = _are_own(tokens, np.concatenate([empty, *labels]), offsets)
        return cls(*prefix_order([(tokens, offsets)], np.arange(len(ids)), is_own))

    @cached_property
    def ranks(self) -> np.ndarray:
        """Place of each document in `order`, ``(N,)`` int64."""
        ranks = np.empty(len(self.order), np.int64)
        ranks[self.order] = np.arange(len(self.order))
        return ranks

    def depths(self, lengths: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the tokens that documents take from others, which stand before them in a row.

        Args:
            lengths: tokens of every document of the data set, ``(N,)`` integers.
            before: documents, ``(pairs,)``.
            after: another document for each of them.
        """
        one, other = self.ranks[before], self.ranks[after]
        starts, stops = np.minimum(one, other) + 1, np.maximum(one, other) + 1
        return shared_depths(range_minima(self.common, starts, stops), lengths[before])

    def computed_tokens(
        self, lengths: np.ndarray, documents: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Return the tokens that rows compute, padding left out, ``(M,)`` int64.

        They are the lengths of the rows that `prefix_tree.share_prefixes` makes.

        Args:
            lengths: tokens of every document of the data set, ``(N,)`` integers.
            documents: those of all rows, row by row, ``(D,)`` integers.
            offsets: row m holds ``documents[offsets[m]:offsets[m + 1]]``, ``(M + 1,)``.
        """
        row = np.repeat(np.arange(len(offsets) - 1), np.diff(offsets))
        documents = documents[np.argsort(row * len(self.order) + self.ranks[documents])]
        own = lengths[documents].astype(np.int64)
        after = np.flatnonzero(row[1:] == row[:-1]) + 1
        own[after] -= self.depths(lengths, documents[after - 1], documents[after])
        return np.diff(np.append(0, np.cumsum(own))[offsets])


def shared_depths(common: np.ndarray, lengths_before: np.ndarray) -> np.ndarray:
    """Return the tokens that documents take from those before them in a row, as `prefix_tree` does.

    Args:
        common: tokens with which both begin, ``(N,)``.
        lengths_before: tokens of the document before each, ``(N,)``.
    """
    # A branch repeats the last common token, unless the document before ends with it.
    depths = np.where(common == lengths_before, common, common - 1)
    return np.where(depths >= MIN_SHARED, depths, 0)


def range_minima(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return ``values[start:stop].min()`` of each range, none empty, ``(ranges,)``.

    O(values · log values), in array operations.

    Examples:
        >>> range_minima(np.array([5, 2, 7, 3]), np.array([0, 2]), np.array([3, 3])).tolist()
        [2, 7]
    """
    exponents = np.frexp(stops - starts)[1] - 1
    minima, width = np.empty(len(starts), values.dtype), 1
    for exponent in range(exponents.max(initial=-1) + 1):
        at = np.flatnonzero(exponents == exponent)
        minima[at] = np.minimum(values[starts[at]], values[stops[at] - width])
        values = np.minimum(values[:-width], values[width:])  # of twice as many places each
        width *= 2
    return minima


def _have_own_labels(batch: pa.RecordBatch) -> np.ndarray:
    """Return for each row whether a label is another id than that of its token."""
    flat = []
    for name in ("input_ids", "labels"):
        values, offsets = lists_of(name, batch.column(name))
        flat.append((values[offsets[0] : offsets[-1]], offsets - offsets[0]))
    (tokens, offsets), (targets, others) = flat
    if not np.array_equal(offsets, others):  # the collator refuses the document by name
        return np.ones(len(batch), bool)
    return _are_own(tokens, targets, offsets)


def _are_own(tokens: np.ndarray, targets: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    found = np.zeros(len(offsets) - 1, bool)
    own = np.flatnonzero((targets != IGNORE_INDEX) & (targets != tokens))
    row = np.searchsorted(offsets, own, side="right") - 1
    found[row[own > offsets[row]]] = True  # the first token is never a target
    return found


# --- the order ------------------------------------------------------------------------------------


def prefix_order(
    chunks: Sequence[FlatLists], stored: np.ndarray, is_own: np.ndarray | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents in the order of their bytes, and how many tokens neighbors share.

    Equal documents are in any order. The column is not copied.

    Args:
        chunks: values and offsets of each chunk of a column.
        stored: the row of the column that holds each document, ``(N,)`` integers.
        is_own: documents that share nothing and stand at the end, ``(N,)``.

    Returns:
        The order ``(N,)`` int64, and the common tokens ``(N,)`` int32 of each with the one before
        it, 0 for the first.

    Examples:
        >>> ids = np.array([5, 6, 7, 5, 6, 1, 9])
        >>> order, common = prefix_order([(ids, np.array([0, 3, 6, 7]))], np.arange(3))
        >>> order.tolist(), common.tolist()
        ([1, 0, 2], [0, 2, 0])
    """
    strings = pa.chunked_array([_strings(*chunk) for chunk in chunks], pa.large_binary())
    if len(stored) < len(strings) // _FEW:
        order = pc.sort_indices(strings.take(stored)).to_numpy().astype(np.int64)
    else:
        rank = np.empty(len(strings), np.int64)
        rank[pc.sort_indices(strings).to_numpy()] = np.arange(len(strings))
        order = np.argsort(rank[stored], kind="stable")
    if is_own is not None:
        order = order[np.argsort(is_own[order], kind="stable")]
    rows, common = stored[order], np.zeros(len(stored), np.int32)
    lengths = np.concatenate([*(np.diff(offsets) for _, offsets in chunks), np.zeros(0, int)])[rows]
    first_row = np.cumsum([0, *(len(offsets) - 1 for _, offsets in chunks)])
    for start in range(1, len(rows), _COMPARED):
        at, depth, width = np.arange(start, min(start + _COMPARED, len(rows))), 0, _NARROW
        while len(at):
            # Most documents are compared with both neighbors: their tokens are read once.
            needed = np.sort(np.append(at, at[np.diff(at, prepend=-1) != 1] - 1))
            block = _block(chunks, first_row, rows[needed], depth, width)
            place = np.searchsorted(needed, at)
            left = np.minimum(lengths[at], lengths[at - 1])[:, None] - depth
            differs = (block[place] != block[place - 1]) | (np.arange(width) >= left)
            ends = differs.any(1)
            common[at] = depth + np.where(ends, differs.argmax(1), width)
            at, depth, width = at[~ends], depth + width, min(2 * width, _WIDE)
    if is_own is not None:
        common[is_own[order]] = 0
    return order, common


def _strings(values: np.ndarray, offsets: np.ndarray) -> pa.Array:
    """Return rows as strings of bytes, which are sorted alike if they begin alike."""
    values = np.ascontiguousarray(values)
    buffers = pa.py_buffer(offsets.astype(np.int64) * values.itemsize), pa.py_buffer(values)
    return pa.LargeBinaryArray.from_buffers(pa.large_binary(), len(offsets) - 1, [None, *buffers])


def _block(
    chunks: Sequence[FlatLists], first_row: np.ndarray, rows: np.ndarray, depth: int, width: int
) -> np.ndarray:
    """Return tokens ``[depth, depth + width)`` of `rows`; anything behind their ends."""
    by_chunk = np.argsort(rows)
    cuts = np.searchsorted(rows[by_chunk], first_row).tolist()
    block = np.empty((len(rows), width), chunks[0][0].dtype)
    for (values, offsets), first, start, stop in zip(
        chunks, first_row.tolist(), cuts, cuts[1:], strict=False
    ):
        if start == stop:
            continue
        at = by_chunk[start:stop]
        starts = offsets[rows[at] - first].astype(np.int64) + depth
        fits = starts + width <= len(values)
        if fits.any():
            block[at[fits]] = sliding_window_view(values, width)[starts[fits]]
        if len(values):
            behind = starts[~fits, None] + np.arange(width)
            block[at[~fits]] = values.take(behind, mode="clip")
    return block
