"""Random rows with shared prefixes."""

import numpy as np
import torch
from torch import Tensor

from trl_packing.attention.prefix_keys import PrefixKeys


class Tree:
    """Segments of a row: their lengths ``(N,)`` and parents ``(N,)``, -1 for roots."""

    def __init__(self, lengths, parents):
        self.lengths, self.parents = list(lengths), list(parents)
        self.starts = [0, *np.cumsum(self.lengths).tolist()]

    def rows(self, segment: int) -> list[int]:
        """Return the rows of the keys of `segment`: those from the root to it, itself included."""
        own = list(range(self.starts[segment], self.starts[segment + 1]))
        parent = self.parents[segment]
        return own if parent < 0 else self.rows(parent) + own

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
        seen = torch.zeros(self.starts[-1], self.starts[-1], dtype=torch.bool)
        for s, length in enumerate(self.lengths):
            rows = self.rows(s)
            for depth in range(len(rows) - length, len(rows)):
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
