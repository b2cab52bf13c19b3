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
import torch
import torch.nn.functional as F
from torch import Tensor

from trl_packing.documents.arrow import num_documents_by_row, stored_rows
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
)
from trl_packing.loss.token_metrics import sums_dtype
from trl_packing.loss.weighted_forward import target_weights

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
        num_targets: T - 1, of a row.
        places: their places among the T - 1; None if they are all targets of all rows, in order.
    """

    ids: Tensor
    weights: Tensor
    counts: Tensor
    num_targets: int
    places: Tensor | None = None

    @classmethod
    def of(cls, batch: Mapping[str, Any]) -> "SourceTargets":
        """Return the targets of a batch with `source_ids`, packed or padded."""
        ids, weights = batch[SOURCE_IDS], target_weights(batch)
        if SOURCE_PLACES in batch:
            sums, counts = batch[SOURCE_WEIGHTS]
            return cls(ids[0], sums, counts, weights.shape[1], batch[SOURCE_PLACES][0] - 1)
        counts = batch["labels"][..., 1:] != IGNORE_INDEX
        return cls(ids[..., 1:].flatten(), weights.flatten(), counts.flatten(), weights.shape[1])

    def add_to(self, sums: Tensor, losses: Tensor) -> None:
        """Add Σ w · loss, Σ w and Σ counts of each source to `sums`.

        Args:
            sums: ``(1 + sources, 2 or 3)``, changed in place; row 0 takes targets of no source.
            losses: of all targets, without weights, ``(rows, T - 1)``. Virtual tokens of prompt
                tuning come first, and belong to no source.
        """
        losses = losses[:, losses.shape[1] - self.num_targets :].flatten()
        losses = losses if self.places is None else losses[self.places]
        columns = (losses * self.weights.to(losses.device), self.weights, self.counts)
        rows = 1 + self.ids.to(sums.device)
        for column, values in zip(sums.unbind(1), columns, strict=False):
            column.index_add_(0, rows, values.to(sums))


class SourceSums:
    """Σ w · loss, Σ w and trained tokens of each source that one rank trains.

    They stay on the device until they are taken.

    Attributes:
        number: of sources; 0 where losses are not told apart.
    """

    def __init__(self) -> None:
        self.number = 0
        self._sums: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of values that `take` returns."""
        return 3 * (1 + self.number) if self.number else 0

    def expect(self, number: int) -> None:
        """Start from zero, with another number of sources."""
        self.number, self._sums = number, None

    def make_room(self, number: int) -> None:
        """Go on with more sources, those behind the known ones."""
        if self._sums is not None:
            self._sums = F.pad(self._sums, (0, 0, 0, number - self.number))
        self.number = number

    def add_by_source(self, targets: SourceTargets, losses: Tensor) -> None:
        """Add the `losses` of a micro-batch, as `SourceTargets.add_to` takes them."""
        if self._sums is None:
            dtype = sums_dtype(losses.device)
            self._sums = torch.zeros(1 + self.number, 3, dtype=dtype, device=losses.device)
        targets.add_to(self._sums, losses)

    def take(self) -> Tensor | None:
        """Return the sums since the last call, ``(width,)``; None if nothing was added."""
        sums, self._sums = self._sums, None
        return None if sums is None else sums.flatten()
