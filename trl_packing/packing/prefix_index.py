"""The common prefixes of a data set, and the tokens that shared rows of its documents compute.

    documents    0: S S Q a    1: S S R     2: S S Q b b      S S Q: the tokens of a prefix
    order        0   2   1                                    sorted by tokens
    common       0   3   2                                    tokens shared with the one before

Two documents share the least `common` between their places, so these numbers tell the length of any
row with shared prefixes (prefix_tree.py). Nothing is shared where labels are other tokens.
PyArrow sorts documents as strings of bytes, without a copy of their tokens.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from trl_packing.documents.arrow import ArrowDocuments, ListColumn, stored_rows
from trl_packing.documents.labels import IGNORE_INDEX, Document, document_labels

# A shorter prefix costs more as a segment of its own than it saves.
MIN_SHARED = 16

_AT_ONCE = 32_768  # documents that are compared at once
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
        """Return the index of `documents`, no packed rows; O(tokens of common prefixes)."""
        table = documents.dataset.data.select([*documents.columns])
        return cls._of_table(table, documents.readers["input_ids"], stored_rows(documents.dataset))

    @classmethod
    def of_loaded(cls, documents: Sequence[Document]) -> "PrefixIndex":
        """Return the index of documents in memory, such as a window of a stream."""
        ids = [np.asarray(document["input_ids"], np.int64) for document in documents]
        kind = pa.large_list(pa.int64())
        labels = pa.array([*map(document_labels, documents, ids)], kind)
        table = pa.table({"input_ids": pa.array(ids, kind), "labels": labels})
        column = ListColumn("input_ids", table.column("input_ids"))
        return cls._of_table(table, column, np.arange(len(ids)))

    @classmethod
    def _of_table(cls, table: pa.Table, column: ListColumn, stored: np.ndarray) -> "PrefixIndex":
        """Return the index of documents in the `stored` rows of a table and of its `input_ids`."""
        index = cls(*prefix_order(column, stored))
        if "labels" not in table.column_names:
            return index
        for batch in table.select(["input_ids", "labels"]).to_batches(max_chunksize=_AT_ONCE):
            flat = [pc.list_flatten(x).to_numpy(zero_copy_only=False) for x in batch.columns]
            sizes = pc.list_value_length(batch.column("input_ids")).to_numpy()
            own = np.flatnonzero((flat[1] != IGNORE_INDEX) & (flat[1] != flat[0]))
            # The first token of a document is never a target.
            if not np.isin(own, np.append(0, np.cumsum(sizes))).all():
                index.common[:] = 0
                break
        return index

    @cached_property
    def ranks(self) -> np.ndarray:
        """Place of each document in `order`, ``(N,)`` int64."""
        ranks = np.empty(len(self.order), np.int64)
        ranks[self.order] = np.arange(len(self.order))
        return ranks

    def depths(self, lengths: np.ndarray, before: np.ndarray, after: np.ndarray) -> np.ndarray:
        """Return the tokens that documents `after` take in a row from those `before`, ``(pairs,)``.

        `lengths` are those of every document of the data set.
        """
        one, other = self.ranks[before], self.ranks[after]
        starts = np.minimum(one, other) + 1
        stops = np.maximum(one, other) + 1
        return shared_depths(range_minima(self.common, starts, stops), lengths[before])

    def computed_tokens(
        self, lengths: np.ndarray, documents: np.ndarray, offsets: np.ndarray
    ) -> np.ndarray:
        """Return the lengths of the rows that `prefix_tree.share_prefixes` makes, ``(M,)`` int64.

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


def shared_depths(
    common: np.ndarray, lengths_before: np.ndarray, least: int = MIN_SHARED
) -> np.ndarray:
    """Return the tokens, at least `least`, that documents take in a row from those before them.

    `common` are those with which both begin, ``(N,)``.
    """
    # A branch repeats the last common token, unless the document before ends with it.
    depths = np.where(common == lengths_before, common, common - 1)
    return np.where(depths >= least, depths, 0)


def range_minima(values: np.ndarray, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
    """Return ``values[start:stop].min()`` of each range, none empty; O(values · log values).

    Examples:
        >>> range_minima(np.array([5, 2, 7, 3]), np.array([0, 2]), np.array([3, 3])).tolist()
        [2, 7]
    """
    exponents = np.frexp(stops - starts)[1] - 1
    minima = np.empty(len(starts), values.dtype)
    width = 1
    for exponent in range(exponents.max(initial=-1) + 1):
        at = np.flatnonzero(exponents == exponent)
        minima[at] = np.minimum(values[starts[at]], values[stops[at] - width])
        values = np.minimum(values[:-width], values[width:])  # of twice as many places each
        width *= 2
    return minima


def prefix_order(column: ListColumn, stored: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return `order` and `common` of an index; equal documents are in any order.

    Args:
        column: token ids.
        stored: the row of `column` that holds each document, ``(N,)`` integers.

    Examples:
        >>> ids = ListColumn("input_ids", pa.chunked_array([[[5, 6, 7], [5, 6, 1], [9]]]))
        >>> order, common = prefix_order(ids, np.arange(3))
        >>> order.tolist(), common.tolist()
        ([1, 0, 2], [0, 2, 0])
    """
    chunks = []
    for values, offsets in column.chunks:  # as strings of bytes, which Arrow ranks
        flat = np.ascontiguousarray(values)
        buffers = [pa.py_buffer(offsets.astype(np.int64) * flat.itemsize), pa.py_buffer(flat)]
        number = len(offsets) - 1
        chunks.append(pa.LargeBinaryArray.from_buffers(pa.large_binary(), number, [None, *buffers]))
    strings = pa.chunked_array(chunks, pa.large_binary())
    order = np.argsort(pc.rank(strings, tiebreaker="first").to_numpy()[stored], kind="stable")
    rows = stored[order]
    common = np.zeros(len(stored), np.int32)
    lengths = column.lengths[rows]
    for start in range(1, len(rows), _AT_ONCE):
        at = np.arange(start, min(start + _AT_ONCE, len(rows)))
        depth = 0
        width = _NARROW
        while len(at):
            # Most documents are compared with both neighbors: their tokens are read once.
            needed = np.sort(np.append(at, at[np.diff(at, prepend=-1) != 1] - 1))
            block = _block(column, rows[needed], depth, width)
            place = np.searchsorted(needed, at)
            left = np.minimum(lengths[at], lengths[at - 1])[:, None] - depth
            differs = (block[place] != block[place - 1]) | (np.arange(width) >= left)
            ends = differs.any(1)
            common[at] = depth + np.where(ends, differs.argmax(1), width)
            at = at[~ends]
            depth += width
            width = min(2 * width, _WIDE)
    return order, common


def _block(column: ListColumn, rows: np.ndarray, depth: int, width: int) -> np.ndarray:
    """Return tokens ``[depth, depth + width)`` of `rows`; anything behind their ends."""
    by_chunk = np.argsort(rows)
    parts = np.split(by_chunk, np.searchsorted(rows[by_chunk], column.first_row[1:-1]))
    block = np.empty((len(rows), width), column.chunks[0][0].dtype)
    for (values, offsets), first, at in zip(column.chunks, column.first_row, parts, strict=False):
        starts = offsets[rows[at] - first].astype(np.int64) + depth
        fits = starts + width <= len(values)
        if fits.any():
            block[at[fits]] = sliding_window_view(values, width)[starts[fits]]
        if len(values) and not fits.all():
            behind = starts[~fits, None] + np.arange(width)
            block[at[~fits]] = values.take(behind, mode="clip")
    return block
