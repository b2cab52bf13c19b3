"""Attention of one tile, forward and backward.

    fused     PyTorch's FlashAttention kernel for CPUs
    scored    the scores in float32, for soft-caps, dropout and other devices

`tiles.py` explains tiles and the letters of shapes.
"""

import functools
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.tiles import Tile, is_causal_square, sees_all, visible_keys

# Number of keys below which the backward is slower in bf16 than in float32, up to 4× at 130 keys
# (torch 2.13, a Xeon with AMX; from 256 keys bf16 is faster).
_SLOW_IN_HALF_PRECISION = 256

# --- by PyTorch's CPU FlashAttention kernel -------------------------------------------------------


def fused_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    options: KernelOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return output ``(K, G, Q, V)`` and log-sum-exp ``(K, G, Q)`` float32 of one tile.

    Args:
        q: ``(K, G, Q, D)``.
        k: ``(K, G, S, D)``.
        v: ``(K, G, S, V)``.
        tile: place of the tile in the row.
        options: scale and window.
        generator: not used; `scored_forward` draws its dropout from it.
    """
    causal, mask = _causal_or_mask(q, tile, options)
    width, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_padded(width, q, k, v), 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return out[..., :value_dim], lse


def fused_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    options: KernelOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one tile, in their shapes.

    Args:
        grad: gradient of `out`.
        q: ``(K, G, Q, D)``.
        k: ``(K, G, S, D)``.
        v: ``(K, G, S, V)``.
        out: output of the forward, ``(K, G, Q, V)``.
        lse: log-sum-exp of the forward, ``(K, G, Q)`` float32.
        tile: place of the tile in the row.
        options: scale and window.
        generator: not used; `scored_backward` repeats its dropout from it.
    """
    if q.dtype != torch.float32 and tile.k1 - tile.k0 < _SLOW_IN_HALF_PRECISION:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    causal, mask = _causal_or_mask(q, tile, options)
    width = max(q.shape[-1], v.shape[-1])
    grad, qw, kw, vw, out = _padded(width, grad, q, k, v, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, qw, kw, vw, out, lse, 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _causal_or_mask(q: Tensor, tile: Tile, options: KernelOptions) -> tuple[bool, Tensor | None]:
    if is_causal_square(tile, options):
        return True, None
    if sees_all(tile, options):
        return False, None
    visible = visible_keys(tile, options, q.device)
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    return False, bias.expand(*q.shape[:2], -1, -1)


def _padded(width: int, *tensors: Tensor) -> list[Tensor]:
    # Zero columns change neither scores nor the kept output (MLA: value_dim < head_dim).
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


# --- by the scores, in float32 --------------------------------------------------------------------


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Disable autocast, which reaches into custom ops and would turn float32 products into bf16."""

    @functools.wraps(function)
    def run(x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return run


@_without_autocast
def scored_forward(
    q: Tensor,
    k: Tensor,
    v: Tensor,
    tile: Tile,
    options: KernelOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor]:
    """Return output ``(K, G, Q, V)`` and log-sum-exp ``(K, G, Q)``, both float32, of one tile.

    Arguments as in `fused_forward`; dropout is drawn from `generator`.
    """
    scores, _ = _scores(q, k, tile, options)
    lse = torch.logsumexp(scores, -1)
    kept = _dropout_factor(scores, options, generator)
    return (torch.exp(scores - lse[..., None]) * kept) @ v.float(), lse


@_without_autocast
def scored_backward(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    options: KernelOptions,
    generator: torch.Generator | None,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one tile, in their shapes and float32.

    Arguments as in `fused_backward`; `generator` is seeded as in the forward.
    """
    grad, q32, k32, v32 = grad.float(), q.float(), k.float(), v.float()
    scores, slope = _scores(q, k, tile, options)
    probabilities = torch.exp(scores - lse[..., None])
    kept = _dropout_factor(scores, options, generator)
    d_value = (probabilities * kept).transpose(-1, -2) @ grad
    d_probabilities = (grad @ v32.transpose(-1, -2)) * kept
    received = (grad * out.float()).sum(-1, keepdim=True)
    d_scores = probabilities * (d_probabilities - received) * slope * options.scale
    return d_scores @ k32, d_scores.transpose(-1, -2) @ q32, d_value


def _scores(
    q: Tensor, k: Tensor, tile: Tile, options: KernelOptions
) -> tuple[Tensor, Tensor | float]:
    """Return masked scores and their slope, both ``(K, G, Q, S)`` float32.

    The slope is the soft-cap's derivative by the scaled dot products; 1.0 without one.
    """
    scores = q.float() @ k.float().transpose(-1, -2) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap:
        squashed = torch.tanh(scores / options.softcap)
        scores, slope = squashed * options.softcap, 1 - squashed**2
    return scores.masked_fill(~visible_keys(tile, options, q.device), float("-inf")), slope


def generator_from_seed(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    """Return a generator; forward and backward, which visit tiles in one order, share its seed."""
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))


def _dropout_factor(
    scores: Tensor, options: KernelOptions, generator: torch.Generator | None
) -> Tensor | float:
    if not options.dropout:
        return 1.0
    uniform = torch.rand(scores.shape, generator=generator, device=scores.device)
    return (uniform >= options.dropout).to(scores.dtype) / (1 - options.dropout)
