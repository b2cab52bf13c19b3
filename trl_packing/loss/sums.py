"""Weights of targets, their sums by source over many micro-batches, and the means of these sums.

    loss of a step        Σ w · loss / Σ w, and so is eval_loss
    entropy               Σ entropy / trained tokens
    mean_token_accuracy   hits / trained tokens

A step is divided by N, its trained tokens, and each weight is multiplied by N / Σ w: weights of 1
then change no bit. `aux_loss`, the balance of experts, is weighted by tokens.
"""

from collections.abc import Iterable, Mapping, MutableMapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import datasets
import numpy as np
import pyarrow as pa
import torch
from torch import Tensor

from trl_packing.attention.sequence_parallel import num_shares
from trl_packing.documents.arrow import ArrowDocuments, is_packed, stored_rows
from trl_packing.documents.host_row import host_row
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SEQ_LENGTHS,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
    TARGET_COUNTS,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)

MicroBatch: TypeAlias = Mapping[str, Any]  # its tensors by name, and what models take beside

# Each source becomes a metric. A column with more values holds texts or ids, not sources.
MOST_SOURCES = 1000


class SourceSums(NamedTuple):
    """Sums over the targets of a source: Σ w · loss, Σ w, and trained tokens."""

    loss: float
    weight: float
    trained: float


class Sums(NamedTuple):
    """Sums over the targets of micro-batches, of one rank or of all.

    Attributes:
        by_source: empty if sources are not told apart.
        entropy: over trained tokens, and `hits` too.
        aux_loss: of each micro-batch, times its tokens.
        tokens: padding included.
        weight: Σ w.
        loss: Σ w · loss.
    """

    by_source: list[SourceSums]
    entropy: float
    hits: float
    trained: float
    aux_loss: float
    tokens: float
    micro_batches: float
    weight: float
    loss: float

    @classmethod
    def of(cls, values: np.ndarray) -> "Sums":
        """Return the sums that `LossSums.take` has returned as a vector, ``(width,)``."""
        numbers, of_sources = np.split(values, [len(_NUMBERS)])
        _, *rows = of_sources.reshape(-1, _OF_SOURCE).tolist()  # the first is of no source
        return cls([SourceSums(*row) for row in rows], *numbers.tolist())


# The order in a vector; the sums of no source, and of each source, follow.
_, *_NUMBERS = Sums.__annotations__
_OF_SOURCE = len(SourceSums.__annotations__)


def target_weights(batch: MicroBatch) -> Tensor:
    """Return the weight of every target ``labels[:, 1:]``, ``(rows, T - 1)`` float32; 0: untrained.

    Trained ones have 1 if the batch has no `loss_weights`.
    """
    is_trained = batch["labels"][..., 1:] != IGNORE_INDEX
    weights = batch.get(TOKEN_WEIGHTS)
    return is_trained.float() if weights is None else weights[..., 1:] * is_trained


