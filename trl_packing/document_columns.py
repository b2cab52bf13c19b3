"""Columns of a data set that hold one value for every document: what it counts, its source.

    loss_weight    0.5    1    2        float32, checked before anything is trained
    source         web  code  web       0 1 … by the names in order: the same on every rank, since
                                        every rank holds the whole data set

A piece of a document has the values of the document.
"""

from collections.abc import Iterable
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa

from trl_packing.arrow_documents import ArrowDocuments
from trl_packing.labels import DOCUMENT_WEIGHT_COLUMN
from trl_packing.weighting import wrong_weight

# Every source is a metric of its own: a column of texts or ids was meant for something else.
_MOST_SOURCES = 1000


def document_columns_of(columns: Iterable[str], source_column: str | None = None) -> list[str]:
    """Return which of `columns` hold a value for every document."""
    kept = (DOCUMENT_WEIGHT_COLUMN, source_column)
    return [column for column in columns if column in kept]


def weights_of_documents(dataset: datasets.Dataset, which: str) -> np.ndarray:
    """Return the `loss_weight` of every row, ``(rows,)`` float32.

    Raises ValueError, naming the row of `which`, for what is missing, negative, infinite or NaN,
    and for a column that does not hold numbers.
    """
    column = dataset.data.column(DOCUMENT_WEIGHT_COLUMN)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(
            f"column {DOCUMENT_WEIGHT_COLUMN!r} of {which} holds {column.type}, but it says what "
            "each document counts; convert it to numbers, or drop it"
        )
    rows = _stored_rows(dataset)
    with np.errstate(over="ignore"):  # what float32 cannot hold is refused as infinite
        weights = column.to_numpy()[rows].astype(np.float32)  # missing ones become NaN
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"row {row} of {which} has {wrong_weight(column[rows[row]].as_py())}")
    return weights


@dataclass(frozen=True)
class Sources:
    """Where the rows of an evaluation set come from.

    names: the values of the column, in order (of a ClassLabel, their names).
    ids: the index in `names` for every row, ``(rows,)`` int64.
    num_documents: how many documents each source has, ``(names,)`` int64.
    """

    names: tuple[str, ...]
    ids: np.ndarray
    num_documents: np.ndarray

    @classmethod
    def of(cls, dataset: datasets.Dataset | datasets.IterableDataset, column: str) -> "Sources":
        """Return those that `column` names.

        Raises ValueError for a column that is not there or names no sources, and for a stream.
        """
        check_source_column(dataset, column)
        encoded = dataset.data.column(column).dictionary_encode().combine_chunks()
        stored = encoded.indices.to_numpy(zero_copy_only=False)[_stored_rows(dataset)]
        if encoded.null_count and np.isnan(stored).any():
            raise ValueError(
                f"row {int(np.argmax(np.isnan(stored)))} of an evaluation set has no {column!r} "
                "(it is null), which source_column names; fill it in"
            )
        # The table may hold values of rows that were left out.
        present, ids = np.unique(stored.astype(np.int64), return_inverse=True)
        if len(present) > _MOST_SOURCES:
            raise ValueError(
                f"source_column={column!r} has {len(present):,} different values in an evaluation "
                f"set, and each would be a metric; name a column of at most {_MOST_SOURCES:,}"
            )
        values = [encoded.dictionary[int(index)].as_py() for index in present]
        kind = dataset.features[column]
        if isinstance(kind, datasets.ClassLabel):
            values = [kind.int2str(value) for value in values]
        names = [str(value) for value in values]
        order = sorted(range(len(names)), key=names.__getitem__)
        ids = np.argsort(order)[ids]
        counts = np.bincount(ids, _documents_of_rows(dataset), minlength=len(names))
        return cls(tuple(names[i] for i in order), ids, counts.astype(np.int64))


def check_source_column(dataset: datasets.Dataset | datasets.IterableDataset, column: str) -> None:
    """Raise ValueError if `column` of an evaluation set is not there, or holds no names."""
    if isinstance(dataset, datasets.IterableDataset):
        raise ValueError(
            f"source_column={column!r} needs to know all sources before the first batch, and a "
            "stream tells them only by being read; load the evaluation set as a Dataset, or leave "
            "source_column out"
        )
    if column not in dataset.column_names:
        raise ValueError(
            f"source_column={column!r}, but an evaluation set has no such column: it has "
            f"{dataset.column_names}; name one of them, or leave source_column out"
        )
    kind = dataset.data.column(column).type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"source_column={column!r} holds {kind}, but sources are texts or whole numbers; name "
            "another column, or leave source_column out"
        )


def _stored_rows(dataset: datasets.Dataset) -> np.ndarray:
    return ArrowDocuments(dataset, ()).stored_rows(np.arange(len(dataset)))


def _documents_of_rows(dataset: datasets.Dataset) -> np.ndarray:
    if "seq_lengths" not in dataset.column_names:
        return np.ones(len(dataset), dtype=np.int64)
    return ArrowDocuments(dataset, ["seq_lengths"]).lengths("seq_lengths")
