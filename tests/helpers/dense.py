"""Dense attention: every score of the row, a mask, a softmax; the reference of `tests/attention`.

`assert_is_dense` compares a kernel with it, on a row of seven documents or on a tree of
segments. Doubles of kernels compute with it from the boundaries, window and scale that they get.

The reference runs in float64: what remains is the rounding of one kernel, 2**-24 of values of size
1 to 10, over sums of at most 40 keys × 16 dimensions.
"""

from functools import partial
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys

TOLERANCE = 1e-5
SCALE = 0.4

_SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
KERNEL_OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window of twelve": {"window": 12},
    "window longer than documents": {"window": 64},
    "softcap, window": {"softcap": 2.0, "window": 4},
    "sinks": {"sinks": _SINKS},
    "softcap, sinks, window": {"softcap": 2.0, "sinks": _SINKS, "window": 5},
}

# Two documents without tokens, one of a single token, and one longer than every window of a test.
LENGTHS = (5, 1, 0, 30, 2, 0, 3)
NUM_TOKENS = sum(LENGTHS)


def visible(
    cu_seqlens: Tensor, window: int | None = None, cu_seqlens_k: Tensor | None = None
) -> Tensor:
    """Return which query sees which key, ``(Q, K)`` bool.

    Causal masks are aligned at the last key of each document, as FlashAttention aligns them.
    """
    of_query, behind_query = _places(cu_seqlens)
    of_key, behind_key = _places(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    distance = behind_key[None] - behind_query[:, None]
    seen = (distance >= 0) & (of_query[:, None] == of_key[None])
    return seen & (distance < window) if window else seen


def last_queries(number: int, tensors: list[Tensor]) -> tuple[list[Tensor], Any]:
    """Return the last queries of a document with all keys and values, and a tree for them."""
    ends, tokens = boundaries([number]), len(tensors[0])
    keys = PrefixKeys(boundaries([tokens]), None, tokens)
    seen = partial(visible, ends, cu_seqlens_k=keys.cu_seqlens_k)
    tree = SimpleNamespace(cu_seqlens=ends, keys=keys, visible=seen)
    return [tensors[0][-number:], *tensors[1:]], tree


def _places(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the document of each token, and how many tokens it has from there on."""
    lengths = cu_seqlens.long().diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    return document, cu_seqlens[1:][document] - torch.arange(len(document))


def probabilities(
    query: Tensor,
    key: Tensor,
    seen: Tensor,
    scale: float = SCALE,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return ``(heads, Q, K)``; rows sum to one, or to less with sinks."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def weighted_sum(weights: Tensor, value: Tensor) -> Tensor:
    """Return ``(Q, heads, value_dim)`` from ``(heads, Q, K)`` and ``(K, kv_heads, value_dim)``."""
    group = len(weights) // value.shape[1]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def inputs(kv_heads=2, value_dim=8, dtype=torch.float32, num_tokens=NUM_TOKENS):
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    return [torch.randn(num_tokens, *shape).to(dtype).requires_grad_() for shape in shapes]


def outcome(attention, tensors, upstream, sinks=None):
    """Return the output, and the gradients of query, key, value and sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    if sinks is not None:
        leaves.append(sinks.detach().to(tensors[0].dtype).clone().requires_grad_())
    output = attention(*leaves)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_is_dense(
    kernel, tensors, tolerance=TOLERANCE, *, tree=None, keys=None, sinks=None, **options
):
    """Compare output and gradients of a packed kernel with dense attention in float64.

    `tree` are the segments of a row with shared prefixes, `keys` others than its own.
    """
    window, softcap = options.get("window"), options.get("softcap")
    cu_seqlens = boundaries() if tree is None else tree.cu_seqlens
    seen = visible(cu_seqlens, window) if tree is None else tree.visible(window)
    shared = {} if tree is None else {"keys": keys or tree.keys}

    def packed(query, key, value, sinks=None):
        given = KernelOptions(SCALE, sinks=sinks, **options)
        return kernel(query, key, value, cu_seqlens, given, None, **shared)

    def reference(query, key, value, sinks=None):
        return weighted_sum(probabilities(query, key, seen, SCALE, softcap, sinks), value)

    upstream = torch.randn(len(tensors[0]), tensors[0].shape[1], tensors[2].shape[2])
    ours = outcome(packed, tensors, upstream, sinks)
    expected = outcome(reference, [x.double() for x in tensors], upstream, sinks)
    for got, wanted in zip(ours, expected, strict=True):
        size = 1 + wanted.abs().max().item()
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=tolerance * size)
