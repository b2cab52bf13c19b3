"""PyTorch's built-in FlashAttention-2 over cu_seqlens: CUDA from sm80, bf16 and fp16.

`torch.nn.attention.varlen` (torch >= 2.10) takes the boundaries directly. It has no dropout and no
soft-cap. Attention sinks are exact on top of it, because the kernel returns its log-sum-exp.
"""

import inspect
from typing import Any

import torch
from torch import Tensor

from trl_packing.attention.interface import KernelOptions, register_packed_kernel
from trl_packing.attention.prefix_keys import PrefixKeys, gather_keys, sum_over_segments
from trl_packing.attention.sinks import gradient_of_sinks, lse_with_sinks, share_of_keys

NAME = "packed_varlen"

MAX_HEAD_DIM = 256


def unavailable() -> str | None:
    """Return why this machine cannot run the kernel, or None if it can."""
    try:
        from torch.nn.attention import varlen  # noqa: F401
    except ImportError:
        return f"torch {torch.__version__} has no torch.nn.attention.varlen (2.10 has)"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm80"
    return None


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

    Args:
        query: ``(T, heads, head_dim)``.
        key: ``(T, kv_heads, head_dim)``.
        value: ``(T, kv_heads, head_dim)``.
        cu_seqlens: boundaries of the documents, ``(N + 1,)`` int32.
        options: scale, window and sinks.
        max_length: tokens of the longest document; None computes it, which waits for the device.
        keys: the keys of each segment, if documents share prefixes; `cu_seqlens` are then the
            boundaries of segments.

    Raises:
        NotImplementedError: `options` has a soft-cap or dropout.
    """
    scale, window, softcap, sinks, dropout = options
    if softcap or dropout:
        raise NotImplementedError(
            f"torch's varlen attention has no soft-cap and no dropout (got softcap={softcap}, "
            f"dropout={dropout}); set attention='documents'"
        )
    longest = _longest(cu_seqlens, max_length)
    spans = (cu_seqlens, cu_seqlens, longest, longest)
    if keys is not None:
        spans = (
            cu_seqlens,
            keys.cu_seqlens_k,
            longest,
            _longest(keys.cu_seqlens_k, keys.max_length),
        )
    # The kernel counts the tokens to the left of the query; the model counts the query too.
    left = -1 if not window else window - 1
    query, key, value = (x.contiguous() for x in (query, key, value))
    if sinks is not None or keys is not None:
        index = None if keys is None else keys.key_index
        return _Attention.apply(query, key, value, sinks, index, spans, scale, left)
    return _varlen_attn(query, key, value, spans, scale, left)


def _longest(cu_seqlens: Tensor, known: int | None) -> int:
    return int(cu_seqlens.diff().max()) if known is None else int(known)


def _varlen_attn(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    spans: tuple[Tensor, Tensor, int, int],
    scale: float,
    left: int,
) -> Tensor:
    from torch.nn.attention import varlen

    options: dict[str, Any] = {}
    # torch 2.12 requires enable_gqa for grouped heads; 2.11 does not have the argument.
    if "enable_gqa" in inspect.signature(varlen.varlen_attn).parameters:
        options["enable_gqa"] = query.shape[1] != key.shape[1]
    output = varlen.varlen_attn(
        query,
        key,
        value,
        *spans,
        scale=scale,
        window_size=(left, 0),
        **options,
    )
    assert isinstance(output, Tensor)  # a tuple only if the log-sum-exp is requested
    return output


class _Attention(torch.autograd.Function):
    """Attention with learned sinks or shared prefixes, on a kernel without them.

    Sinks follow from the log-sum-exp (`sinks.py`). The keys of each segment are gathered in the
    forward and again in the backward, so that only the keys of the row are kept in between.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, key_index, spans, scale, left):
        out, lse, rng, unused, _ = torch.ops.aten._flash_attention_forward(
            query,
            *_gathered(key, value, key_index),
            *spans,
            0.0,
            left < 0,
            False,
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )
        if sinks is not None:
            with_sinks = lse_with_sinks(lse, sinks)
            out = out * share_of_keys(lse, with_sinks).to(out.dtype)
            lse = with_sinks
        ctx.save_for_backward(
            query, key, value, out, lse, sinks, key_index, *spans[:2], rng, unused
        )
        ctx.options = (spans[2:], scale, left)
        return out

    @staticmethod
    def backward(ctx, grad):
        (query, key, value, out, lse, sinks, index, cu_seqlens_q, cu_seqlens_k, rng, unused) = (
            ctx.saved_tensors
        )
        longest, scale, left = ctx.options
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            grad.contiguous(),
            query,
            *_gathered(key, value, index),
            out,
            lse,
            cu_seqlens_q,
            cu_seqlens_k,
            *longest,
            0.0,
            left < 0,
            rng,
            unused,
            scale=scale,
            window_size_left=left,
            window_size_right=0,
        )
        if index is not None:
            d_key, d_value = (sum_over_segments(x, index, key.shape[0]) for x in (d_key, d_value))
        d_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return d_query, d_key, d_value, d_sinks, None, None, None, None


def _gathered(key: Tensor, value: Tensor, key_index: Tensor | None) -> tuple[Tensor, Tensor]:
    if key_index is None:
        return key, value
    return gather_keys(key, key_index), gather_keys(value, key_index)


register_packed_kernel(NAME, varlen_attention)
