"""Bring documents with common prefixes next to each other: an order, and what neighbors share.

    documents    b a n d | a n t | b a n k | a n d        (one token a letter)
    order        a n d | a n t | b a n d | b a n k        lexicographic, by token id
    common             2       0         3                tokens shared with the one before

Documents are compared in blocks of 16 tokens, and only with those that were equal so far (radix
sort from the first token). A block that all documents of a group share, as in a common system
prompt, is compared and not sorted. Work is linear in the tokens compared, memory in the documents.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from trl_packing.documents.list_columns import FlatLists

BLOCK = 16
_AT_ONCE = 65_536  # documents whose tokens are read at once


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
    depth = 0
    while is_open.any():
        # Documents of groups: those that are equal so far to a neighbor.
        at = np.flatnonzero(is_open | np.append(is_open[1:], False))
        rows = _blocks(chunks, first_row, stored[order[at]], depth)
        group = np.cumsum(~is_open[at])
        _sort_groups(at, rows, group, order)
        pairs = np.flatnonzero(group[1:] == group[:-1]) + 1
        equal = rows[pairs] == rows[pairs - 1]
        same = equal.all(1)
        ended = same & (rows[pairs, -1] == 0)
        common[at[pairs]] = depth + np.where(same, BLOCK, equal.argmin(1))
        common[at[pairs[ended]]] = lengths[order[at[pairs[ended]]]]
        is_open[at[pairs]] = same & ~ended
        depth += BLOCK
    return order, common


def _blocks(
    chunks: Sequence[FlatLists], first_row: np.ndarray, stored: np.ndarray, depth: int
) -> np.ndarray:
    """Return tokens ``[depth, depth + BLOCK)`` of stored rows plus one, 0 behind their end."""
    blocks = np.zeros((len(stored), BLOCK), np.uint32)
    columns = np.arange(BLOCK)
    for chunk, at in _by_chunk(first_row, stored):
        values, offsets = chunks[chunk]
        if not len(values):
            continue
        rows = stored[at] - first_row[chunk]
        first = offsets[rows].astype(np.int64) + depth
        left = offsets[rows + 1] - first
        tokens = values[np.minimum(first[:, None] + columns, len(values) - 1)].astype(np.uint32)
        blocks[at] = np.where(left[:, None] > columns, tokens + np.uint32(1), 0)
    return blocks


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
    keys = np.empty((len(some), BLOCK + 1), ">u4")
    keys[:, 0] = group[some]
    keys[:, 1:] = rows[some]
    into = np.argsort(keys.view(f"S{keys.itemsize * (BLOCK + 1)}")[:, 0], kind="stable")
    order[at[some]] = order[at[some[into]]]
    rows[some] = rows[some[into]]
