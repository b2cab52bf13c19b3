"""Sums over the trained tokens of many micro-batches, from which loss and metrics are means.

    micro-batch           Σ of each name in `SUMS`, and by source        on the device
        │  add
    interval, or set      the same sums of one rank
        │  added over ranks
    eval_loss             Σ w · loss / Σ w
    entropy               Σ entropy / trained tokens
    mean_token_accuracy   hits / trained tokens

TRL logs a mean of the means of micro-batches: a micro-batch without trained tokens counts as 0,
and one of three tokens as much as one of three thousand. `aux_loss`, the balance of experts, is
weighted by the tokens of micro-batches, as in the loss.
"""

import math
from collections.abc import Iterable, MutableMapping, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_packing.loss.sources import SourceTargets
from trl_packing.loss.weights import sums_dtype

SUMS = (
    "entropy", "hits", "trained", "aux_loss × tokens", "tokens", "micro-batches", "w", "w · loss",
)  # fmt: skip
NUM_SUMS = len(SUMS)
OF_SOURCE = 3  # Σ w · loss, Σ w and trained tokens of a source


class LossSums:
    """The sums of the micro-batches of one rank; they stay on the device until they are taken.

    Attributes:
        num_sources: sources whose losses are told apart.
    """

    def __init__(self, num_sources: int = 0):
        self.num_sources = num_sources
        self._sums: Tensor | None = None

    @property
    def width(self) -> int:
        """Number of values that `take` returns: `SUMS`, then those of no source and of each."""
        return NUM_SUMS + (OF_SOURCE * (1 + self.num_sources) if self.num_sources else 0)

    def tell_apart(self, number: int) -> None:
        """Go on with `number` sources: those behind the known ones are new; fewer are all new."""
        if self._sums is not None:
            sums = self._sums if number >= self.num_sources else self._sums[:NUM_SUMS]
            self.num_sources = number
            self._sums = F.pad(sums, (0, self.width - len(sums)))
        self.num_sources = number

    def add(
        self,
        losses: Tensor,
        weights: Tensor,
        scored: Any,
        times: Tensor,
        sources: SourceTargets | None = None,
    ) -> None:
        """Add a micro-batch.

        Args:
            losses: of all targets, without weights, ``(rows, T - 1)``.
            weights: of the same targets; 0 where nothing is trained.
            scored: `entropy` and `is_top1` of the same targets, and `aux_loss` or None.
            times: how many documents train each target, in their shape.
            sources: the targets by source; None where they are not told apart.
        """
        dtype = sums_dtype(losses.device)
        # A loss may be infinite, or NaN, where it counts nothing.
        losses = losses.detach().to(dtype).masked_fill(weights == 0, 0.0)
        tokens = torch.full((), weights.numel() + len(weights), dtype=dtype, device=losses.device)
        aux_loss = getattr(scored, "aux_loss", None)
        aux_loss = torch.zeros_like(tokens) if aux_loss is None else aux_loss.detach().to(tokens)
        sums = torch.stack(
            [
                (scored.entropy.detach().to(dtype) * times).sum(),
                (scored.is_top1 * times).sum().to(dtype),
                times.sum().to(dtype),
                aux_loss * tokens,
                tokens,
                torch.ones_like(tokens),
                weights.sum(dtype=dtype),
                (losses * weights).sum(),
            ]
        )
        if self.num_sources:
            by_source = sums.new_zeros(1 + self.num_sources, OF_SOURCE)
            if sources is not None:
                sources.add_to(by_source, losses)
            sums = torch.cat([sums, by_source.flatten()])
        self._sums = sums if self._sums is None else self._sums + sums

    def take(self) -> Tensor | None:
        """Return the sums since the last call, ``(width,)``; None if nothing was added."""
        sums, self._sums = self._sums, None
        return sums


def added(rows: Iterable[Sequence[float]]) -> list[float]:
    """Return the sums of several ranks or intervals as one.

    >>> added([[3.0, 1.0, 2.0], [5.0, 1.0, 2.0]])
    [8.0, 2.0, 4.0]
    """
    return [sum(numbers) for numbers in zip(*rows, strict=True)]


def write_means(
    metrics: MutableMapping[str, list[float]], sums: Sequence[float], *, balances: bool
) -> None:
    """Make TRL log the means of `sums`; a mean over no tokens is left out.

    Without scored micro-batches the lists stay: a user's `compute_loss` may have written them.

    Args:
        metrics: TRL's `_metrics` of a mode: a list for every name, of which TRL logs the mean.
        sums: `SUMS`.
        balances: whether the loss has a term for the balance of experts.

    Example:
        >>> metrics = {"entropy": [5.0, 0.0]}
        >>> write_means(metrics, [20.0, 2.0, 4.0, 18.0, 9.0, 2.0, 4.0, 7.0], balances=True)
        >>> metrics
        {'entropy': [5.0], 'mean_token_accuracy': [0.5], 'aux_loss': [2.0]}
    """
    entropy, hits, trained, aux_loss, tokens, micro_batches, *_ = sums
    if not micro_batches:
        return
    for name, total, count in (
        ("entropy", entropy, trained),
        ("mean_token_accuracy", hits, trained),
        ("aux_loss", aux_loss, tokens if balances else 0),
    ):
        if count:
            metrics[name] = [total / count]
        else:
            metrics.pop(name, None)


def counts_for_nothing(sums: Sequence[float]) -> bool:
    """Return whether tokens were trained, and all of them with a weight of 0."""
    return sums[2] > 0 and not sums[6]


def perplexity(loss: float) -> float:
    """Return ``exp(loss)``, infinite where a float cannot hold it.

    >>> perplexity(0.0), perplexity(1000.0)
    (1.0, inf)
    """
    try:
        return math.exp(loss)
    except OverflowError:
        return math.inf
