"""Keys of a row whose documents share prefixes: boundaries of queries and keys apart.

    row              S S S Q Q a a a b b R c        a segment is a run of tokens that one set of
    segments         S S S|Q Q|a a a|b b|R c        documents shares
    cu_seqlens       0     3   5     8   10  12     boundaries of the segments (the queries)
    keys of b b      S S S Q Q b b                  the segments on the path from the root, its own
    key_index        … 0 1 2 3 4 8 9 …              their positions in the row, segment by segment
    cu_seqlens_k     … 0 → 7 …                      boundaries of the keys of each segment

A query sees the keys of its segment, causally, aligned at the end, as in FlashAttention's varlen
kernels (flash-attn from 2.1, torch varlen).
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

_PART = 16_384  # keys whose gradients are summed at once


class PrefixKeys(NamedTuple):
    """The keys that each segment of a row sees, its own tokens last.

    `key_index` ``(K,)`` int64 are the positions in the row of all keys (None: all, in order),
    `cu_seqlens_k` ``(N + 1,)`` int32 the boundaries of each segment's, `max_length` the most.
    """

    cu_seqlens_k: Tensor
    key_index: Any  # a tensor, or None
    max_length: int | None = None


def prefix_keys(
    cu_seqlens_k: Tensor | None, key_index: Tensor | None, max_length: int | None = None
) -> PrefixKeys | None:
    """Return the keys of a packed call, None if its documents share no prefixes."""
    if cu_seqlens_k is None or key_index is None:
        return None
    return PrefixKeys(cu_seqlens_k, key_index, max_length)


# Queries ``[q0, q1)`` of a segment, and the positions of its keys without its own.
Segment = tuple[int, int, np.ndarray]


def segments_with_prefixes(
    boundaries: np.ndarray, boundaries_k: np.ndarray, key_index: np.ndarray
) -> list[Segment]:
    """Return the segments of a row with their prefixes; ValueError for keys that do not fit."""
    sizes = np.diff(boundaries)
    ends = boundaries_k
    fits = len(ends) == len(boundaries) and ends[0] == 0 and ends[-1] <= len(key_index)
    keys = np.split(key_index, ends[1:])[:-1] if fits else []
    segments = []
    for q0, size, seen in zip(boundaries.tolist(), sizes.tolist(), keys, strict=False):
        cut = max(len(seen) - size, 0)
        prefix, own = seen[:cut], seen[cut:]
        fits &= np.array_equal(own, np.arange(q0, q0 + size)) and bool((prefix < q0).all())
        segments.append((q0, q0 + size, prefix))
    if not fits:
        raise ValueError(
            "cu_seqlens_k and key_index must hold for each segment the tokens before it that it "
            "sees, then its own"
        )
    return segments


def blocks_of_nodes(segments: list[Segment]) -> Iterator[tuple[int, int, int, int]]:
    """Yield queries ``[q0, q1)`` and keys ``[k0, k1)`` that are in the prefix of all of them."""
    starts = np.array([q0 for q0, _, _ in segments])
    since: dict[int, int] = {}  # the first query behind each segment that is in a prefix now
    end = (segments[-1][1], 0, np.empty(0, np.int64))
    for q0, _, prefix in [*segments, end]:
        heads = prefix[np.isin(prefix, starts)]
        path = (np.searchsorted(starts, heads, side="right") - 1).tolist()
        for node in [node for node in since if node not in path]:
            yield since.pop(node), q0, *segments[node][:2]
        for node in path:
            since.setdefault(node, q0)


def blocks_of_segments(segments: list[Segment]) -> Iterator[tuple[int, int, int, int, int]]:
    """Yield the keys of each segment's prefix in runs of neighbors: the fields of a `Tile`."""
    for q0, q1, prefix in segments:
        heads = np.flatnonzero(np.diff(prefix, prepend=-2) != 1).tolist()
        for first, beyond in pairwise([*heads, len(prefix)]):
            k0 = int(prefix[first])
            yield q0, q1, k0, k0 + beyond - first, (q0 - k0) - (len(prefix) - first)


