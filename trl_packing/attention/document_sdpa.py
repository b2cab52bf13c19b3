"""Attention over the documents of a row, one after another: work Σ len², and no T×T mask.

    query, key, value    (T, heads, head_dim)        key and value may have fewer heads (GQA)
    cu_seqlens           (N + 1,) int32              document n: rows cu_seqlens[n]:cu_seqlens[n+1]
    output               (T, heads, value_dim)

Each document is cut into *tiles*: a block of queries with every key it may see, so a tile is an
independent softmax. Without a sliding window a document is one causal tile; with one, tiles follow
the window and the work is Σ len·window.

The loop lives in one custom op with an explicit backward, so `torch.compile` sees one call whatever
the documents, and the backward adds into place instead of scattering a slice per document.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor

from trl_packing.attention.interface import register_packed_kernel
from trl_packing.documents.host_row import host_boundaries

NAME = "packed_documents"

# Queries per tile where a tile must make its mask (windows) or its scores (soft-cap, dropout):
# bounds the memory at block × keys, of every head where it is scores. Tiles as long as the window
# take up to 1.3× the time, since half of what they compute is masked (torch 2.13, CPU).
_BLOCK = 512

# Keys below which the backward in bf16 costs more than in float32, up to 4× at 130 (torch 2.13, a
# Xeon with AMX; from 256 it costs less).
_SLOW_IN_HALF_PRECISION = 256


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    max_length: int | None = None,
    *,
    scale: float,
    window: int | None = None,
    softcap: float | None = None,
    sinks: Tensor | None = None,
    dropout: float = 0.0,
) -> Tensor:
    """Return causal attention within each document, ``(T, heads, value_dim)``.

    `window` counts the tokens a query sees, itself included. `sinks` ``(heads,)`` are learned
    logits that take part in the softmax and attend to nothing (gpt_oss). `softcap` bounds the
    scaled scores by ``softcap * tanh(score / softcap)`` (gemma2). `max_length` is not needed here.

    >>> q = torch.randn(5, 2, 4)
    >>> out = document_attention(q, q, q, torch.tensor([0, 3, 5]), scale=0.5)
    >>> alone = document_attention(q[3:], q[3:], q[3:], torch.tensor([0, 2]), scale=0.5)
    >>> bool(torch.allclose(out[3:], alone))
    True
    """
    plain = sinks is None and not softcap and not dropout
    if plain and query.device.type != "cpu" and not torch.compiler.is_compiling():
        return _sdpa_with_autograd(query, key, value, cu_seqlens, scale, window or 0)
    # The seed is a tensor, so that a compiled graph takes a new one each call.
    seed = torch.randint(2**62, (), dtype=torch.int64) if dropout else None
    output, _ = torch.ops.trl_packing.document_attention(
        query, key, value, cu_seqlens, sinks, seed, scale, window or 0, softcap or 0.0, dropout
    )
    return output


class _Tile(NamedTuple):
    """Queries ``[q0, q1)`` and every key they may see, ``[k0, q1)``; causal, and windowed."""

    q0: int
    q1: int
    k0: int


class _Options(NamedTuple):
    scale: float
    window: int  # 0: none
    softcap: float  # 0: none
    dropout: float


@torch.library.custom_op("trl_packing::document_attention", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return output ``(T, heads, value_dim)`` and log-sum-exp ``(heads, T)`` float32."""
    options = _Options(scale, window, softcap, dropout)
    num_tokens, num_heads, _ = query.shape
    output = query.new_empty(num_tokens, num_heads, value.shape[-1])
    lse = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    generator = _generator(seed, query.device)
    forward = _scored_forward if _needs_scores(query, options) else _fused_forward
    for tile in _tiles(cu_seqlens, options, query):
        q, k, v = _by_kv_head(query, key, value, tile)
        out, tile_lse = forward(q, k, v, tile, options, generator)
        output[tile.q0 : tile.q1] = out.flatten(0, 1).transpose(0, 1)
        lse[:, tile.q0 : tile.q1] = tile_lse.flatten(0, 1)
    if sinks is not None:
        # A sink adds one more logit to every softmax: rescale what the kernel without it returned.
        with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
        output.mul_(torch.exp(lse - with_sinks).t().unsqueeze(-1).to(output.dtype))
        lse = with_sinks
    return output, lse


