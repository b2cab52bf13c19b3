"""The columns of an Arrow table that hold one entry per token, as flat arrays and back.

    table            input_ids [5 6] [7]     labels [-100 6] [7]     other columns
        │  token_lists
        ▼
    flat             input_ids 5 6 7         labels -100 6 7         offsets 0 2 3
        │  cut, extend: one NumPy call for a whole batch
        ▼
    list_column      the column again, in the type that it had

Shape letters: N documents, T tokens of all of them. A document's weights go where its tokens go.
"""

from collections.abc import Iterable

import numpy as np
import pyarrow as pa

from trl_packing.arrow_documents import integer_lists, weight_lists
from trl_packing.labels import WEIGHT_COLUMN

TOKEN_COLUMNS = ("input_ids", "labels")

FlatLists = tuple[np.ndarray, np.ndarray]


def token_columns_of(columns: Iterable[str]) -> list[str]:
    """Return `TOKEN_COLUMNS`, and `WEIGHT_COLUMN` if it is among `columns`."""
    return [*TOKEN_COLUMNS, *({WEIGHT_COLUMN} & set(columns))]


def token_lists(table: pa.Table) -> dict[str, FlatLists]:
    """Return values ``(T,)`` and offsets ``(N + 1,)`` int64, the first 0, of every token column.

    Raises ValueError for anything but lists of numbers, and for unequal numbers of entries.
    """
    lists = {
        name: flat_lists(name, table.column(name)) for name in token_columns_of(table.column_names)
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
    chunk = column.combine_chunks()  # a copy, also of one chunk: the offsets of a slice begin at 0
    values, offsets = (weight_lists if name == WEIGHT_COLUMN else integer_lists)(name, chunk)
    return values, offsets.astype(np.int64)


def list_column(values: np.ndarray, offsets: np.ndarray, field: pa.Field) -> pa.Array:
    """Return the list array of `values` in the type of `field`; a fixed length becomes any."""
    kind = field.type
    if pa.types.is_null(kind.value_type):  # a batch of empty documents of a stream
        kind = pa.list_(pa.int64())
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(kind)
