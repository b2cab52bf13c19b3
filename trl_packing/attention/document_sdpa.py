"""Computes attention document by document: Σ len² work, no T×T mask.

Each document is cut into tiles: blocks of queries, each with every key that they may see. Without a
sliding window a document is one causal tile. A tile is computed on CPUs by PyTorch's FlashAttention
kernel, for soft-caps and on other devices from float32 scores.

Shape letters: K key-value heads, G query heads of each, Q queries, S keys, D head_dim, V value_dim.
"""

import functools
from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel
from torch.nn.attention.bias import causal_lower_right

from trl_packing.attention.interface import KernelOptions, register_packed_kernel
from trl_packing.attention.prefix_keys import (
    PrefixKeys,
    add_sinks,
    blocks_of_nodes,
    blocks_of_segments,
    gradient_of_sinks,
    merge_softmax,
    prefix_keys,
    segments_with_prefixes,
)
from trl_packing.documents.host_row import host_boundaries, host_values

NAME = "packed_documents"

# Queries per tile if it materializes a mask (windows) or scores: their memory is block × keys, for
# scores times the heads. Tiles as long as the window take up to 1.3× the time (torch 2.13, CPU).
BLOCK = 512

# Number of keys below which the backward is slower in bf16 than in float32, up to 4× at 130 keys
# (torch 2.13, a Xeon with AMX; from 256 keys bf16 is faster).
_SLOW_IN_HALF_PRECISION = 256


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    options: KernelOptions,
    max_length: int | None = None,
    keys: PrefixKeys | None = None,
) -> Tensor:
    """Return causal attention within each document, ``(T, heads, value_dim)``.

    Args:
        query: ``(T, heads, head_dim)``.
        key: ``(T, kv_heads, head_dim)``; `value`: ``(T, kv_heads, value_dim)``.
        value: as `key`.
        cu_seqlens: boundaries from 0 to T, ``(N + 1,)`` int32; else ValueError.
        options: of the kernel.
        max_length: not used; other packed kernels need it.
        keys: the keys of each segment, if documents share prefixes; `cu_seqlens` are then theirs.
            Or of a document of which `query` has the last tokens: ``(S, kv_heads, ...)``, S > T.

    Examples:
        >>> q, options = torch.randn(5, 2, 4), KernelOptions(scale=0.5)
        >>> out = document_attention(q, q, q, torch.tensor([0, 3, 5]), options)
        >>> alone = document_attention(q[3:], q[3:], q[3:], torch.tensor([0, 2]), options)
        >>> bool(torch.allclose(out[3:], alone))
        True
    """
    scale, window, softcap, sinks = options
    shares = keys is not None and keys.key_index is not None
    plain = sinks is None and not shares and not softcap
    if plain and query.device.type != "cpu" and not torch.compiler.is_compiling():
        lengths = [length for length in np.diff(host_values(cu_seqlens)).tolist() if length]
        if not window or max(lengths) + len(key) - len(query) <= window:
            return sdpa_by_document(query, key, value, lengths, scale)
    index = (None, None) if keys is None else keys[:2]
    numbers = [scale, float(window or 0), softcap or 0.0]
    attend = torch.ops.trl_packing.document_attention
    return attend(query, key, value, cu_seqlens, *index, sinks, numbers)[0]


# A custom op with an explicit backward: torch.compile sees one call for any documents, and the
# gradients are written into place.
@torch.library.custom_op("trl_packing::document_attention", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    key_index: Tensor | None,
    sinks: Tensor | None,
    numbers: list[float],
) -> tuple[Tensor, Tensor]:
    """Return output ``(T, heads, value_dim)`` and log-sum-exp ``(heads, T)`` float32."""
    options = KernelOptions(numbers[0], int(numbers[1]), numbers[2])
    keys = prefix_keys(cu_seqlens_k, key_index)
    num_tokens, num_heads, _ = query.shape
    # Parts of a softmax are merged in float32; else each tile is all of it.
    merges = keys is not None or len(key) > len(query)
    dtype = torch.float32 if merges else query.dtype
    output = query.new_empty(num_tokens, num_heads, value.shape[-1], dtype=dtype)
    lse = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    for tile in cut_tiles(cu_seqlens, options, query, key, keys):
        rows = slice(tile.q0, tile.q1)
        q, k, v = _split_by_kv_head(query, key, value, tile)
        out, tile_lse = forward_tile(q, k, v, tile, options)
        out = out.flatten(0, 1).transpose(0, 1)
        tile_lse = tile_lse.flatten(0, 1)
        if tile.merges:
            out, tile_lse = merge_softmax(output[rows], lse[:, rows], out, tile_lse)
        output[rows], lse[:, rows] = out, tile_lse
    output = output.to(query.dtype)
    if sinks is not None:
        lse = add_sinks(output, lse, sinks)
    return output, lse


