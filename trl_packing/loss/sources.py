"""The sources of a data set, and the targets of a batch by source.

source            web  code  web         a column of texts, whole numbers or classes
names, ids        code web               1 0 1
source_ids        1 1 1 0 0 1 1          the source of every position of a row
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from torch import Tensor

from trl_packing.documents.arrow import num_documents_by_row, stored_rows
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
)
from trl_packing.loss.weights import target_weights

# Each source becomes a metric. A column with more values holds texts or ids, not sources.
MOST_SOURCES = 1000


@dataclass(frozen=True)
class Sources:
    """The source of each row of a data set.

    Attributes:
        names: the values of the column, in order (of a ClassLabel, their names).
        ids: the index in `names` for every row, ``(rows,)`` int64.
        num_documents: number of documents of each source, ``(names,)`` int64.
    """

    names: tuple[str, ...]
    ids: np.ndarray
    num_documents: np.ndarray

    @classmethod
    def of(
        cls,
        dataset: datasets.Dataset | datasets.IterableDataset,
        column: str,
        which: str = "an evaluation set",
    ) -> "Sources":
        """Return the sources that `column` names.

        Args:
            dataset: rows of one or several documents.
            column: holds the source of each row.
            which: the data set, for messages.

        Raises:
            ValueError: the column is missing or names no sources, or `dataset` is a stream.
        """
        check_source_column(dataset, column, which)
        encoded = dataset.data.column(column).dictionary_encode().combine_chunks()
        stored = encoded.indices.to_numpy(zero_copy_only=False)[stored_rows(dataset)]
        if encoded.null_count and np.isnan(stored).any():
            raise ValueError(
                f"row {int(np.argmax(np.isnan(stored)))} of {which} has no {column!r} "
                "(it is null), which source_column names; fill it in"
            )
        # The table may hold values of rows that were left out.
        present, ids = np.unique(stored.astype(np.int64), return_inverse=True)
        if len(present) > MOST_SOURCES:
            raise ValueError(
                f"source_column={column!r} has {len(present):,} different values in {which}, "
                f"and each would be a metric; name a column of at most {MOST_SOURCES:,}"
            )
        values = [encoded.dictionary[int(index)].as_py() for index in present]
        kind = dataset.features[column]
        if isinstance(kind, datasets.ClassLabel):
            values = [kind.int2str(value) for value in values]
        names = [str(value) for value in values]
        order = sorted(range(len(names)), key=names.__getitem__)
        ids = np.argsort(order)[ids]
        counts = np.bincount(ids, num_documents_by_row(dataset), minlength=len(names))
        return cls(tuple(names[i] for i in order), ids, counts.astype(np.int64))


def check_source_column(
    dataset: datasets.Dataset | datasets.IterableDataset,
    column: str,
    which: str = "an evaluation set",
) -> None:
    """Raise ValueError if `column` of a data set is missing or holds no names."""
    if isinstance(dataset, datasets.IterableDataset):
        raise ValueError(
            f"source_column={column!r} needs to know all sources before the first batch, and a "
            "stream tells them only by being read; load the evaluation set as a Dataset, or leave "
            "source_column out"
        )
    if column not in dataset.column_names:
        raise ValueError(
            f"source_column={column!r}, but {which} has no such column: it has "
            f"{dataset.column_names}; name one of them, or leave source_column out"
        )
    kind = dataset.data.column(column).type
    is_text = pa.types.is_string(kind) or pa.types.is_large_string(kind)
    if not (is_text or pa.types.is_integer(kind) or pa.types.is_boolean(kind)):
        raise ValueError(
            f"source_column={column!r} holds {kind}, but sources are texts or whole numbers; name "
            "another column, or leave source_column out"
        )


@dataclass(frozen=True)
class SourceTargets:
    """The targets of a batch, each with its source; K of them.

    Attributes:
        ids: their sources, ``(K,)`` int64, −1 where there is none.
        weights: ``(K,)`` float32, 0 where nothing is trained.
        counts: documents that train each, ``(K,)``.
        places: their places among the T - 1; None if they are all targets of all rows, in order.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor
    places: Tensor | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "SourceTargets":
        """Return the targets of a batch with `source_ids`, packed or padded."""
        ids = batch[SOURCE_IDS]
        if SOURCE_PLACES in batch:
            sums, counts = batch[SOURCE_WEIGHTS]
            return cls(ids[0], sums, counts, batch[SOURCE_PLACES][0] - 1)
        weights, counts = target_weights(batch), batch["labels"][..., 1:] != IGNORE_INDEX
        return cls(ids[..., 1:].flatten(), weights.flatten(), counts.flatten())

    def add_to(self, sums: Tensor, losses: Tensor) -> None:
        """Add Σ w · loss, Σ w and Σ counts of each source to `sums`.

        Args:
            sums: ``(1 + sources, 3)``, changed in place; row 0 takes targets of no source.
            losses: of all targets, without weights, ``(rows, T - 1)``.
        """
        losses = losses.flatten() if self.places is None else losses.flatten()[self.places]
        columns = (losses * self.weights.to(losses.device), self.weights, self.counts)
        for column, values in zip(sums.unbind(1), columns, strict=True):
            column.index_add_(0, 1 + self.ids.to(sums.device), values.to(sums))
