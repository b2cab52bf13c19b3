"""Attention sinks on top of a kernel without them, exact forward and backward.

A sink is a learned logit per head that takes part in the softmax and attends to nothing (gpt_oss).

With ``out, lse`` of plain attention and sink logits s, the softmax over keys and sink returns
``out' = out · exp(lse − lse')`` with ``lse' = logaddexp(lse, s)``. The kernel's backward rebuilds
its probabilities from the log-sum-exp. Given out' and lse', it returns the exact gradients of
query, key and value, and the gradient of the sinks is ``−Σ exp(s − lse') · Σ(dout' · out')``.

Shape letters: T tokens, H heads, D values per head.
"""

import torch
from torch import Tensor


def lse_with_sinks(lse: Tensor, sinks: Tensor) -> Tensor:
    """Return the log-sum-exp over keys and sink, ``(H, T)`` float32.

    Args:
        lse: log-sum-exp of plain attention, ``(H, T)`` float32.
        sinks: sink logits, ``(H,)``.

    Examples:
        >>> lse, sinks = torch.zeros(1, 2), torch.zeros(1)  # a key of weight 1, a sink of weight 1
        >>> torch.exp(lse_with_sinks(lse, sinks)).round().tolist()
        [[2.0, 2.0]]
    """
    return torch.logaddexp(lse, sinks.float()[:, None])


def share_of_keys(lse: Tensor, with_sinks: Tensor) -> Tensor:
    """Return the weight ``(T, H, 1)`` in [0, 1] that the keys keep; the output is scaled by it."""
    return torch.exp(lse - with_sinks).t().unsqueeze(-1)


def gradient_of_sinks(grad: Tensor, output: Tensor, with_sinks: Tensor, sinks: Tensor) -> Tensor:
    """Return the gradient of the sink logits, ``(H,)`` in their dtype.

    Args:
        grad: gradient of `output`.
        output: output with sinks, ``(T, H, D)``.
        with_sinks: log-sum-exp with sinks, ``(H, T)`` float32.
        sinks: sink logits, ``(H,)``.
    """
    received = (grad.float() * output.float()).sum(-1).t()  # (H, T)
    return -(torch.exp(sinks.float()[:, None] - with_sinks) * received).sum(1).to(sinks.dtype)
