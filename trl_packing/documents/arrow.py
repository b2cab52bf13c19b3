"""Arrow columns of a data set as NumPy arrays, without a Python object per token.

    Arrow column      chunk 0: values ........., offsets 0 3 8      chunk 1: ...
    document i        values[offsets[i] : offsets[i + 1]]           a view of the memory-mapped file

`datasets` would make a Python object of every token, about 2M tokens/s. Shape letters: N documents,
T tokens of all of them.
"""

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from itertools import accumulate
from typing import Any, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import torch

from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, TOKEN_WEIGHTS

AnyDataset: TypeAlias = datasets.Dataset | datasets.IterableDataset

# Values ``(T,)`` and offsets ``(N + 1,)``: list i is ``values[offsets[i] : offsets[i + 1]]``.
FlatLists = tuple[np.ndarray, np.ndarray]

Condition = Callable[[np.ndarray], np.ndarray]  # of values, True where it is met


class ArrowDocuments(torch.utils.data.Dataset):
    """The token columns of a `datasets.Dataset`; ``documents[i]`` is a dict of arrays.

    Those of `columns` that it has are read. They hold a list of integers per document
    (`loss_weights`: any numbers, read as float32), else the first access raises ValueError;
    `scalars` hold a number, ``(documents,)``.
    """

    def __init__(
        self,
        dataset: datasets.Dataset,
        columns: Sequence[str],
        scalars: Mapping[str, np.ndarray] | None = None,
    ):
        self.dataset = dataset
        self.columns = tuple(column for column in columns if column in dataset.column_names)
        self.scalars = dict(scalars or {})

    def __len__(self) -> int:
        return len(self.dataset)

    def __getitem__(self, index: int) -> dict[str, np.ndarray]:
        return self.__getitems__([index])[0]

    def __iter__(self) -> Iterator[dict[str, np.ndarray]]:
        return (self[index] for index in range(len(self)))

    def __getitems__(self, indices: Iterable[int]) -> list[dict[str, np.ndarray]]:
        readers = self.readers.items()
        numbers = range(len(self))
        chosen = [numbers[index] for index in indices]
        rows = chosen if self.mapping is None else self.mapping[chosen].tolist()
        documents = []
        for row in rows:
            documents.append({name: reader[row] for name, reader in readers})
        for name, values in self.scalars.items():
            for document, value in zip(documents, values[chosen], strict=True):
                document[name] = value
        return documents

    def __getstate__(self) -> dict[str, Any]:
        # A dataloader worker maps the file again rather than receive a copy of what was read.
        return {name: vars(self)[name] for name in ("dataset", "columns", "scalars")}

    @cached_property
    def readers(self) -> "dict[str, ListColumn]":
        """The columns as NumPy views, by name; their rows are in the order of the Arrow table."""
        return {name: ListColumn(name, self.dataset.data.column(name)) for name in self.columns}

    @cached_property
    def mapping(self) -> np.ndarray | None:
        """The stored row of each document, ``(documents,)`` int64; None if they are in order."""
        return None if self.dataset._indices is None else stored_rows(self.dataset)

    def by_document(
        self, column: str, function: Callable[[np.ndarray, np.ndarray], np.ndarray]
    ) -> np.ndarray:
        """Return what `function` makes of values and offsets of `column`, ``(documents,)``."""
        found = [function(*chunk) for chunk in self.readers[column].chunks]
        return self.in_order(np.concatenate(found) if found else np.zeros(0, np.int64))

    def in_order(self, values: np.ndarray) -> np.ndarray:
        """Return `values` of the stored rows as those of the documents; no copy without need."""
        return values if self.mapping is None else values[self.mapping]

    @property
    def num_documents(self) -> int:
        """Rows, or the documents in them where rows are packed (they have `seq_lengths`)."""
        return int(self.lengths(SEQ_LENGTHS).sum()) if is_packed(self) else len(self)

    def lengths(self, column: str = "input_ids") -> np.ndarray:
        """Return the entries of `column` in every document, ``(documents,)`` int64, read-only."""
        return self.in_order(self.readers[column].lengths)

    def num_trained(self) -> np.ndarray:
        """Return the trained tokens of every row, ``(rows,)`` int64: never a document's first."""
        if "labels" not in self.columns:
            return np.maximum(self.lengths() - 1, 0)
        if is_packed(self):
            rows = ((row["labels"], np.append(0, np.cumsum(row[SEQ_LENGTHS]))) for row in self)
            return np.array([_num_trained(*row).sum() for row in rows], dtype=np.int64)
        return self.by_document("labels", _num_trained)

    def sums(self, column: str) -> np.ndarray:
        """Return the sum of `column` in every document, ``(documents,)`` int64."""
        return self.by_document(column, _sums)

    def counts_where(self, column: str, condition: Condition) -> np.ndarray:
        """Return how many values of `column` meet `condition` in every row, ``(rows,)`` int64."""
        return self.by_document(column, lambda values, ends: _sums(condition(values), ends))

    def rows_where(self, column: str, condition: Condition) -> np.ndarray:
        """Return the rows with a value of `column` for which `condition` is True, ascending."""
        return np.flatnonzero(self.counts_where(column, condition))