def tokens_of_batch(batch: MicroBatch) -> float:
    """Return the tokens of a batch, padding included; of a divided row, 1/N of its documents'."""
    row = host_row(batch)
    size = 1 if row is None else num_shares(batch["input_ids"].shape[1], batch["cu_seq_lens_q"])
    if row is None or size == 1:
        return batch["labels"].numel()
    return (row.num_tokens - row.padding) / size


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type that `device` can add up."""
    if device.type == "xpu":  # some Intel GPUs have no float64
        has_float64 = torch.xpu.get_device_properties(device).has_fp64
    else:
        has_float64 = device.type != "mps"
    return torch.float64 if has_float64 else torch.float32


def check_weights_can_be_used(compute_loss_func: Any, columns: Iterable[str]) -> None:
    """Raise ValueError if `columns` hold weights that `compute_loss_func` would ignore."""
    found = [column for column in WEIGHT_COLUMNS if column in columns]
    if compute_loss_func is not None and found:
        raise ValueError(
            f"compute_loss_func computes the loss without {found[0]}; leave it out, or drop the "
            f"column: dataset.remove_columns({found[0]!r})"
        )


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
    def of(cls, dataset: Any, column: str, which: str = "an evaluation set") -> "Sources":
        """Return the sources that `column` of `dataset` names; messages call the set `which`.

        Raises:
            ValueError: the column is missing or names no sources, or `dataset` is a stream.
        """
        wrong, way_out = None, "name another column, or leave source_column out"
        if isinstance(dataset, datasets.IterableDataset):
            wrong = f"{which} is a stream: a stream tells them only by being read"
        elif column not in dataset.column_names:
            wrong = f"{which} has no such column: it has {dataset.column_names}"
        else:
            values = dataset.data.column(column).take(pa.array(stored_rows(dataset)))
            if pa.types.is_floating(values.type) or pa.types.is_nested(values.type):
                wrong = f"in {which} it holds {values.type}, not texts or whole numbers"
            elif values.null_count:
                row = values.is_null().index(True).as_py()
                wrong = f"row {row} of {which} has none (it is null)"
                way_out = "fill it in"
            else:
                encoded = values.dictionary_encode().combine_chunks()
                if len(encoded.dictionary) > MOST_SOURCES:
                    wrong = f"it has {len(encoded.dictionary):,} different values in {which}"
        if wrong:
            raise ValueError(f"source_column={column!r}, but {wrong}; {way_out}")
        names = encoded.dictionary.to_pylist()
        feature = dataset.features[column]
        if isinstance(feature, datasets.ClassLabel):
            names = feature.int2str(names)
        names = [str(name) for name in names]
        order = sorted(range(len(names)), key=names.__getitem__)
        ids = np.argsort(order)[encoded.indices.to_numpy()]
        held = None  # documents of each row, if they are packed
        if is_packed(dataset):
            held = ArrowDocuments(dataset, [SEQ_LENGTHS]).lengths(SEQ_LENGTHS)
        counts = np.bincount(ids, held, minlength=len(names))
        return cls(tuple(names[i] for i in order), ids, counts.astype(np.int64))


class LossSums:
    """The sums of the micro-batches of one rank; they stay on the device until they are taken.

    Losses of `num_sources` sources are told apart.
    """

    def __init__(self, num_sources: int = 0):
        self.num_sources = num_sources
        self._sums: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of values that `take` returns."""
        return len(_NUMBERS) + _OF_SOURCE * (1 + self.num_sources)

    def add(self, batch: MicroBatch, losses: Tensor, scored: Any) -> None:
        """Add a packed or padded micro-batch.

        Args:
            batch: the micro-batch.
            losses: of all targets, without weights, ``(rows, T - 1)``.
            scored: has `entropy` and `is_top1` of the same targets, and `aux_loss` or None.
        """
        dtype = sums_dtype(losses.device)
        weights = target_weights(batch).to(losses.device)
        # How many documents train each target.
        times = batch.get(TARGET_COUNTS, batch["labels"] != IGNORE_INDEX)
        times = times[..., 1:].to(losses.device)
        # A loss may be infinite, or NaN, where it counts nothing.
        losses = losses.detach().to(dtype).masked_fill(weights == 0, 0.0)
        tokens = torch.full((), tokens_of_batch(batch), dtype=dtype, device=losses.device)
        aux_loss = torch.zeros_like(tokens) if scored.aux_loss is None else scored.aux_loss.detach()
        found = {
            "entropy": (scored.entropy.detach().to(dtype) * times).sum(),
            "hits": (scored.is_top1 * times).sum(),
            "trained": times.sum(),
            "aux_loss": aux_loss.to(tokens) * tokens,
            "tokens": tokens,
            "micro_batches": torch.ones_like(tokens),
            "weight": weights.sum(dtype=dtype),
            "loss": (losses * weights).sum(),
        }
        sums = torch.stack([found[name].to(dtype) for name in _NUMBERS])
        by_source = sums.new_zeros(1 + self.num_sources, _OF_SOURCE)
        if self.num_sources and SOURCE_IDS in batch:
            _add_by_source(by_source, batch, losses, weights, times)
        sums = torch.cat([sums, by_source.flatten()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> Tensor | None:
        """Return the sums since the last call, ``(width,)``; None if nothing was added.

        `Sums.of` reads them.
        """
        sums = self._sums
        self._sums = None
        return sums


def _add_by_source(
    by_source: Tensor, batch: MicroBatch, losses: Tensor, weights: Tensor, times: Tensor
) -> None:
    """Add Σ w · loss, Σ w and trained tokens of each source to `by_source`, in place."""
    ids = batch[SOURCE_IDS]
    losses = losses.flatten()
    if SOURCE_PLACES in batch:  # documents of several sources may train one target
        weights, times = batch[SOURCE_WEIGHTS]
        losses = losses[batch[SOURCE_PLACES][0] - 1]
    else:
        ids = ids[..., 1:]
    values = losses * weights.flatten().to(losses.device), weights.flatten(), times.flatten()
    for column, value in zip(by_source.unbind(1), values, strict=True):
        column.index_add_(0, 1 + ids.flatten().to(by_source.device), value.to(by_source))


def write_means(metrics: MutableMapping[str, list[float]], sums: Sums, *, balances: bool) -> None:
    """Write the means of sums into TRL's `_metrics` of a mode; one over no tokens is left out.

    Without scored micro-batches the lists stay: a user's `compute_loss` may have written them.
    `balances` says whether the loss has a term for the balance of experts.
    """
    if not sums.micro_batches:
        return
    means = {
        "entropy": (sums.entropy, sums.trained),
        "mean_token_accuracy": (sums.hits, sums.trained),
        "aux_loss": (sums.aux_loss, sums.tokens if balances else 0),
    }
    for name, (total, count) in means.items():
        metrics.pop(name, None)
        if count:
            metrics[name] = [total / count]
