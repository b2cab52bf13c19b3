"""Entropy and token accuracy as one mean over the trained tokens of all micro-batches.

    micro-batch           Σ entropy, hits, trained tokens             on the device
        │  add
    interval, one rank    the same sums
        │  added over ranks
    entropy               Σ entropy / trained tokens
    mean_token_accuracy   hits / trained tokens

TRL logs a mean of the means of micro-batches: a micro-batch without trained tokens counts as 0,
and one of three tokens as much as one of three thousand. `aux_loss`, the balance of experts, is
weighted by the tokens of micro-batches, as in the loss.
"""

from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
from torch import Tensor

NUM_SUMS = 7  # entropy, hits, trained tokens, aux_loss × tokens, tokens, micro-batches, weights


class TokenSums:
    """The sums of the micro-batches of one rank, ``(NUM_SUMS,)``; they stay on the device."""

    width = NUM_SUMS  # how many numbers `take` returns

    def __init__(self) -> None:
        self._sums: Tensor | None = None

    def add(
        self, scored: Any, num_tokens: int, total_weight: Tensor, times: Tensor | None = None
    ) -> None:
        """Add a micro-batch.

        Args:
            scored: the output of a fused head on it.
            num_tokens: its tokens, padding included.
            total_weight: the sum of the weights of its targets.
            times: how many documents train each target, in the shape of its entropy; None: one.
        """
        dtype = sums_dtype(scored.entropy.device)
        times = scored.label_mask if times is None else times
        trained = times.sum().to(dtype)
        aux_loss = getattr(scored, "aux_loss", None)
        aux = torch.zeros_like(trained) if aux_loss is None else aux_loss.detach().to(dtype)
        sums = torch.stack(
            [
                (scored.entropy.detach().to(dtype) * times).sum(),
                (scored.is_top1 * times).sum().to(dtype),
                trained,
                aux * num_tokens,
                torch.full_like(trained, num_tokens),
                torch.ones_like(trained),
                total_weight.to(trained),
            ]
        )
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> Tensor | None:
        """Return the sums since the last call; None if nothing was scored."""
        sums, self._sums = self._sums, None
        return sums


def taken_together(parts: Sequence[Any]) -> Tensor | None:
    """Return the sums of all `parts` since the last call, one after the other.

    Args:
        parts: each with a `width`, and `take` as of `TokenSums`.

    Returns:
        ``(sum of widths,)``, zeros where a part has added nothing; None if none has.
    """
    taken = [part.take() for part in parts]
    some = next((sums for sums in taken if sums is not None), None)
    if some is None:
        return None
    pairs = zip(parts, taken, strict=True)
    return torch.cat([some.new_zeros(p.width) if sums is None else sums for p, sums in pairs])


def sums_dtype(device: torch.device) -> torch.dtype:
    """Return the widest floating-point type that `device` can add up."""
    return torch.float32 if device.type == "mps" else torch.float64


def added(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the sums of several ranks or intervals as one.

    >>> added([[3.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    [8.0, 2.0, 4.0]
    """
    return [sum(numbers) for numbers in zip(*rows, strict=True)]


def write_means(metrics: MutableMapping[str, list[float]], sums: Sequence[float]) -> None:
    """Replace TRL's lists by the means of `sums`; a mean over no tokens is left out.

    Without scored micro-batches the lists stay: a user's `compute_loss` may have written them.

    Args:
        metrics: TRL's `_metrics` of a mode: a list for every name, of which TRL logs the mean.
        sums: as `TokenSums.take` returns them, ``(NUM_SUMS,)``.

    Example:
        >>> metrics = {"entropy": [5.0, 0.0], "mean_token_accuracy": [0.5, 0.0], "aux_loss": [1.0]}
        >>> write_means(metrics, [20.0, 2.0, 4.0, 18.0, 9.0, 2.0, 4.0])
        >>> metrics
        {'entropy': [5.0], 'mean_token_accuracy': [0.5], 'aux_loss': [2.0]}
    """
    entropy, hits, trained, aux_loss, tokens, micro_batches, _ = sums
    if not micro_batches:
        return
    for name, total, count in (
        ("entropy", entropy, trained),
        ("mean_token_accuracy", hits, trained),
        ("aux_loss", aux_loss, tokens),
    ):
        if name in metrics and count:
            metrics[name] = [total / count]
        else:
            metrics.pop(name, None)


def counts_for_nothing(sums: Sequence[float]) -> bool:
    """Return whether tokens were trained, and all of them with a weight of 0."""
    return sums[2] > 0 and not sums[6]
