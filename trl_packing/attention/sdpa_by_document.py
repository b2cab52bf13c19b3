"""Computes attention document by document with `F.scaled_dot_product_attention`, on any device.

GPUs without FlashAttention-2, and float32 inputs, run PyTorch's memory-efficient kernel here. cuDNN
is left out, because it would build a graph for every length of a document.
"""

import functools
from collections.abc import Callable, Iterator
from itertools import pairwise

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend, sdpa_kernel

from trl_packing.attention import tiles
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys, gather_keys
from trl_packing.attention.tiles import Tile, visible_keys
from trl_packing.documents.host_row import host_boundaries

_BACKENDS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]


@sdpa_kernel(_BACKENDS)
def sdpa_by_document(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    scale: float,
    window: int,
    keys: PrefixKeys | None = None,
) -> Tensor:
    """Return causal attention within each document, ``(T, heads, value_dim)``.

    Shapes and `keys` as in `document_sdpa`; `window` is 0 without a sliding window.
    """
    lengths = lengths_k = _lengths(cu_seqlens)
    if keys is not None:
        key, value = (gather_keys(x, keys.key_index) for x in (key, value))
        lengths_k = _lengths(keys.cu_seqlens_k)
    group = query.shape[1] // key.shape[1]
    if group > 1:
        # No enable_gqa: the memory-efficient kernel does not support it, and PyTorch would silently
        # materialize all scores of a document for every head (torch 2.13).
        key, value = (x.repeat_interleave(group, 1) for x in (key, value))
    rows = min(tiles.BLOCK, max(lengths, default=0))
    bias = functools.cache(functools.partial(_bias, rows, window, query))
    outputs = []
    split = (query.split(lengths), key.split(lengths_k), value.split(lengths_k))
    for q, k, v in zip(*split, strict=True):
        prefix, beyond_window = k.shape[0] - q.shape[0], window and q.shape[0] > window
        q, k, v = (x.transpose(0, 1).unsqueeze(0) for x in (q, k, v))
        if prefix:
            parts = _sdpa_by_tile(q, k, v, prefix, scale, window, bias)
        elif beyond_window:
            parts = _windowed_sdpa(q, k, v, scale, window, bias)
        else:
            parts = iter([_causal_sdpa(q, k, v, scale)])
        outputs += [part[0].transpose(0, 1) for part in parts]
    return torch.cat(outputs)


def _lengths(boundaries: Tensor) -> list[int]:
    return [end - start for start, end in pairwise(host_boundaries(boundaries)) if end > start]


def _causal_sdpa(q: Tensor, k: Tensor, v: Tensor, scale: float) -> Tensor:
    return F.scaled_dot_product_attention(q, k, v, attn_mask=None, is_causal=True, scale=scale)


def _windowed_sdpa(
    q: Tensor, k: Tensor, v: Tensor, scale: float, window: int, bias: Callable[[int], Tensor]
) -> Iterator[Tensor]:
    """Yield attention of one document ``(1, heads, queries, dim)``, tile by tile.

    The document is first cut into chunks, which see themselves and the chunk before, and these into
    tiles. This keeps the work linear: for each tile, autograd fills a gradient as long as two
    chunks instead of one as long as the document. Tiles share the masks of `bias`.
    """
    size = max(window, tiles.BLOCK)
    chunks = [x.split(size, 2) for x in (q, k, v)]
    for n, (queries, *_) in enumerate(zip(*chunks, strict=True)):
        if n == 0 and queries.shape[2] <= window:
            yield _causal_sdpa(queries, chunks[1][0], chunks[2][0], scale)
            continue
        keys, values = (torch.cat(x[max(n - 1, 0) : n + 1], 2) for x in chunks[1:])
        past = keys.shape[2] - queries.shape[2]  # tokens of the chunk before
        yield from _sdpa_by_tile(queries, keys, values, past, scale, window, bias)


def _sdpa_by_tile(
    queries: Tensor,
    keys: Tensor,
    values: Tensor,
    past: int,
    scale: float,
    window: int,
    bias: Callable[[int], Tensor],
) -> Iterator[Tensor]:
    """Yield attention of queries ``(1, heads, queries, dim)`` behind `past` keys, tile by tile."""
    for part in queries.split(tiles.BLOCK, 2):
        # Kernels read keys and masks in units of 16 bytes.
        start = max(past - window + 1, 0) // 8 * 8 if window else 0
        stop = past + part.shape[2]
        yield F.scaled_dot_product_attention(
            part,
            keys[:, :, start:stop],
            values[:, :, start:stop],
            attn_mask=bias(past - start)[: part.shape[2], : stop - start],
            scale=scale,
        )
        past = stop


def _bias(rows: int, window: int, query: Tensor, past: int) -> Tensor:
    """Return 0 where a query of a tile sees a key, else -inf, ``(rows, past + rows)``.

    `past` keys come before the first query; `window` is 0 without one. The dtype is that of
    `query`: PyTorch would convert a bool mask in every call, and keep the result for the backward.
    """
    tile = Tile(past, past + rows, 0, past + rows)
    visible = visible_keys(tile, KernelOptions(1.0, window), query.device)
    # Rows are a multiple of 8 keys wide; PyTorch pads a copy of other masks in every call.
    width = -(-visible.shape[1] // 8) * 8
    bias = query.new_full((rows, width), float("-inf"))
    return bias[:, : visible.shape[1]].masked_fill_(visible, 0.0)