@_forward_op.register_fake
def _(query, key, value, *_others):
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
    cu_seqlens_k: Tensor | None,
    key_index: Tensor | None,
    sinks: Tensor | None,
    numbers: list[float],
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (without sinks: empty)."""
    options = KernelOptions(numbers[0], int(numbers[1]), numbers[2])
    keys = prefix_keys(cu_seqlens_k, key_index)
    # Fresh pages cost as much as the arithmetic: fill with zeros only if tiles overlap and add up.
    overlap = bool(options.window) or needs_scores(query, options) or keys is not None
    d_query = query.new_empty(query.shape)
    d_key, d_value = (
        x.new_zeros(x.shape) if overlap else x.new_empty(x.shape) for x in (key, value)
    )
    for tile in cut_tiles(cu_seqlens, options, query, key, keys):
        rows = slice(tile.q0, tile.q1)
        q, k, v = _split_by_kv_head(query, key, value, tile)
        g, o = (_split_by_group(x[rows], k.shape[0]) for x in (grad, output))
        tile_lse = lse[:, rows].unflatten(0, q.shape[:2])
        dq, dk, dv = backward_tile(g, q, k, v, o, tile_lse, tile, options)
        dq = dq.flatten(0, 1).transpose(0, 1)
        d_query[rows].add_(dq) if tile.merges else d_query[rows].copy_(dq)
        for total, part in ((d_key, dk), (d_value, dv)):
            part = (part.sum(1) if part.shape[1] > 1 else part[:, 0]).transpose(0, 1)
            seen = total[tile.k0 : tile.k1]
            seen.add_(part) if overlap else seen.copy_(part)
    if sinks is None:
        return d_query, d_key, d_value, query.new_empty(0)
    return d_query, d_key, d_value, gradient_of_sinks(grad, output, lse, sinks)


@_backward_op.register_fake
def _(grad, query, key, value, output, lse, cu_seqlens, cu_seqlens_k, key_index, sinks, *_others):
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(x.new_empty(x.shape) for x in (query, key, value)), d_sinks)


def _setup_context(ctx, inputs, output):
    query, key, value, *rest, ctx.numbers = inputs
    ctx.save_for_backward(query, key, value, *output, *rest)


def _autograd_backward(ctx, grad, _grad_lse):
    saved = ctx.saved_tensors  # once: gradient checkpointing computes them on this access
    *gradients, d_sinks = torch.ops.trl_packing.document_attention_backward(
        grad, *saved, ctx.numbers
    )
    return *gradients, None, None, None, None if saved[-1] is None else d_sinks, None


_forward_op.register_autograd(_autograd_backward, setup_context=_setup_context)


class Tile(NamedTuple):
    """Queries ``[q0, q1)`` and keys ``[k0, k1)``; causal and windowed.

    The query at row i is ``i - j - gap`` tokens behind the key at row j: `gap` tokens in between
    are on other paths of shared prefixes, or -gap keys are before the row of queries. `merges`: the
    queries have other tiles before this one.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    gap: int = 0
    merges: bool = False