@_forward_op.register_fake
def _(query, key, value, cu_seqlens, sinks, seed, scale, window, softcap, dropout):
    num_tokens, num_heads, _ = query.shape
    return (
        query.new_empty(num_tokens, num_heads, value.shape[-1]),
        query.new_empty(num_heads, num_tokens, dtype=torch.float32),
    )


@torch.library.custom_op("trl_packing::document_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    options = _Options(scale, window, softcap, dropout)
    # Fresh pages cost as much as the arithmetic: zeros only where tiles overlap and must add.
    overlap = bool(window) or _needs_scores(query, options)
    d_query = query.new_empty(query.shape)
    d_key, d_value = (
        x.new_zeros(x.shape) if overlap else x.new_empty(x.shape) for x in (key, value)
    )
    generator = _generator(seed, query.device)
    backward = _scored_backward if _needs_scores(query, options) else _fused_backward
    for tile in _tiles(cu_seqlens, options, query):
        rows = slice(tile.q0, tile.q1)
        q, k, v = _by_kv_head(query, key, value, tile)
        g, o = (_by_group(x[rows], k.shape[0]) for x in (grad, output))
        tile_lse = lse[:, rows].unflatten(0, q.shape[:2])
        dq, dk, dv = backward(g, q, k, v, o, tile_lse, tile, options, generator)
        d_query[rows] = dq.flatten(0, 1).transpose(0, 1)
        for total, part in ((d_key, dk), (d_value, dv)):
            part = (part.sum(1) if part.shape[1] > 1 else part[:, 0]).transpose(0, 1)
            keys = total[tile.k0 : tile.q1]
            keys.add_(part) if overlap else keys.copy_(part)
    if sinks is None:
        return d_query, d_key, d_value, query.new_empty(0)
    received = (grad.float() * output.float()).sum(-1).t()  # (heads, T)
    d_sinks = -(torch.exp(sinks.float()[:, None] - lse) * received).sum(1)
    return d_query, d_key, d_value, d_sinks.to(sinks.dtype)


@_backward_op.register_fake
def _(
    grad, query, key, value, output, lse, cu_seqlens, sinks, seed, scale, window, softcap, dropout
):
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(x.new_empty(x.shape) for x in (query, key, value)), d_sinks)


def _setup_context(ctx, inputs, output):
    query, key, value, cu_seqlens, sinks, seed, *ctx.options = inputs
    ctx.save_for_backward(query, key, value, *output, cu_seqlens, sinks, seed)


def _autograd_backward(ctx, grad, _grad_lse):
    query, key, value, output, lse, cu_seqlens, sinks, seed = ctx.saved_tensors
    *gradients, d_sinks = torch.ops.trl_packing.document_attention_backward(
        grad, query, key, value, output, lse, cu_seqlens, sinks, seed, *ctx.options
    )
    return *gradients, None, None if sinks is None else d_sinks, None, None, None, None, None


_forward_op.register_autograd(_autograd_backward, setup_context=_setup_context)


# --- tiles ------------------------------------------------------------------------------------


def _tiles(cu_seqlens: Tensor, options: _Options, query: Tensor) -> Iterator[_Tile]:
    boundaries = host_boundaries(cu_seqlens)
    if boundaries[0] != 0 or boundaries[-1] != len(query):
        raise ValueError(
            f"cu_seqlens runs from {boundaries[0]} to {boundaries[-1]}, but the row holds tokens 0 "
            f"to {len(query)}: every token must belong to a document"
        )
    scored = _needs_scores(query, options)
    for start, end in pairwise(boundaries):
        within_window = not options.window or end - start <= options.window
        block = end - start if within_window and not scored else _BLOCK
        for q0 in range(start, end, max(block, 1)):
            reach = max(start, q0 - options.window + 1) if options.window else start
            yield _Tile(q0, min(q0 + block, end), reach)


def _by_kv_head(query: Tensor, key: Tensor, value: Tensor, tile: _Tile) -> tuple[Tensor, ...]:
    """Return views ``(kv_heads, group, length, dim)``: a key head serves its group unrepeated."""
    num_kv_heads = key.shape[1]
    q = _by_group(query[tile.q0 : tile.q1], num_kv_heads)
    k, v = (
        x[tile.k0 : tile.q1].transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        for x in (key, value)
    )
    return q, k, v


