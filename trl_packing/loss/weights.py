"""The weight of each target of a batch, and the factor that makes a step one weighted mean.

    labels        -100   12   13 -100   22     trained tokens
    loss_weights     0  1.0  0.5    0  2.0     weight of each; 1 without the column

    loss of the step = Σ w · loss of a target / Σ w

The loss is divided by N, the number of trained tokens of the step, and each weight is multiplied by
N / Σ w: weights of 1 then change no bit.
"""

from collections.abc import Iterable, Mapping
from typing import Any

import torch
from torch import Tensor

from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_WEIGHTS, WEIGHT_COLUMNS


def target_weights(batch: Mapping[str, Any]) -> Tensor:
    """Return the weight of every target ``labels[:, 1:]``, ``(rows, T - 1)`` float32.

    Untrained targets have 0. Trained ones have 1 if the batch has no `loss_weights`.
    """
    is_trained = batch["labels"][..., 1:] != IGNORE_INDEX
    weights = batch.get(TOKEN_WEIGHTS)
    return is_trained.float() if weights is None else weights[..., 1:] * is_trained


def sum_of_weights(weights: Tensor) -> Tensor:
    """Return Σ w, a scalar, in a dtype that is wide enough for large weights."""
    return weights.sum(dtype=sums_dtype(weights.device))


def scale_of_weights(num_trained: Tensor, total: Tensor) -> Tensor:
    """Return ``num_trained / total``, the factor of all weights; 0 if they are all 0.

    It has the dtype of `total`: for very large or small weights float32 cannot hold it.
    """
    return torch.where(total > 0, num_trained / total, 0.0)


def scaled_weights(weights: Tensor, scale: Tensor) -> Tensor:
    """Return ``weights * scale`` in float32, multiplied in the dtype of `scale`.

    Weights and scale may each be beyond float32 where their product is around 1.
    """
    return (weights.to(scale.dtype) * scale).to(weights.dtype)


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type that `device` can add up."""
    return torch.float32 if device.type == "mps" else torch.float64


def check_weights_can_be_used(compute_loss_func: Any, columns: Iterable[str]) -> None:
    """Raise ValueError if `columns` hold weights that `compute_loss_func` would ignore."""
    for column in WEIGHT_COLUMNS:
        if compute_loss_func is not None and column in columns:
            each = "token" if column == TOKEN_WEIGHTS else "document"
            raise ValueError(
                f"{column} says what each {each} counts, but compute_loss_func computes the loss "
                f"without it; leave compute_loss_func out, or drop the column: "
                f"dataset.remove_columns({column!r})"
            )
