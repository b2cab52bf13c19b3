"""PyTorch's built-in FlashAttention-2 over cu_seqlens: CUDA from sm80, bf16 and fp16.

`aten._flash_attention_forward` takes the boundaries directly, and has the same arguments from torch
2.10 to 2.15. `torch.nn.attention.varlen` around it has not: 2.10 knows no scale, and 2.15 prefers
cuDNN, which builds a graph for every row. The kernel has no soft-cap. Attention sinks are exact on
top of it, because it returns its log-sum-exp.

The kernel takes heads of one width, a multiple of 8, up to 256. Others get zero columns. Layers
with wider heads (Gemma 4: heads of 512 in one layer of six) run document by document.
"""

from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor

from trl_packing.attention.document_sdpa import document_attention, equally_wide
from trl_packing.attention.interface import KernelOptions, register_packed_kernel
from trl_packing.attention.prefix_keys import (
    PrefixKeys,
    add_sinks,
    gather_keys,
    gradient_of_sinks,
    sum_over_segments,
)

NAME = "packed_varlen"
WIDEST = 256  # columns of a head


def varlen_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    options: KernelOptions,
    max_length: int | None = None,
    keys: PrefixKeys | None = None,
) -> Tensor:
    """Return causal attention within each document, ``(T, heads, head_dim)``.

    Arguments as of `document_attention`; without `max_length`, it waits for the device.
    """
    scale, window, softcap, sinks = options
    if softcap:
        raise NotImplementedError(f"varlen has no softcap={softcap}; set attention='documents'")
    value_dim = value.shape[-1]
    if max(query.shape[-1], value_dim) > WIDEST:
        return document_attention(query, key, value, cu_seqlens, options, max_length, keys)
    longest = _longest(cu_seqlens, max_length)
    cu_seqlens_k, index, longest_k = keys or (cu_seqlens, None, longest)
    spans = (cu_seqlens, cu_seqlens_k, longest, _longest(cu_seqlens_k, longest_k))
    rows = [x.contiguous() for x in equally_wide(query, key, value, multiple_of=8)]
    if sinks is None and index is None:
        out = _forward(rows, spans, scale, window)[0]
    else:
        out = _Attention.apply(*rows, sinks, index, spans, scale, window)
    return out[..., :value_dim]


def _longest(cu_seqlens: Tensor, known: int | None) -> int:
    return int(cu_seqlens.diff().max()) if known is None else int(known)


def _forward(
    rows: Iterable[Tensor], spans: tuple[Any, ...], scale: float, window: int | None
) -> Any:
    """Return the output, the log-sum-exp and two states of the backward; it is differentiable."""
    attend = torch.ops.aten._flash_attention_forward
    return attend(*rows, *spans, 0.0, not window, False, **_options(scale, window))[:4]


def _options(scale: float, window: int | None) -> dict[str, Any]:
    # The kernel counts the tokens to the left of the query; the model counts the query too.
    left = window - 1 if window else -1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0}


class _Attention(torch.autograd.Function):
    """Attention with learned sinks or shared prefixes, whose keys are gathered in both passes."""

    @staticmethod
    def forward(ctx, query, key, value, sinks, key_index, spans, scale, window):
        rows = (query, *_gathered(key, value, key_index))
        out, lse, *states = _forward(rows, spans, scale, window)
        if sinks is not None:
            lse = add_sinks(out, lse, sinks)
        ctx.save_for_backward(query, key, value, out, lse, sinks, key_index, *spans[:2], *states)
        ctx.options = (spans[2:], scale, window)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse, sinks, index, *boundaries, rng, unused = ctx.saved_tensors
        longest, scale, window = ctx.options
        rows = (grad.contiguous(), query, *_gathered(key, value, index), out, lse)
        d_query, *d_keys = torch.ops.aten._flash_attention_backward(
            *rows, *boundaries, *longest, 0.0, not window, rng, unused, **_options(scale, window)
        )
        if index is not None:
            d_keys = [sum_over_segments(x, index, len(key)) for x in d_keys]
        d_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return d_query, *d_keys, d_sinks, None, None, None, None


def _gathered(key: Tensor, value: Tensor, key_index: Tensor | None) -> tuple[Tensor, Tensor]:
    if key_index is None:
        return key, value
    return gather_keys(key, key_index), gather_keys(value, key_index)


register_packed_kernel(NAME, varlen_attention)