def cut_tiles(
    cu_seqlens: Tensor,
    options: KernelOptions,
    query: Tensor,
    key: Tensor,
    keys: PrefixKeys | None = None,
) -> Iterator[Tile]:
    """Yield the tiles of all documents, then those of shared prefixes.

    The only document of a row may have further keys before those of `query`.
    """
    past = len(key) - len(query)
    boundaries = host_boundaries(cu_seqlens)
    if boundaries[0] != 0 or boundaries[-1] != len(query):
        raise ValueError(
            f"cu_seqlens runs from {boundaries[0]} to {boundaries[-1]}, the row from 0 to "
            f"{len(query)}: every token must belong to a document"
        )
    scored = needs_scores(query, options)
    window = int(options.window or 0)
    for start, end in pairwise(boundaries):
        within_window = not window or end - start + past <= window
        if within_window and not scored and end > start:
            yield Tile(start, end, start + past, end + past, -past)
            if past:  # each query sees all of them
                yield Tile(start, end, start, start + past, -past, merges=True)
            continue
        for q0 in range(start, end, BLOCK):
            reach = max(start, q0 + past - window + 1) if window else start
            q1 = min(q0 + BLOCK, end)
            yield Tile(q0, q1, reach, q1 + past, -past)
    if keys is not None:
        row = (host_values(x).astype(np.int64).tobytes() for x in (cu_seqlens, *keys[:2]))
        yield from _prefix_tiles(*row, window, scored, BLOCK)


@functools.lru_cache(maxsize=4)  # all layers share the tiles of a row, forward and backward
def _prefix_tiles(
    cu_seqlens: bytes, cu_seqlens_k: bytes, key_index: bytes, window: int, scored: bool, block: int
) -> list[Tile]:
    """Return tiles in which every query sees a key, so that no softmax is empty."""
    row = (np.frombuffer(x, np.int64) for x in (cu_seqlens, cu_seqlens_k, key_index))
    segments = segments_with_prefixes(*row)
    tiles = []
    if not window:
        for q0, q1, k0, k1 in blocks_of_nodes(segments):
            size = block if scored else max(q1 - q0, 1)
            for start in range(q0, q1, size):
                tiles.append(Tile(start, min(start + size, q1), k0, k1, merges=True))
        return tiles
    for q0, q1, k0, k1, gap in blocks_of_segments(segments):
        last = min(q1, k1 + gap + window - 1)  # behind it, the window has left the keys
        for start in range(q0, last, block):
            reach = max(k0, start - gap - window + 1)
            tiles.append(Tile(start, min(start + block, last), reach, k1, gap, merges=True))
    return tiles


def _split_by_kv_head(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, ...]:
    q = _split_by_group(query[tile.q0 : tile.q1], key.shape[1])
    k, v = (
        x[tile.k0 : tile.k1].transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        for x in (key, value)
    )
    return q, k, v