# Custom ops, so that torch.compile sees one call for any number of keys.
@torch.library.custom_op("trl_packing::gather_keys", mutates_args=())
def gather_keys(tensor: Tensor, key_index: Tensor) -> Tensor:
    """Return ``tensor[key_index]``: keys or values ``(T, heads, dim)`` at the positions ``(K,)``.

    The gradient of a key is the sum over all segments that see it, in float32.
    """
    return tensor.index_select(0, key_index)


@gather_keys.register_fake
def _(tensor, key_index):
    return tensor.new_empty(key_index.shape[0], *tensor.shape[1:])


@torch.library.custom_op("trl_packing::sum_over_segments", mutates_args=())
def sum_over_segments(grad: Tensor, key_index: Tensor, num_tokens: int) -> Tensor:
    """Return gradients ``(T, heads, dim)`` from those of gathered keys, ``(K, heads, dim)``."""
    total = grad.new_zeros(num_tokens, *grad.shape[1:], dtype=torch.float32)
    # In parts, because a float32 copy of all keys may be many times as large as the row.
    for rows, part in zip(key_index.split(_PART), grad.split(_PART), strict=True):
        total.index_add_(0, rows, part.float())
    return total.to(grad.dtype)


@sum_over_segments.register_fake
def _(grad, key_index, num_tokens):
    return grad.new_empty(num_tokens, *grad.shape[1:])


def _setup_context(ctx, inputs, output):
    tensor, key_index = inputs
    ctx.save_for_backward(key_index)
    ctx.num_tokens = tensor.shape[0]


def _autograd_backward(ctx, grad):
    (key_index,) = ctx.saved_tensors
    return sum_over_segments(grad, key_index, ctx.num_tokens), None


gather_keys.register_autograd(_autograd_backward, setup_context=_setup_context)


def merge_softmax(
    output: Tensor, lse: Tensor, more: Tensor, more_lse: Tensor
) -> tuple[Tensor, Tensor]:
    """Return output and log-sum-exp over two disjoint sets of keys from those over each.

    Outputs are ``(Q, heads, dim)`` in float32, log-sum-exps ``(heads, Q)``.
    """
    merged = torch.logaddexp(lse, more_lse)
    share, rest = (torch.exp(x - merged).t().unsqueeze(-1) for x in (lse, more_lse))
    return output * share + more * rest, merged


# A sink is a learned logit per head that takes part in the softmax and attends to nothing.
# With ``out, lse`` of plain attention and sinks s, ``out' = out · exp(lse − lse')`` where
# ``lse' = logaddexp(lse, s)``. A kernel's backward rebuilds its probabilities from the log-sum-exp:
# given out' and lse' it is exact, and the gradient of s is ``−Σ exp(s − lse') · Σ(dout' · out')``.
# Shape letters: T tokens, H heads, D values per head.


def add_sinks(output: Tensor, lse: Tensor, sinks: Tensor) -> Tensor:
    """Scale the output ``(T, H, D)`` over keys in place; return the log-sum-exp with the sinks.

    The sinks are ``(H,)``, log-sum-exps ``(H, T)`` float32.
    """
    with_sinks = torch.logaddexp(lse, sinks.float()[:, None])
    share_of_keys = torch.exp(lse - with_sinks).t().unsqueeze(-1)
    output.mul_(share_of_keys.to(output.dtype))
    return with_sinks


def gradient_of_sinks(grad: Tensor, output: Tensor, with_sinks: Tensor, sinks: Tensor) -> Tensor:
    """Return that of the sinks ``(H,)`` from output and log-sum-exp ``(H, T)`` with sinks."""
    received = (grad.float() * output.float()).sum(-1).t()  # (H, T)
    return -(torch.exp(sinks.float()[:, None] - with_sinks) * received).sum(1).to(sinks.dtype)
