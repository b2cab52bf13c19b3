"""The loss of a whole evaluation set, independent of its batches and of the number of ranks.

a batch            Σ w · loss, Σ w        of all tokens, and of the tokens of each source
    │  add
a rank             the same sums, of all of its batches
    │  reduce
eval_loss          Σ w · loss / Σ w       one mean over the whole set
"""

import math
from dataclasses import dataclass

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trl_packing.documents.arrow import num_documents_by_row, stored_rows
from trl_packing.loss.token_metrics import TokenSums

# Each source becomes a metric. A column with more values holds texts or ids, not sources.
_MOST_SOURCES = 1000


@dataclass(frozen=True)
class Sources:
    """The source of each row of an evaluation set.

    Attributes:
        names: the values of the column, in order (of a ClassLabel, their names).
        ids: the index in `names` for every row, ``(rows,)`` int64.
        num_documents: number of documents of each source, ``(names,)`` int64.
    """

    names: tuple[str, ...]
    ids: np.ndarray
    num_documents: np.ndarray

    @classmethod
    def of(cls, dataset: datasets.Dataset | datasets.IterableDataset, column: str) -> "Sources":
        """Return the sources that `column` names.

        Raises:
            ValueError: the column is missing or names no sources, or `dataset` is a stream.
        """
        check_source_column(dataset, column)
        encoded = dataset.data.column(column).dictionary_encode().combine_chunks()
        stored = encoded.indices.to_numpy(zero_copy_only=False)[stored_rows(dataset)]
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
        counts = np.bincount(ids, num_documents_by_row(dataset), minlength=len(names))
        return cls(tuple(names[i] for i in order), ids, counts.astype(np.int64))


def check_source_column(dataset: datasets.Dataset | datasets.IterableDataset, column: str) -> None:
    """Raise ValueError if `column` of an evaluation set is missing or holds no names."""
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


class EvaluationSums:
    """Σ w · loss and Σ w of the batches that this rank has evaluated.

    Attributes:
        sums: ``(1 + sources, 2)`` float64 on the CPU: of all batches, then of each source.
        tokens: entropy and accuracy of the same tokens.
        is_scored: whether any batch was added. A user's `compute_loss` may never add one.
    """

    def __init__(self, sources: Sources | None = None):
        self.sources = sources
        self.is_scored = False
        self.tokens = TokenSums()
        self.sums = torch.zeros(1 + (len(sources.names) if sources else 0), 2, dtype=torch.float64)

    def add(self, loss: Tensor, total: Tensor) -> None:
        """Add a batch by its mean loss and the `total` of its weights."""
        self.is_scored = True
        # Label smoothing computes 0 / 0 for a batch without trained tokens.
        share = torch.where(total > 0, loss.detach().float() * total, 0.0)
        self.sums[0] += torch.stack([share, total]).double().cpu()

    def add_by_source(self, losses: Tensor, weights: Tensor, source_ids: Tensor) -> None:
        """Add the weighted losses of all targets; each argument is ``(rows, T - 1)``."""
        rows = 1 + source_ids.flatten().cpu()
        for column, values in enumerate((losses, weights)):
            self.sums[:, column].index_add_(0, rows, values.flatten().cpu().double())

    def metrics(self, reduced: Tensor, prefix: str, *, is_likelihood: bool) -> dict[str, float]:
        """Return the metrics of all ranks; none without trained tokens.

        Args:
            reduced: the `sums` of all ranks.
            prefix: of the names of metrics.
            is_likelihood: the loss is a mean negative log-likelihood, which has a perplexity.
        """
        (loss, total), *by_source = reduced.tolist()
        if not total:
            return {}
        found = {f"{prefix}_loss": loss / total}
        if is_likelihood:
            found[f"{prefix}_perplexity"] = perplexity(loss / total)
        if self.sources is not None:
            counts = self.sources.num_documents.tolist()
            for name, count, (loss, total) in zip(
                self.sources.names, counts, by_source, strict=True
            ):
                found[f"{prefix}_num_documents_{name}"] = count
                if total:
                    found[f"{prefix}_loss_{name}"] = loss / total
        return found


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, infinite where a float cannot hold it.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
