"""Arrow columns with one entry per token, as flat NumPy arrays and back.

    table            input_ids [5 6] [7]     labels [-100 6] [7]     other columns
        │  token_lists
        ▼
    flat             input_ids 5 6 7         labels -100 6 7         offsets 0 2 3
        │  cut, extend: one NumPy call for a whole batch
        ▼
    list_column      the column again, in its former type

Shape letters: N documents, T tokens of all of them. Weights are cut together with their tokens.
"""

from collections.abc import Callable

import numpy as np
import pyarrow as pa

from trl_packing.documents.labels import TOKEN_WEIGHTS, token_columns

# Values ``(T,)`` and offsets ``(N + 1,)``: list i is ``values[offsets[i] : offsets[i + 1]]``.
FlatLists = tuple[np.ndarray, np.ndarray]


class ListColumn:
    """One Arrow column of lists; ``column[row]`` is a view of its values.

    Attributes:
        chunks: values and offsets of each chunk of the table that has rows.
        first_row: the first stored row of each chunk, and the number of rows at the end.
        lengths: entries of each stored row, ``(rows,)`` int64.
    """

    def __init__(self, name: str, column: pa.ChunkedArray):
        self.name = name
        read = weight_lists if name == TOKEN_WEIGHTS else integer_lists
        self.chunks: list[FlatLists] = [read(name, chunk) for chunk in column.chunks if len(chunk)]
        sizes = [len(offsets) - 1 for _, offsets in self.chunks]
        self.first_row = np.concatenate([[0], np.cumsum(sizes)]).astype(np.int64)
        self.lengths = _concatenated([np.diff(offsets) for _, offsets in self.chunks])

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = 0
        if len(self.chunks) > 1:
            chunk = int(np.searchsorted(self.first_row, row, side="right")) - 1
            row -= int(self.first_row[chunk])
        values, offsets = self.chunks[chunk]
        found = values[offsets[row] : offsets[row + 1]]
        if self.name != TOKEN_WEIGHTS:
            return found
        # Cast by document: the whole column cast would be a copy of it in memory.
        # A weight beyond float32 becomes inf, which `check_token_weights` refuses.
        with np.errstate(over="ignore"):
            return found.astype(np.float32, copy=False)

    def sums(self) -> np.ndarray:
        """Return the sum of each row."""
        totals = []
        for values, offsets in self.chunks:
            running = np.concatenate([[0], np.cumsum(values, dtype=np.int64)])
            totals.append(running[offsets[1:]] - running[offsets[:-1]])
        return _concatenated(totals)

    def count_after_first(self, ignored: int) -> np.ndarray:
        """Return how many values of each row, except its first, differ from `ignored`."""
        return _concatenated([count_after_first(*chunk, ignored) for chunk in self.chunks])


def count_after_first(values: np.ndarray, offsets: np.ndarray, ignored: int) -> np.ndarray:
    """Return how many values of each row, except its first, differ from `ignored`."""
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values != ignored, out=running[1:])
    starts, ends = offsets[:-1], offsets[1:]
    return running[ends] - running[np.minimum(starts + 1, ends)]


def integer_lists(name: str, chunk: pa.Array) -> FlatLists:
    """Return values and offsets: row i of `chunk` is ``values[offsets[i] : offsets[i + 1]]``.

    Raises:
        ValueError: naming the column, for anything but lists of integers or booleans and for
            missing entries.
    """
    return _lists(
        name,
        chunk,
        lambda values: pa.types.is_integer(values) or pa.types.is_boolean(values),
        "tokens are lists of integers; convert it, or pass text and let the trainer tokenize it",
    )


def weight_lists(name: str, chunk: pa.Array) -> FlatLists:
    """Return values and offsets like `integer_lists`, for lists of integers or floats."""
    return _lists(
        name,
        chunk,
        lambda values: pa.types.is_integer(values) or pa.types.is_floating(values),
        "weights are lists of numbers, one per token; convert it",
    )


def _lists(
    name: str, chunk: pa.Array, is_allowed: Callable[[pa.DataType], bool], expected: str
) -> FlatLists:
    if chunk.null_count:
        raise ValueError(f"column {name!r} has a missing (null) row; remove such rows")
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.large_list(chunk.type.value_type))
    is_list = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
    if is_list and pa.types.is_null(chunk.type.value_type) and not len(chunk.values):
        chunk = chunk.cast(pa.list_(pa.int64()))  # every row is empty
    if not is_list or not is_allowed(chunk.type.value_type):
        raise ValueError(f"column {name!r} holds {chunk.type}, but {expected}")
    if chunk.values.null_count:
        raise ValueError(f"column {name!r} has a missing (null) token; remove such rows")
    return chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()


def _concatenated(arrays: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(arrays).astype(np.int64) if arrays else np.zeros(0, dtype=np.int64)


def token_lists(table: pa.Table) -> dict[str, FlatLists]:
    """Return values ``(T,)`` and offsets ``(N + 1,)`` int64, the first 0, of every token column.

    Raises:
        ValueError: for anything but lists of numbers, and for unequal numbers of entries.
    """
    lists = {
        name: flat_lists(name, table.column(name)) for name in token_columns(table.column_names)
    }
    lengths = np.diff(lists["input_ids"][1])
    for name, (_, offsets) in lists.items():
        wrong = np.flatnonzero(np.diff(offsets) != lengths)
        if len(wrong):
            raise ValueError(
                f"a document has {lengths[wrong[0]]} input_ids but {np.diff(offsets)[wrong[0]]} "
                f"{name}; give one label, mask entry or weight per token"
            )
    return lists


def flat_lists(name: str, column: pa.ChunkedArray) -> FlatLists:
    """Return values ``(T,)`` and offsets ``(N + 1,)`` int64, the first 0, of one column."""
    chunk = column.combine_chunks()  # always copies, so that the offsets of a slice start at 0
    values, offsets = (weight_lists if name == TOKEN_WEIGHTS else integer_lists)(name, chunk)
    return values, offsets.astype(np.int64)


def list_column(values: np.ndarray, offsets: np.ndarray, field: pa.Field) -> pa.Array:
    """Return the list array of `values` in the type of `field`, without its fixed list length."""
    kind = field.type
    if pa.types.is_null(kind.value_type):  # a batch of empty documents of a stream
        kind = pa.list_(pa.int64())
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(kind)