def _num_trained(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    return _sums(labels != IGNORE_INDEX, offsets, skipped=1)


def _sums(values: np.ndarray, offsets: np.ndarray, skipped: int = 0) -> np.ndarray:
    """Return the sum of every list, int64, without its first `skipped` values."""
    running = np.zeros(len(values) + 1, np.int64)
    np.cumsum(values, out=running[1:])
    starts = np.minimum(offsets[:-1] + skipped, offsets[1:])
    return running[offsets[1:]] - running[starts]


def is_packed(dataset: ArrowDocuments | AnyDataset) -> bool:
    """Return whether rows hold several documents: their columns, or a first row, say so."""
    columns = dataset.columns if isinstance(dataset, ArrowDocuments) else dataset.column_names
    return SEQ_LENGTHS in (next(iter(dataset), {}) if columns is None else columns)


def stored_rows(dataset: datasets.Dataset) -> np.ndarray:
    """Return the rows of the Arrow table that hold the rows of `dataset`, ``(rows,)`` int64."""
    # The mapping has no public reader; `flatten_indices` would write the data set again.
    mapping = dataset._indices
    rows = np.arange(len(dataset)) if mapping is None else mapping.column(0).to_numpy()
    return rows.astype(np.int64, copy=False)


class ListColumn:
    """One Arrow column of lists; ``column[row]`` is a view of its values.

    `chunks` are values and offsets of each chunk with rows, `first_row` their first stored rows,
    with the number of rows at the end.
    """

    def __init__(self, name: str, column: pa.ChunkedArray):
        self.name = name
        self.chunks = [lists_of(name, chunk) for chunk in column.chunks if len(chunk)]
        self.first_row = [0, *accumulate(len(offsets) - 1 for _, offsets in self.chunks)]

    @cached_property
    def lengths(self) -> np.ndarray:
        """The entries of each stored row, ``(rows,)`` int64, read-only."""
        of_chunks = [np.diff(offsets) for _, offsets in self.chunks]
        lengths = np.concatenate([np.zeros(0, np.int64), *of_chunks])
        lengths.flags.writeable = False
        return lengths

    def __getitem__(self, row: int) -> np.ndarray:
        chunk = bisect_right(self.first_row, row) - 1
        values, offsets = self.chunks[chunk]
        at = row - self.first_row[chunk]
        found = values[offsets[at] : offsets[at + 1]]
        if self.name != TOKEN_WEIGHTS:
            return found
        with np.errstate(over="ignore"):  # `check_token_weights` refuses inf
            return found.astype(np.float32, copy=False)


def lists_of(name: str, chunk: pa.Array) -> FlatLists:
    """Return values and offsets of lists of integers or booleans; of weights, any numbers."""
    if chunk.null_count:
        raise ValueError(f"column {name!r} has a null row; filter it out, and flatten_indices()")
    if pa.types.is_fixed_size_list(chunk.type):
        chunk = chunk.cast(pa.list_(chunk.type.value_type))
    is_list = pa.types.is_list(chunk.type) or pa.types.is_large_list(chunk.type)
    if is_list and pa.types.is_null(chunk.type.value_type) and not len(chunk.values):
        chunk = chunk.cast(pa.list_(pa.int64()))  # every row is empty
    is_other = pa.types.is_floating if name == TOKEN_WEIGHTS else pa.types.is_boolean
    kind = chunk.type.value_type if is_list else None
    if kind is None or not (pa.types.is_integer(kind) or is_other(kind)):
        numbers = "numbers" if name == TOKEN_WEIGHTS else "integers"
        raise ValueError(f"column {name!r} holds {chunk.type}, not lists of {numbers}; convert it")
    if chunk.values.null_count:
        raise ValueError(f"column {name!r} has a missing (null) token; remove such rows")
    return chunk.values.to_numpy(zero_copy_only=False), chunk.offsets.to_numpy()


def flat_lists(name: str, column: pa.ChunkedArray) -> FlatLists:
    """Return values ``(T,)`` and offsets ``(N + 1,)`` int64, the first 0, of one column."""
    # combine_chunks always copies, so that the offsets of a slice start at 0
    values, offsets = lists_of(name, column.combine_chunks())
    return values, offsets.astype(np.int64)


def list_column(values: np.ndarray, offsets: np.ndarray, field: pa.Field) -> pa.Array:
    """Return the list array of `values` in the type of `field`."""
    kind = field.type
    if pa.types.is_null(kind.value_type):  # a batch of empty documents of a stream
        kind = pa.list_(pa.int64())
    if pa.types.is_fixed_size_list(kind):  # pieces have other sizes
        kind = pa.list_(kind.value_type)
    return pa.LargeListArray.from_arrays(pa.array(offsets), pa.array(values)).cast(kind)