def _split_by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    return x.transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def forward_tile(
    q: Tensor, k: Tensor, v: Tensor, tile: Tile, options: KernelOptions
) -> tuple[Tensor, Tensor]:
    """Return output ``(K, G, Q, V)`` and log-sum-exp ``(K, G, Q)`` float32 of one tile."""
    if needs_scores(q, options):
        # Autocast reaches into custom ops, and would turn float32 products into bf16.
        with torch.autocast(q.device.type, enabled=False):
            scores, _ = _scores(q, k, tile, options)
            lse = torch.logsumexp(scores, -1)
            return torch.exp(scores - lse[..., None]) @ v.float(), lse
    causal, mask = _causal_or_mask(q, tile, options)
    out, lse = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu(
        *equally_wide(q, k, v), 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return out[..., : v.shape[-1]], lse


def backward_tile(
    grad: Tensor,
    q: Tensor,
    k: Tensor,
    v: Tensor,
    out: Tensor,
    lse: Tensor,
    tile: Tile,
    options: KernelOptions,
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of q, k and v of one tile from `grad`, that of `out`."""
    in_scores = needs_scores(q, options)
    if in_scores or (q.dtype != torch.float32 and tile.k1 - tile.k0 < _SLOW_IN_HALF_PRECISION):
        grad, q, k, v, out = (x.float() for x in (grad, q, k, v, out))
    if in_scores:
        with torch.autocast(q.device.type, enabled=False):
            scores, slope = _scores(q, k, tile, options)
            probabilities = torch.exp(scores - lse[..., None])
            d_value = probabilities.transpose(-1, -2) @ grad
            received = (grad * out).sum(-1, keepdim=True)
            d_probabilities = grad @ v.transpose(-1, -2)
            d_scores = probabilities * (d_probabilities - received) * slope * options.scale
            return d_scores @ k, d_scores.transpose(-1, -2) @ q, d_value
    causal, mask = _causal_or_mask(q, tile, options)
    wide = equally_wide(q, k, v, grad, out)
    dq, dk, dv = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu_backward(
        wide[3], *wide[:3], wide[4], lse, 0.0, causal, attn_mask=mask, scale=options.scale
    )
    return dq[..., : q.shape[-1]], dk[..., : k.shape[-1]], dv[..., : v.shape[-1]]


def _causal_or_mask(q: Tensor, tile: Tile, options: KernelOptions) -> tuple[bool, Tensor | None]:
    within_window = not options.window or tile.q1 - tile.gap - tile.k0 <= options.window
    if tile.k0 == tile.q0 - tile.gap and within_window:
        return True, None  # keys and queries are the same tokens, and each sees all before it
    if tile.merges and within_window:
        return False, None  # each query sees all keys
    visible = visible_keys(tile, options, q.device)
    bias = torch.zeros(visible.shape, dtype=q.dtype).masked_fill_(~visible, float("-inf"))
    return False, bias.expand(*q.shape[:2], -1, -1)


def equally_wide(*tensors: Tensor, multiple_of: int = 1) -> list[Tensor]:
    """Return the tensors with zero columns behind theirs, up to one width.

    These change neither scores nor the columns of the output that are kept (MLA: V < head_dim).
    """
    widest = max(x.shape[-1] for x in tensors)
    width = -(-widest // multiple_of) * multiple_of
    return [x if x.shape[-1] == width else F.pad(x, (0, width - x.shape[-1])) for x in tensors]


def visible_keys(tile: Tile, options: KernelOptions, device: torch.device) -> Tensor:
    """Return True for each key that a query of the tile sees, ``(Q, S)`` bool."""
    queries = torch.arange(tile.q0 - tile.gap, tile.q1 - tile.gap, device=device)[:, None]
    keys = torch.arange(tile.k0, tile.k1, device=device)[None]
    # Compared, not subtracted: a difference would take 8 bytes per pair, a comparison takes one.
    visible = keys <= queries
    return visible.logical_and_(keys > queries - options.window) if options.window else visible


def needs_scores(query: Tensor, options: KernelOptions) -> bool:
    """Whether scores are materialized: the fused kernel is a CPU's, without a cap."""
    return bool(options.softcap) or query.device.type != "cpu"


def _scores(
    q: Tensor, k: Tensor, tile: Tile, options: KernelOptions
) -> tuple[Tensor, Tensor | float]:
    """Return masked scores ``(K, G, Q, S)`` float32, and their slope by the scaled dot products."""
    scores = q.float() @ k.float().transpose(-1, -2) * options.scale
    slope: Tensor | float = 1.0
    if options.softcap:
        squashed = torch.tanh(scores / options.softcap)
        scores = squashed * options.softcap
        slope = 1 - squashed**2
    return scores.masked_fill(~visible_keys(tile, options, q.device), float("-inf")), slope


@sdpa_kernel([SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH])
def sdpa_by_document(
    query: Tensor, key: Tensor, value: Tensor, lengths: list[int], scale: float
) -> Tensor:
    """Return causal attention within documents of these lengths, ``(T, heads, value_dim)``.

    A single document may have further keys before those of `query`. By PyTorch's memory-efficient
    kernel where FlashAttention-2 does not run; cuDNN would build a graph for every length.
    """
    past = len(key) - len(query)
    # No enable_gqa: the memory-efficient kernel does not support it, and PyTorch would silently
    # materialize all scores of a document for every head (torch 2.13).
    group = query.shape[1] // key.shape[1]
    rows = [x.repeat_interleave(group, 1) if group > 1 else x for x in (key, value)]
    # Kernels make no mask of it.
    bias = causal_lower_right(len(query), len(key)) if past else None
    outputs = []
    of_keys = [length + past for length in lengths]
    documents = [x.split(of_keys) for x in rows]
    for document in zip(query.split(lengths), *documents, strict=True):
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in document)
        attended = F.scaled_dot_product_attention(q, k, v, bias, is_causal=not past, scale=scale)
        outputs.append(attended.squeeze(0).transpose(0, 1))
    return torch.cat(outputs)


register_packed_kernel(NAME, document_attention)
