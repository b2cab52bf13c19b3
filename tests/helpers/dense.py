"""Attention with nothing to get wrong: every score of the row, a block-diagonal mask, a softmax.

`dense_attention` is the reference of test_attention.py, and what the doubles of kernels compute
with the boundaries, window and scale that they are handed: a wrong one gives wrong gradients.
"""

import torch
from torch import Tensor


def visible(cu_seqlens: Tensor, left: int | None = None) -> Tensor:
    """Return which token sees which, ``(T, T)`` bool; `left`: how many before itself, None: all."""
    num_tokens = int(cu_seqlens[-1])
    at = torch.arange(num_tokens)
    document = torch.searchsorted(cu_seqlens[1:].contiguous().long(), at, right=True)
    distance = at[:, None] - at[None]
    seen = (distance >= 0) & (document[:, None] == document[None])
    return seen if left is None else seen & (distance <= left)


def probabilities(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return ``(heads, T, T)``; rows sum to one, or to less with sinks."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    seen = visible(cu_seqlens, None if window is None else window - 1)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: object
) -> Tensor:
    """Return ``(T, heads, value_dim)``; arguments as of `document_attention`."""
    group = query.shape[1] // value.shape[1]
    weights = probabilities(query, key, cu_seqlens, **options)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))
