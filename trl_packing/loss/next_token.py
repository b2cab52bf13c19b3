"""Predictions of the next token: their log-probabilities, and the mean loss of a row."""

import torch
from torch import Tensor
from torch.nn.functional import cross_entropy
from torch.utils.checkpoint import checkpoint

from trl_packing.documents.labels import IGNORE_INDEX


def score_targets(
    logits: Tensor, targets: Tensor, smoothing: float = 0.0
) -> tuple[Tensor, Tensor, Tensor]:
    """Return log-probability, entropy and is_top1 of each position, ``(N,)``, in float32.

    Of logits ``(N, vocabulary)`` and targets ``(N,)``; `smoothing` is the share ε of the mean over
    the vocabulary in the log-probability.
    """
    log_probs = logits.float().log_softmax(-1)
    chosen = log_probs.gather(-1, targets[:, None])[:, 0]
    if smoothing:
        chosen = (1 - smoothing) * chosen + smoothing * log_probs.mean(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1).detach()
    return chosen, entropy, log_probs.argmax(-1) == targets


def next_token_loss(
    logits: Tensor, labels: Tensor, num_items: Tensor | int | None = None
) -> Tensor:
    """Return Σ −log p over the trained tokens / `num_items`, a scalar.

    Of logits ``(rows, T, vocabulary)`` and labels ``(rows, T)``; by default, `num_items` is the
    number of trained tokens.
    """
    targets = labels[:, 1:].to(logits.device)
    parts = list(zip(logits[:, :-1].split(_CHUNK, 1), targets.split(_CHUNK, 1), strict=True))
    keeps = len(parts) == 1 or not torch.is_grad_enabled()
    losses = [_loss(*x) if keeps else checkpoint(_loss, *x, use_reentrant=False) for x in parts]
    total = torch.stack(losses).sum()
    count = (targets != IGNORE_INDEX).sum() if num_items is None else torch.as_tensor(num_items)
    return total / count.to(total.device).clamp(min=1)


# Positions of a row whose logits are in float32 at a time, computed again in the backward.
_CHUNK = 1024


def _loss(logits: Tensor, targets: Tensor) -> Tensor:
    return cross_entropy(logits.flatten(0, 1).float(), targets.flatten(), reduction="sum")
