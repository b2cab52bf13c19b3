"""Bring documents with common prefixes next to each other: an order, and what neighbors share.

    documents    b a n d | a n t | b a n k | a n d        (one token a letter)
    order        a n d | a n t | b a n d | b a n k        lexicographic, by token id
    common             2       0         3                tokens shared with the one before

Documents are compared block by block, and only with those that were equal so far (radix sort from
the first token). A block that all documents of a group share, as in a common system prompt, is
compared and not sorted. Groups are finished piece by piece, and a piece stays in the processor's
cache. Work is linear in the tokens compared, memory in the documents.
"""

from collections.abc import Iterator, Sequence

import numpy as np
from numpy.lib.stride_tricks import sliding_window_view

from trl_packing.documents.list_columns import FlatLists

_WIDE, _NARROW = 64, 16  # tokens compared at once, of few and of many documents
_AT_ONCE = 16_384  # documents whose tokens are read at once


def prefix_order(values: np.ndarray, offsets: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return the documents in lexicographic order, and how many tokens neighbors share.

    Args:
        values: token ids of all documents, ``(T,)`` integers from 0 to 2**32 - 2.
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

    Args:
        chunks: values and offsets of each chunk.
        stored: the row of the column that holds each document, ``(N,)`` integers.
    """
    first_row = np.cumsum([0, *(len(offsets) - 1 for _, offsets in chunks)])
    all_lengths = [np.diff(offsets) for _, offsets in chunks]
    lengths = np.concatenate([*all_lengths, np.zeros(0, int)]).astype(np.int64)[stored]
    order = np.arange(len(lengths))
    common = np.zeros(len(lengths), np.int64)
    is_open = np.ones(len(lengths), bool)  # equal so far to the one before
    is_open[:1] = False
    waiting = [(0, len(lengths), 0)] * bool(is_open.any())  # places from, to; tokens compared
    while waiting:
        start, stop, depth = waiting.pop()
        # Documents of groups: those that are equal so far to a neighbor.
        opened = is_open[start:stop]
        at = start + np.flatnonzero(opened | np.append(opened[1:], False))
        width = _WIDE if len(at) <= 2 * _AT_ONCE else _NARROW
        rows = _blocks(chunks, first_row, stored[order[at]], depth, width)
        group = np.cumsum(~is_open[at])
        _sort_groups(at, rows, group, order)
        pairs = np.flatnonzero(group[1:] == group[:-1]) + 1
        equal = rows[pairs] == rows[pairs - 1]
        same = equal.all(1)
        ended = same & (rows[pairs, -1] == 0)
        common[at[pairs]] = depth + np.where(same, width, equal.argmin(1))
        common[at[pairs[ended]]] = lengths[order[at[pairs[ended]]]]
        is_open[at[pairs]] = same & ~ended
        waiting += [(*piece, depth + width) for piece in _pieces(is_open, start, stop)]
    return order, common


def _pieces(is_open: np.ndarray, start: int, stop: int) -> Iterator[tuple[int, int]]:
    """Yield places of whole groups that still have equal documents, about `_AT_ONCE` at a time."""
    group_starts = start + np.flatnonzero(~is_open[start:stop])
    cuts = np.searchsorted(group_starts, np.arange(start, stop, _AT_ONCE))
    ends = np.unique(np.append(group_starts[cuts[cuts < len(group_starts)]], stop))
    for first, last in zip(ends[:-1].tolist(), ends[1:].tolist(), strict=True):
        if is_open[first:last].any():
            yield first, last


def _blocks(
    chunks: Sequence[FlatLists], first_row: np.ndarray, stored: np.ndarray, depth: int, width: int
) -> np.ndarray:
    """Return tokens ``[depth, depth + width)`` of stored rows plus one, 0 behind their end."""
    blocks = np.zeros((len(stored), width), np.uint32)
    for chunk, at in _by_chunk(first_row, stored):
        values, offsets = chunks[chunk]
        rows = stored[at] - first_row[chunk]
        first = offsets[rows].astype(np.int64) + depth
        left = offsets[rows + 1] - first
        blocks[at] = _tokens_plus_one(values, first, left, width)
    return blocks


def _tokens_plus_one(
    values: np.ndarray, first: np.ndarray, left: np.ndarray, width: int
) -> np.ndarray:
    """Return ``values[first : first + width] + 1`` of each row, 0 from its token `left` on."""
    if len(values) < width:
        values = np.append(values, np.zeros(width, values.dtype))
    last = len(values) - width
    moved = np.maximum(first - last, 0)  # a row that ends behind the last one is read from there
    tokens = sliding_window_view(values, width)[first - moved].astype(np.uint32) + np.uint32(1)
    short = np.flatnonzero(left < width)
    columns = np.arange(width)
    places = np.minimum(columns + moved[short, None], width - 1)
    shifted = np.take_along_axis(tokens[short], places, axis=1)
    tokens[short] = np.where(left[short, None] > columns, shifted, 0)
    return tokens


def _by_chunk(first_row: np.ndarray, stored: np.ndarray) -> Iterator[tuple[int, np.ndarray]]:
    """Yield chunks, and positions in `stored` of rows that they hold, not too many at once."""
    chunk_of = np.searchsorted(first_row, stored, side="right") - 1
    order = np.argsort(chunk_of, kind="stable")
    starts = np.flatnonzero(np.diff(chunk_of[order], prepend=-1))
    starts = np.union1d(starts, np.arange(0, len(order), _AT_ONCE)).tolist()
    for start, stop in zip(starts, [*starts[1:], len(order)], strict=True):
        yield int(chunk_of[order[start]]), order[start:stop]


def _sort_groups(at: np.ndarray, rows: np.ndarray, group: np.ndarray, order: np.ndarray) -> None:
    """Sort `order` and `rows` within each group by the tokens of the rows, in place."""
    first = np.flatnonzero(np.diff(group, prepend=-1))
    sizes = np.diff(first, append=len(group))
    differs = (rows != np.repeat(rows[first], sizes, axis=0)).any(1)
    some = np.flatnonzero(np.repeat(np.logical_or.reduceat(differs, first), sizes))
    keys = np.empty((len(some), 1 + rows.shape[1]), ">u4")
    keys[:, 0] = group[some]
    keys[:, 1:] = rows[some]
    into = np.argsort(keys.view(f"S{keys.itemsize * keys.shape[1]}")[:, 0], kind="stable")
    order[at[some]] = order[at[some[into]]]
    rows[some] = rows[some[into]]
