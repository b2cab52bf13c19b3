"""Bring documents with common prefixes next to each other: an order, and what neighbors share.

    documents    b a n d | a n t | b a n k | a n d        (one token a letter)
    order        a n d | a n t | b a n d | b a n k        by the bytes of their tokens
    common             2       0         3                tokens shared with the one before

PyArrow sorts the documents as strings of bytes, without a copy of their tokens.
"""

from collections.abc import Sequence

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from numpy.lib.stride_tricks import sliding_window_view

from trl_packing.documents.list_columns import FlatLists

_AT_ONCE = 32_768  # documents whose tokens are compared at once
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
    for start in range(1, len(rows), _AT_ONCE):
        at, depth, width = np.arange(start, min(start + _AT_ONCE, len(rows))), 0, _NARROW
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
