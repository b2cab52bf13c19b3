"""Tiles: the documents of a row as blocks of queries, each with every key that they may see.

Two kernels compute the attention of a tile:

    fused     PyTorch's FlashAttention kernel for CPUs
    scored    the scores in float32, for soft-caps, dropout and other devices

Shape letters: K key-value heads, G query heads per key-value head, Q queries, S keys, D head_dim,
V value_dim.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys, blocks_of_nodes, blocks_of_segments
from trl_packing.documents.host_row import host_boundaries, host_values

# Queries per tile if the tile materializes a mask (windows) or scores (soft-cap, dropout). This
# bounds their memory at block × keys, for scores times the heads. Tiles as long as the window take
# up to 1.3× the time, since half of their scores are masked (torch 2.13, CPU).
BLOCK = 512


class Tile(NamedTuple):
    """Queries ``[q0, q1)`` and keys ``[k0, k1)``; causal and windowed.

    The query at row i is ``i - j - gap`` tokens behind the key at row j: tokens in between may be
    on other paths of a row with shared prefixes. `merges` says that the queries have other tiles
    before this one.
    """

    q0: int
    q1: int
    k0: int
    k1: int
    gap: int = 0
    merges: bool = False


def cut_tiles(
    cu_seqlens: Tensor, options: KernelOptions, query: Tensor, keys: PrefixKeys | None = None
) -> Iterator[Tile]:
    """Yield the tiles of all documents, then those of shared prefixes.

    Raises:
        ValueError: `cu_seqlens` does not run from 0 to the number of tokens of `query`.
    """
    boundaries = host_boundaries(cu_seqlens)
    if boundaries[0] != 0 or boundaries[-1] != len(query):
        raise ValueError(
            f"cu_seqlens runs from {boundaries[0]} to {boundaries[-1]}, but the row holds tokens 0 "
            f"to {len(query)}: every token must belong to a document"
        )
    scored = needs_scores(query, options)
    for start, end in pairwise(boundaries):
        within_window = not options.window or end - start <= options.window
        block = end - start if within_window and not scored else BLOCK
        for q0 in range(start, end, max(block, 1)):
            reach = max(start, q0 - options.window + 1) if options.window else start
            q1 = min(q0 + block, end)
            yield Tile(q0, q1, reach, q1)
    if keys is not None:
        yield from _known_prefix_tiles(cu_seqlens, options, keys, scored)


# Tiles of the prefixes of a row by its `key_index`: the version that they were cut from, and the
# tiles by boundaries and options. All layers share them, forward and backward.
_cut: WeakIdKeyDictionary = WeakIdKeyDictionary()


def _known_prefix_tiles(
    cu_seqlens: Tensor, options: KernelOptions, keys: PrefixKeys, scored: bool
) -> list[Tile]:
    """Return `_prefix_tiles`, cut once for a row."""
    if keys.key_index.is_inference():  # inference tensors do not count writes
        return list(_prefix_tiles(cu_seqlens, options, keys, scored))
    boundaries = (host_values(x).tobytes() for x in (cu_seqlens, keys.cu_seqlens_k))
    kind = (*boundaries, options.window or 0, scored, BLOCK)
    version, known = _cut.get(keys.key_index, (None, {}))
    if version != keys.key_index._version:
        known = {}
        _cut[keys.key_index] = (keys.key_index._version, known)
    if kind not in known:
        known[kind] = list(_prefix_tiles(cu_seqlens, options, keys, scored))
    return known[kind]


def _prefix_tiles(
    cu_seqlens: Tensor, options: KernelOptions, keys: PrefixKeys, scored: bool
) -> Iterator[Tile]:
    """Yield tiles in which every query sees a key, so that no softmax is empty."""
    if not options.window:
        for q0, q1, k0, k1, _ in blocks_of_nodes(cu_seqlens, keys):
            size = BLOCK if scored else q1 - q0
            for start in range(q0, q1, max(size, 1)):
                yield Tile(start, min(start + size, q1), k0, k1, merges=True)
        return
    for q0, q1, k0, k1, gap in blocks_of_segments(cu_seqlens, keys):
        last = min(q1, k1 + gap + options.window - 1)  # behind it, the window has left the keys
        for start in range(q0, last, BLOCK):
            reach = max(k0, start - gap - options.window + 1)
            yield Tile(start, min(start + BLOCK, last), reach, k1, gap, merges=True)


def split_by_kv_head(query: Tensor, key: Tensor, value: Tensor, tile: Tile) -> tuple[Tensor, ...]:
    """Return views ``(K, G, Q, D)``, ``(K, G, S, D)`` and ``(K, G, S, V)`` of the tile.

    A key-value head serves its group of query heads without being repeated.
    """
    num_kv_heads = key.shape[1]
    q = split_by_group(query[tile.q0 : tile.q1], num_kv_heads)
    k, v = (
        x[tile.k0 : tile.k1].transpose(0, 1).unsqueeze(1).expand(-1, q.shape[1], -1, -1)
        for x in (key, value)
    )
    return q, k, v


def split_by_group(x: Tensor, num_kv_heads: int) -> Tensor:
    """Return `x` ``(tokens, heads, dim)`` as ``(K, G, tokens, dim)``."""
    return x.transpose(0, 1).unflatten(0, (num_kv_heads, -1))


def is_causal_square(tile: Tile, options: KernelOptions) -> bool:
    """Return whether keys and queries are the same tokens, and each sees all before it."""
    return tile.k0 == tile.q0 and (not options.window or tile.q1 - tile.q0 <= options.window)


def sees_all(tile: Tile, options: KernelOptions) -> bool:
    """Return whether each query sees all keys of the tile."""
    return tile.merges and not options.window


def visible_keys(tile: Tile, options: KernelOptions, device: torch.device) -> Tensor:
    """Return True for each key that a query of the tile sees, ``(Q, S)`` bool."""
    queries = torch.arange(tile.q0 - tile.gap, tile.q1 - tile.gap, device=device)[:, None]
    keys = torch.arange(tile.k0, tile.k1, device=device)[None]
    # Compared, not subtracted: a difference would take 8 bytes per pair, a comparison takes one.
    visible = keys <= queries
    return visible.logical_and_(keys > queries - options.window) if options.window else visible


def needs_scores(query: Tensor, options: KernelOptions) -> bool:
    """Whether scores must be materialized: the fused kernel runs on CPUs only.

    It has no soft-cap and no dropout.
    """
    return bool(options.softcap or options.dropout) or query.device.type != "cpu"


# --- the attention of one tile, forward and backward ----------------------------------------------


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
