"""Tiles: the documents of a row as blocks of queries, each with every key that they may see.

`tile_kernels.py` computes the attention of one tile.

Shape letters: K key-value heads, G query heads per key-value head, Q queries, S keys, D head_dim,
V value_dim.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import NamedTuple

import torch
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
