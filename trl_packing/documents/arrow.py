"""Documents read out of an Arrow data set as NumPy views, without a Python list per token.

    Arrow column      chunk 0: values ........., offsets 0 3 8      chunk 1: ...
    document i        values[offsets[i] : offsets[i + 1]]           a view of the memory-mapped file

`datasets` turns every token of every row into a Python object before a collator sees it, which
limits a training dataloader to about 2M tokens/s. Only lengths are held in memory: 16 bytes per
document.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import torch

from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS
from trl_packing.documents.list_columns import ListColumn


class ArrowDocuments(torch.utils.data.Dataset):
    """The token columns of a `datasets.Dataset`; ``documents[i]`` is a dict of arrays.

    Reads through the data set's indices mapping (select, shuffle, filter) and ignores its format.

    Args:
        dataset: the data set whose columns are read.
        columns: names of columns that hold a list per document.
        scalars: further values, one number per document, ``(documents,)`` each.

    Raises:
        ValueError: on first access, if a column does not hold lists of integers. `loss_weights`
            may also hold floats of any width; they are returned as float32.
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
        self._readers: dict[str, ListColumn] | None = None
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
    def readers(self) -> dict[str, ListColumn]:
        """The columns as NumPy views, by name; their rows are in the order of the Arrow table."""
        if self._readers is None:
            table = self.dataset.data
            self._readers = {name: ListColumn(name, table.column(name)) for name in self.columns}
        return self._readers

    def with_dataset(self, dataset: datasets.Dataset) -> "ArrowDocuments":
        """Return the same columns of `dataset`, with these readers if it has the same table."""
        documents = ArrowDocuments(dataset, self.columns)
        if dataset.data is self.dataset.data:
            documents._readers = self._readers
        return documents

    def stored_rows(self, indices: np.ndarray) -> np.ndarray:
        """Return the rows of the Arrow table that hold documents `indices`."""
        # The mapping has no public reader; `flatten_indices` would write the data set again.
        if self.dataset._indices is None:
            return indices
        if self._mapping is None:  # read once: a table of several chunks is copied
            self._mapping = self.dataset._indices.column(0).to_numpy()
        return self._mapping[indices].astype(np.int64)

    def in_order(self, chunks: Sequence[np.ndarray]) -> np.ndarray:
        """Return values of the stored rows of each chunk as values of the documents, in order."""
        stored = np.concatenate(chunks) if len(chunks) else np.zeros(0, np.int64)
        return stored[self.stored_rows(np.arange(len(self)))]

    @property
    def num_documents(self) -> int:
        """Rows, or the documents in them where rows are packed (they have `seq_lengths`)."""
        return int(self.lengths(SEQ_LENGTHS).sum()) if is_packed(self) else len(self)

    def lengths(self, column: str = "input_ids") -> np.ndarray:
        """Return the entries of `column` in every document, ``(documents,)`` int64."""
        return self.in_order([self.readers[column].lengths])

    def num_trained(self) -> np.ndarray:
        """Return the trained tokens of every row, ``(rows,)`` int64.

        The first token of a document counts for nothing: it is never a target.
        """
        if "labels" not in self.columns:
            return np.maximum(self.lengths() - 1, 0)
        if is_packed(self):
            return np.array([_num_trained_in_row(row) for row in self], dtype=np.int64)
        return self.in_order([self.readers["labels"].count_after_first(IGNORE_INDEX)])

    def sums(self, column: str) -> np.ndarray:
        """Return the sum of `column` in every document, ``(documents,)`` int64."""
        return self.in_order([self.readers[column].sums()])

    def rows_where(self, column: str, condition: Callable[[np.ndarray], np.ndarray]) -> np.ndarray:
        """Return the rows that have a value of `column` which meets `condition`, ascending.

        Args:
            column: one of `columns`.
            condition: function from values ``(T,)`` to booleans ``(T,)``.
        """
        found = []
        for values, offsets in self.readers[column].chunks:
            at = np.flatnonzero(condition(values))
            found.append(np.searchsorted(at, offsets[1:]) > np.searchsorted(at, offsets[:-1]))
        return np.flatnonzero(self.in_order(found))


def _num_trained_in_row(row: dict[str, np.ndarray]) -> int:
    starts = np.cumsum(row[SEQ_LENGTHS]) - row[SEQ_LENGTHS]
    trained = row["labels"] != IGNORE_INDEX
    trained[starts[starts < len(trained)]] = False
    return int(trained.sum())


def is_packed(dataset: ArrowDocuments | datasets.Dataset | datasets.IterableDataset) -> bool:
    """Return whether rows hold several documents each: they have `seq_lengths`.

    The first row of a stream is read if the stream does not know its columns.
    """
    columns = dataset.columns if isinstance(dataset, ArrowDocuments) else dataset.column_names
    return SEQ_LENGTHS in (next(iter(dataset), {}) if columns is None else columns)


def stored_rows(dataset: datasets.Dataset) -> np.ndarray:
    """Return the rows of the Arrow table that hold the rows of `dataset`, ``(rows,)`` int64."""
    return ArrowDocuments(dataset, ()).stored_rows(np.arange(len(dataset)))


def num_documents_by_row(dataset: datasets.Dataset) -> np.ndarray:
    """Return how many documents each row holds, ``(rows,)`` int64: 1 unless rows are packed."""
    if not is_packed(dataset):
        return np.ones(len(dataset), dtype=np.int64)
    return ArrowDocuments(dataset, [SEQ_LENGTHS]).lengths(SEQ_LENGTHS)
