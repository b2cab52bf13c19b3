"""Documents read out of an Arrow data set as NumPy views, without a Python list per token.

    Arrow column      chunk 0: values ........., offsets 0 3 8      chunk 1: ...
    document i        values[offsets[i] : offsets[i + 1]]           a view of the memory-mapped file

`datasets` turns every token of every row into a Python object before a collator sees it, which
bounds a training dataloader at about 2M tokens/s. Only lengths are held in memory: 16 bytes a
document.

The columns of an Arrow table that hold one entry per token, as flat arrays and back.

    table            input_ids [5 6] [7]     labels [-100 6] [7]     other columns
        │  token_lists
        ▼
    flat             input_ids 5 6 7         labels -100 6 7         offsets 0 2 3
        │  cut, extend: one NumPy call for a whole batch
        ▼
    list_column      the column again, in the type that it had

Shape letters: N documents, T tokens of all of them. A document's weights go where its tokens go.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
import torch

from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, TOKEN_WEIGHTS


class ArrowDocuments(torch.utils.data.Dataset):
    """The token columns of a `datasets.Dataset`; ``documents[i]`` is a dict of arrays.

    scalars: a number for every document, ``(documents,)``, that it has besides.

    Reads through the data set's indices mapping (select, shuffle, filter), ignores its format.
    Raises ValueError if a column does not hold lists of integers; `loss_weights` may hold floats
    too, of any width, and are given as float32.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        columns: Sequence[str],
        scalars: Mapping[str, np.ndarray] | None = None,
    ):
        self.dataset = dataset
        self.columns = tuple(columns)
        self.scalars = dict(scalars or {})
        self._readers: dict[str, _ListColumn] | None = None
        self._mapping: np.ndarray | None = None

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([range(len(self))[index]])[0]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        readers = self.readers.items()
        chosen = np.asarray(list(indices), dtype=np.int64)
        rows = self.stored_rows(chosen).tolist()
        documents = [{name: reader[row] for name, reader in readers} for row in rows]
        for name, values in self.scalars.items():
            for document, value in zip(documents, values[chosen], strict=True):
                document[name] = value
        return documents

    def __getstate__(self) -> dict[str, Any]:
        # A dataloader worker maps the file again rather than receive a copy of it.
        return self.__dict__ | {"_readers": None, "_mapping": None}

    @property
    def readers(self) -> dict[str, "_ListColumn"]:
        if self._readers is None:
            table = self.dataset.data
            self._readers = {name: _ListColumn(name, table.column(name)) for name in self.columns}
        return self._readers

    def stored_rows(self, indices: np.ndarray) -> np.ndarray:
        """Return where documents `indices` lie in the Arrow table."""
        # The mapping has no public reader; `flatten_indices` would write the data set anew.
        if self.dataset._indices is None:
            return indices
        if self._mapping is None:  # read once: a table of several chunks is copied
            self._mapping = self.dataset._indices.column(0).to_numpy()
        return self._mapping[indices].astype(np.int64)

    @property
    def num_documents(self) -> int:
        """Rows, or the documents in them where rows are packed (they have `seq_lengths`)."""
        return int(self.lengths(SEQ_LENGTHS).sum()) if is_packed(self) else len(self)

    def lengths(self, column: str = "input_ids") -> np.ndarray:
        """Return the entries of `column` in every document, ``(documents,)`` int64."""
        return self._in_order(self.readers[column].lengths)

    def num_trained(self) -> np.ndarray:
        """Return the trained tokens of every row, ``(rows,)`` int64.

        The first token of a document counts for nothing: it is never a target.
        """
        if "labels" not in self.columns:
            return np.maximum(self.lengths() - 1, 0)
        if is_packed(self):
            return np.array([_num_trained_in_row(row) for row in self], dtype=np.int64)
        return self._in_order(self.readers["labels"].count_after_first(IGNORE_INDEX))

    def sums(self, column: str) -> np.ndarray:
        """Return the sum of `column` in every document, ``(documents,)`` int64."""
        return self._in_order(self.readers[column].sums())

    def rows_where(self, column: str, condition: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the rows that have a value of `column` which meets `condition`, ascending.

        condition: from values ``(T,)`` to booleans ``(T,)``.
        """
        found = [np.zeros(0, bool)]
        for values, offsets in self.readers[column].chunks:
            at = np.flatnonzero(condition(values))
            found.append(np.searchsorted(at, offsets[1:]) > np.searchsorted(at, offsets[:-1]))
        return np.flatnonzero(np.concatenate(found)[self.stored_rows(np.arange(len(self)))])

    def _in_order(self, stored: np.ndarray) -> np.ndarray:
        return stored[self.stored_rows(np.arange(len(self)))]


def _num_trained_in_row(row: dict[str, np.ndarray]) -> int:
    starts = np.cumsum(row[SEQ_LENGTHS]) - row[SEQ_LENGTHS]
    trained = row["labels"] != IGNORE_INDEX
    trained[starts[starts < len(trained)]] = False
    return int(trained.sum())


def is_packed(dataset: "ArrowDocuments | datasets.Dataset | datasets.IterableDataset") -> bool:
    """Return whether rows hold several documents each: they have `seq_lengths`.

    The first row of a stream is read if the stream does not know its columns.
    """
    columns = dataset.columns if isinstance(dataset, ArrowDocuments) else dataset.column_names
    return SEQ_LENGTHS in (next(iter(dataset), {}) if columns is None else columns)


class _ListColumn:
    """One Arrow column of lists; ``column[row]`` is a view of its values."""

    def __init__(self, name: str, column: pa.ChunkedArray):
        self.name = name
        read = weight_lists if name == TOKEN_WEIGHTS else integer_lists
        self.chunks = [read(name, chunk) for chunk in column.chunks if len(chunk)]
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
        # By document: the whole column cast would be a copy of it in memory. A weight beyond float32
        # becomes inf, which `check_token_weights` refuses.
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
        """Return how many values of each row, its first one apart, differ from `ignored`."""
        return _concatenated([count_after_first(*chunk, ignored) for chunk in self.chunks])


def count_after_first(values: np.ndarray, offsets: np.ndarray, ignored: int) -> np.ndarray:
    """Return how many values of each row, its first one apart, differ from `ignored`."""
    running = np.zeros(len(values) + 1, dtype=np.int64)
    np.cumsum(values != ignored, out=running[1:])
    starts, ends = offsets[:-1], offsets[1:]
    return running[ends] - running[np.minimum(starts + 1, ends)]


def integer_lists(name: str, chunk: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return values and offsets: row i of `chunk` is ``values[offsets[i] : offsets[i + 1]]``.

    Raises ValueError, naming the column, for anything but lists of integers or booleans and for
    missing entries.
    """
    return _lists(
        name,
        chunk,
        lambda values: pa.types.is_integer(values) or pa.types.is_boolean(values),
        "tokens are lists of integers; convert it, or pass text and let the trainer tokenize it",
    )


def weight_lists(name: str, chunk: pa.Array) -> tuple[np.ndarray, np.ndarray]:
    """Return values and offsets as `integer_lists` does, of lists of integers or floats."""
    return _lists(
        name,
        chunk,
        lambda values: pa.types.is_integer(values) or pa.types.is_floating(values),
        "weights are lists of numbers, one per token; convert it",
    )


def _lists(
    name: str, chunk: pa.Array, is_allowed: Callable[[pa.DataType], bool], expected: str
) -> tuple[np.ndarray, np.ndarray]:
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


TOKEN_COLUMNS = ("input_ids", "labels")

FlatLists = tuple[np.ndarray, np.ndarray]


def token_columns_of(columns: Iterable[str]) -> list[str]:
    """Return `TOKEN_COLUMNS`, and `TOKEN_WEIGHTS` if it is among `columns`."""
    return [*TOKEN_COLUMNS, *({TOKEN_WEIGHTS} & set(columns))]


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
    values, offsets = (weight_lists if name == TOKEN_WEIGHTS else integer_lists)(name, chunk)
    return values, offsets.astype(np.int64)


def list_column(values: np.ndarray, offsets: np.ndarray, field: pa.Field) -> pa.Array:
    """Return the list array of `values` in the type of `field`; a fixed length becomes any."""
    kind = field.type
    if pa.types.is_null(kind.value_type):  # a batch of empty documents of a stream
        kind = pa.list_(pa.int64())
    elif pa.types.is_fixed_size_list(kind):
        kind = pa.list_(kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(kind)


def _stored_rows(dataset: datasets.Dataset) -> np.ndarray:
    return ArrowDocuments(dataset, ()).stored_rows(np.arange(len(dataset)))


def _documents_of_rows(dataset: datasets.Dataset) -> np.ndarray:
    if not is_packed(dataset):
        return np.ones(len(dataset), dtype=np.int64)
    return ArrowDocuments(dataset, [SEQ_LENGTHS]).lengths(SEQ_LENGTHS)