def _by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    return x.transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def _is_causal_square(tile: _Tile, options: _Options) -> bool:
    return tile.k0 == tile.q0 and (not options.window or tile.q1 - tile.q0 <= options.window)


def _visible(tile: _Tile, options: _Options, device: torch.device) -> Tensor:
    """Return which key each query of the tile sees, ``(queries, keys)`` bool."""
    queries = torch.arange(tile.q0, tile.q1, device=device)[:, None]
    keys = torch.arange(tile.k0, tile.q1, device=device)[None]
    # Compared, not subtracted: a difference would take 8 bytes where a comparison takes one.
    visible = keys <= queries
    return visible.logical_and_(keys > queries - options.window) if options.window else visible


# --- a tile by PyTorch's CPU FlashAttention kernel --------------------------------------------


def _needs_scores(query: Tensor, options: _Options) -> bool:
    """Whether scores must be seen: the fused kernel has no soft-cap, no dropout, and is CPU's."""
    return bool(options.softcap or options.dropout) or query.device.type != "cpu"


def _fused_forward(q, k, v, tile, options, generator):
    causal, mask = _causal_or_mask(q, tile, options)
    width, value_dim = max(q.shape[-1], v.shape[-1]), v.shape[-1]
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *_padded(width, q, k, v), 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return out[..., :value_dim], lse


def _fused_backward(grad, q, k, v, out, lse, tile, options, generator):
    if q.dtype != torch.float32 and tile.q1 - tile.k0 < _SLOW_IN_HALF_PRECISION:
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    causal, mask = _causal_or_mask(q, tile, options)
    width = max(q.shape[-1], v.shape[-1])
    grad, qw, kw, vw, out = _padded(width, grad, q, k, v, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        grad, qw, kw, vw, out, lse, 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _causal_or_mask(q: Tensor, tile: _Tile, options: _Options) -> tuple[bool, Tensor | None]:
    if _is_causal_square(tile, options):
        return True, None
    visible = _visible(tile, options, q.device)
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    return False, bias.expand(*q.shape[:2], -1, -1)


def _padded(width: int, *tensors: Tensor) -> list[Tensor]:
    # Zero columns change neither scores nor the kept output (MLA: value_dim < head_dim).
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


# --- a tile by its scores, in float32 ---------------------------------------------------------


def _without_autocast(function: Callable[..., Any]) -> Callable[..., Any]:
    """Keep autocast, which reaches into custom ops, from turning float32 products into bf16."""

    @functools.wraps(function)
    def run(x: Tensor, *args: Any) -> Any:
        with torch.autocast(x.device.type, enabled=False):
            return function(x, *args)

    return run


@_without_autocast
def _scored_forward(q, k, v, tile, options, generator):
    scores, _ = _scores(q, k, tile, options)
    lse = torch.logsumexp(scores, -1)
    kept = _dropout_factor(scores, options, generator)
    return (torch.exp(scores - lse[..., None]) * kept) @ v.float(), lse


@_without_autocast
def _scored_backward(grad, q, k, v, out, lse, tile, options, generator):
    grad, q32, k32, v32 = grad.float(), q.float(), k.float(), v.float()
    scores, slope = _scores(q, k, tile, options)
    probabilities = torch.exp(scores - lse[..., None])
    kept = _dropout_factor(scores, options, generator)
    d_value = (probabilities * kept).transpose(-1, -2) @ grad
    d_probabilities = (grad @ v32.transpose(-1, -2)) * kept
    received = (grad * out.float()).sum(-1, keepdim=True)
    d_scores = probabilities * (d_probabilities - received) * slope * options.scale
    return d_scores @ k32, d_scores.transpose(-1, -2) @ q32, d_value


def _scores(q: Tensor, k: Tensor, tile: _Tile, options: _Options) -> tuple[Tensor, Tensor | float]:
    """Return masked scores and their slope against the scaled dot products (the soft-cap's)."""
    scores = q.float() @ k.float().transpose(-1, -2) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap:
        squashed = torch.tanh(scores / options.softcap)
        scores, slope = squashed * options.softcap, 1 - squashed**2
    return scores.masked_fill(~_visible(tile, options, q.device), float("-inf")), slope


def _generator(seed: Tensor | None, device: torch.device) -> torch.Generator | None:
    # Seeded alike in forward and backward, which visit the tiles in the same order.
    return None if seed is None else torch.Generator(device).manual_seed(int(seed))


def _dropout_factor(
    scores: Tensor, options: _Options, generator: torch.Generator | None
) -> Tensor | float:
    if not options.dropout:
        return 1.0
    uniform = torch.rand(scores.shape, generator=generator, device=scores.device)
    return (uniform >= options.dropout).to(scores.dtype) / (1 - options.dropout)


# --- other devices ----------------------------------------------------------------------------


def _sdpa_with_autograd(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, scale: float, window: int
) -> Tensor:
    """Return attention per document through `F.scaled_dot_product_attention` (any device).

    GPUs without FlashAttention-2, and float32, run PyTorch's memory-efficient kernel here.
    """
    boundaries = host_boundaries(cu_seqlens)
    lengths = [end - start for start, end in pairwise(boundaries) if end > start]
    group = query.shape[1] // key.shape[1]
    if group > 1:
        # Not enable_gqa: the memory-efficient kernel does not take it, and PyTorch would write all
        # scores of a document, for every head, without a message (torch 2.13).
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    biases: dict[int, Tensor] = {}
    outputs = []
    for q, k, v in zip(*(x.split(lengths) for x in (query, key, value)), strict=True):
        beyond_window = window and q.shape[0] > window
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if beyond_window:
            tiles = _windowed_sdpa(q, k, v, scale, window, biases)
        else:
            tiles = iter([_causal_sdpa(q, k, v, scale)])
        outputs += [out[0].transpose(0, 1) for out in tiles]
    return torch.cat(outputs)


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, scale=scale)


