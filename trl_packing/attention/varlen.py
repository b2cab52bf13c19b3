"""PyTorch's built-in FlashAttention-2 over cu_seqlens: CUDA from sm80, bf16 and fp16.

`aten._flash_attention_forward` takes the boundaries directly, and has the same arguments from torch
2.10 to 2.15. `torch.nn.attention.varlen` around it has not: 2.10 knows no scale, and 2.15 prefers
cuDNN, which builds a graph for every row. The kernel has no dropout here and no soft-cap. Attention
sinks are exact on top of it, because it returns its log-sum-exp.
"""

from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing.attention.interface import KernelOptions, one_dtype, register_packed_kernel
from trl_packing.attention.prefix_keys import (
    PrefixKeys,
    gather_keys,
    gradient_of_sinks,
    lse_with_sinks,
    share_of_keys,
    sum_over_segments,
)

NAME = "packed_varlen"

# Of vision towers. transformers passes the boundaries of windows to names that contain "flash".
TOWER = "packed_varlen_flash"


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
    longest = longest_k = _longest(cu_seqlens, max_length)
    cu_seqlens_k = cu_seqlens
    if keys is not None:
        cu_seqlens_k = keys.cu_seqlens_k
        longest_k = _longest(cu_seqlens_k, keys.max_length)
    spans = (cu_seqlens, cu_seqlens_k, longest, longest_k)
    rows = [x.contiguous() for x in (query, key, value)]
    if sinks is None and keys is None:
        return _forward(rows, spans, scale, window)[0]
    index = None if keys is None else keys.key_index
    return _Attention.apply(*rows, sinks, index, spans, scale, window)


def _longest(cu_seqlens: Tensor, known: int | None) -> int:
    return int(cu_seqlens.diff().max()) if known is None else int(known)


def _forward(
    rows: Iterable[Tensor],
    spans: tuple[Any, ...],
    scale: float,
    window: int | None,
    causal: bool = True,
) -> Any:
    """Return the output, the log-sum-exp and two states of the backward; it is differentiable."""
    options, is_causal = _options(scale, window, causal), causal and not window
    attend = torch.ops.aten._flash_attention_forward
    return attend(*rows, *spans, 0.0, is_causal, False, **options)[:4]


def _options(scale: float, window: int | None, causal: bool = True) -> dict[str, Any]:
    # The kernel counts the tokens to the left of the query; the model counts the query too.
    left = window - 1 if window else -1
    return {"scale": scale, "window_size_left": left, "window_size_right": 0 if causal else -1}


class _Attention(torch.autograd.Function):
    """Attention with learned sinks or shared prefixes, on a kernel without them.

    Sinks follow from the log-sum-exp. The keys of each segment are gathered in the
    forward and again in the backward, so that only the keys of the row are kept in between.
    """

    @staticmethod
    def forward(ctx, query, key, value, sinks, key_index, spans, scale, window):
        rows = (query, *_gathered(key, value, key_index))
        out, lse, *states = _forward(rows, spans, scale, window)
        if sinks is not None:
            with_sinks = lse_with_sinks(lse, sinks)
            out = out * share_of_keys(lse, with_sinks).to(out.dtype)
            lse = with_sinks
        ctx.save_for_backward(query, key, value, out, lse, sinks, key_index, *spans[:2], *states)
        ctx.options = (spans[2:], scale, window)
        return out

    @staticmethod
    def backward(ctx, grad):
        query, key, value, out, lse, sinks, index, *boundaries, rng, unused = ctx.saved_tensors
        longest, scale, window = ctx.options
        rows = (grad.contiguous(), query, *_gathered(key, value, index), out, lse)
        spans, states = (*boundaries, *longest), (rng, unused)
        d_query, d_key, d_value = torch.ops.aten._flash_attention_backward(
            *rows, *spans, 0.0, not window, *states, **_options(scale, window)
        )
        if index is not None:
            d_key, d_value = (sum_over_segments(x, index, key.shape[0]) for x in (d_key, d_value))
        d_sinks = None if sinks is None else gradient_of_sinks(grad, out, lse, sinks)
        return d_query, d_key, d_value, d_sinks, None, None, None, None


def _gathered(key: Tensor, value: Tensor, key_index: Tensor | None) -> tuple[Tensor, Tensor]:
    if key_index is None:
        return key, value
    return gather_keys(key, key_index), gather_keys(value, key_index)


# --- vision towers --------------------------------------------------------------------------------


def tower_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None = None,
    scaling: float | None = None,
    dropout: float = 0.0,
    cu_seq_lens_q: Tensor | None = None,
    max_length_q: int | None = None,
    is_causal: bool | None = None,
    **kwargs: Any,
) -> tuple[Tensor, None]:
    """Return attention in both directions within each window, ``(1, T, heads, head_dim)``.

    Calls without boundaries run SDPA. Arguments as of transformers' attention functions.
    """
    query, key, value = one_dtype(query, key, value)
    if cu_seq_lens_q is None or is_causal or dropout:
        sdpa = ALL_ATTENTION_FUNCTIONS["sdpa"]
        return sdpa(
            module, query, key, value, attention_mask, dropout, scaling, is_causal, **kwargs
        )
    if query.dtype not in (torch.bfloat16, torch.float16):
        lengths = cu_seq_lens_q.diff().tolist()
        windows = zip(*(x.split(lengths, 2) for x in (query, key, value)), strict=True)
        parts = [F.scaled_dot_product_attention(q, k, v, scale=scaling) for q, k, v in windows]
        return torch.cat(parts, 2).transpose(1, 2), None
    size, longest = query.shape[-1], _longest(cu_seq_lens_q, max_length_q)
    scale = size**-0.5 if scaling is None else scaling
    wide = [F.pad(x[0].transpose(0, 1), (0, -size % 8)).contiguous() for x in (query, key, value)]
    spans = (cu_seq_lens_q, cu_seq_lens_q, longest, longest)
    output = _forward(wide, spans, scale, None, causal=False)[0]
    return output[..., :size].unsqueeze(0), None


register_packed_kernel(NAME, varlen_attention, TOWER)
AttentionInterface.register(TOWER, tower_attention)
AttentionMaskInterface.register(TOWER, ALL_MASK_ATTENTION_FUNCTIONS["sdpa"])
