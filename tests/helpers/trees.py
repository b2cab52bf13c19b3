"""Random rows with shared prefixes, and dense attention over them by a mask of paths."""

import numpy as np
import torch
from torch import Tensor

from helpers.dense import probabilities_of
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import PrefixKeys


class Tree:
    """Segments of a row: their lengths ``(N,)`` and parents ``(N,)``, -1 for roots."""

    def __init__(self, lengths, parents):
        self.lengths, self.parents = list(lengths), list(parents)
        self.starts = [0, *np.cumsum(self.lengths).tolist()]

    def path(self, segment: int) -> list[int]:
        """Return segments from the root to `segment`, itself included."""
        path = []
        while segment >= 0:
            path.append(segment)
            segment = self.parents[segment]
        return path[::-1]

    def rows(self, segment: int) -> list[int]:
        """Return the rows of the keys of `segment`."""
        return [i for s in self.path(segment) for i in range(self.starts[s], self.starts[s + 1])]

    @property
    def cu_seqlens(self) -> Tensor:
        return torch.tensor(self.starts, dtype=torch.int32)

    @property
    def keys(self) -> PrefixKeys:
        rows = [self.rows(s) for s in range(len(self.lengths))]
        ends = np.cumsum([0, *map(len, rows)])
        index = torch.tensor([i for r in rows for i in r])
        return PrefixKeys(torch.tensor(ends, dtype=torch.int32), index, max(map(len, rows)))

    def visible(self, window: int | None = None) -> Tensor:
        """Return which token sees which, ``(T, T)`` bool."""
        total = self.starts[-1]
        seen = torch.zeros(total, total, dtype=torch.bool)
        for s in range(len(self.lengths)):
            rows = self.rows(s)
            for depth in range(len(rows) - self.lengths[s], len(rows)):
                first = 0 if window is None else max(0, depth - window + 1)
                seen[rows[depth], rows[first : depth + 1]] = True
        return seen


def random_tree(rng: np.random.Generator, segments: int = 8, longest: int = 9) -> Tree:
    """Return a tree of `segments` in depth-first order, some of them empty or roots."""
    parents, open_path = [], []
    for s in range(segments):
        open_path = open_path[: int(rng.integers(0, len(open_path) + 1))]
        parents.append(open_path[-1] if open_path else -1)
        open_path.append(s)
    return Tree(rng.integers(1, longest + 1, segments).tolist(), parents)


def tensors_of(num_tokens, dtype=torch.float32, value_dim=8, kv_heads=2):
    shapes = ((4, 8), (kv_heads, 8), (kv_heads, value_dim))
    return [torch.randn(num_tokens, *s).to(dtype).requires_grad_() for s in shapes]


def dense(tree, query, key, value, scale, window=None, softcap=None, sinks=None):
    weights = probabilities_of(query, key, tree.visible(window), scale, softcap, sinks)
    group = query.shape[1] // value.shape[1]
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))


def assert_equals_dense(attention, tree, tensors, keys=None, sinks=None, **options):
    """Compare output and gradients with dense attention in float64; `options` of the kernel."""
    upstream = torch.randn(len(tensors[0]), 4, tensors[2].shape[-1])

    def packed(q, k, v, sinks):
        given = KernelOptions(0.4, sinks=sinks, **options)
        return attention(q, k, v, tree.cu_seqlens, given, keys=keys or tree.keys)

    def reference(q, k, v, sinks):
        return dense(tree, q, k, v, 0.4, sinks=sinks, **options)

    ours = outcome(packed, tensors, upstream, sinks)
    expected = outcome(reference, [x.double() for x in tensors], upstream.double(), sinks)
    for got, wanted in zip(ours, expected, strict=True):
        size = 1 + wanted.abs().max().item()
        torch.testing.assert_close(got.double(), wanted, rtol=0, atol=1e-5 * size)


def outcome(attention, tensors, upstream, sinks):
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    if sinks is not None:
        leaves.append(sinks.to(tensors[0].dtype).clone().requires_grad_())
    output = attention(*leaves[:3], sinks=leaves[3] if sinks is not None else None)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]