def _windowed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, biases: dict[int, Tensor]
) -> Iterator[Tensor]:
    """Yield attention of one document ``(1, heads, queries, dim)``, tile by tile.

    The document is cut into chunks that see themselves and the chunk before. Two steps of cutting
    keep the work linear: autograd fills a gradient as long as the two chunks for each of a chunk's
    tiles, instead of one as long as the document. `biases` holds masks, which tiles share.
    """
    size = max(window, _BLOCK)
    chunks = [x.split(size, 2) for x in (q, k, v)]
    for n, (queries, *_) in enumerate(zip(*chunks, strict=True)):
        if n == 0 and queries.shape[2] <= window:
            yield _causal_sdpa(queries, chunks[1][0], chunks[2][0], scale)
            continue
        keys, values = (torch.cat(x[max(n - 1, 0) : n + 1], 2) for x in chunks[1:])
        past = keys.shape[2] - queries.shape[2]  # tokens of the chunk before
        for part in queries.split(_BLOCK, 2):
            # Kernels read keys and masks by 16 bytes.
            start = max(past - window + 1, 0) // 8 * 8
            stop = past + part.shape[2]
            if past - start not in biases:
                biases[past - start] = _window_bias(past - start, window, q)
            bias = biases[past - start]
            yield F.scaled_dot_product_attention(
                part,
                keys[:, :, start:stop],
                values[:, :, start:stop],
                attn_mask=bias[: part.shape[2], : stop - start],
                scale=scale,
            )
            past = stop


def _window_bias(past: int, window: int, query: Tensor) -> Tensor:
    """Return 0 where a query of a tile sees a key, else -inf, ``(_BLOCK, past + _BLOCK)``.

    `past` keys come before the first query. In the dtype of `query`: PyTorch would turn a bool mask
    into one for every call, and keep it for the backward.
    """
    tile = _Tile(past, past + _BLOCK, 0)
    visible = _visible(tile, _Options(1.0, window, 0.0, 0.0), query.device)
    # Rows of a multiple of 8 keys: with others PyTorch pads a copy for every call.
    width = -(-visible.shape[1] // 8) * 8
    bias = query.new_full((_BLOCK, width), float("-inf"))
    return bias[:, : visible.shape[1]].masked_fill_(visible, 0.0)


register_packed_kernel(NAME, document_attention)
