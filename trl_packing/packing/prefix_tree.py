"""One row of documents in which the tokens that they begin with stand once.

    documents       A: S S S Q Q a a a      B: S S S Q Q b b      C: S S S R R c
    row             S S S Q Q a a a | Q b b | S R R c
    position_ids    0 1 2 3 4 5 6 7   4 5 6   2 3 4 5
    C sees          S S _ _ _ _ _ _   _ _ _   S R R c

Documents are sorted, and each adds to the row the tokens that it does not share with the document
before it. A position has one label, the next token. Documents that differ in their next token do
not share a position, so the last common token stands in the row once for each branch; only its
first copy is a target. The weight of a target is the sum of its weights in all documents.

The row is the depth-first order of the prefix tree of the documents. "Tree Training" (arXiv
2511.00413) computes agent trajectories this way.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The row of documents with shared prefixes, T tokens.

    Attributes:
        order: document of each run of the row, ``(N,)``: the documents in sorted order.
        starts: rows at which the runs start, ``(N + 1,)``; a document may have an empty run.
        depths: tokens that each run shares with those before it, ``(N,)``.
        targets: for each document (as given) the row of each of its tokens as a target, ``(len,)``.
        cu_seqlens: boundaries of the segments, ``(S + 1,)`` int32.
        cu_seqlens_k: boundaries of the keys of each segment, ``(S + 1,)`` int32.
        key_index: rows of all keys, segment by segment, ``(K,)`` int64.
        position_ids: ``(T,)`` int64.
    """

    order: np.ndarray
    starts: np.ndarray
    depths: np.ndarray
    targets: list[np.ndarray]
    cu_seqlens: np.ndarray
    cu_seqlens_k: np.ndarray
    key_index: np.ndarray
    position_ids: np.ndarray

    def place(self, values: Sequence[np.ndarray]) -> np.ndarray:
        """Return values of the documents' tokens as a row ``(T,)``, such as their `input_ids`."""
        parts = [values[d][depth:] for d, depth in zip(self.order, self.depths, strict=True)]
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def sum_targets(self, weights: Sequence[np.ndarray]) -> np.ndarray:
        """Return the sum ``(T,)`` float64 of the weights that each row has as a target."""
        total = np.zeros(self.starts[-1])
        for rows, values in zip(self.targets, weights, strict=True):
            total[rows[1:]] += values[1:]  # the first token of a document is no target
        return total


def build_prefix_tree(
    documents: Sequence[np.ndarray], *, groups: Sequence[int] | None = None, min_shared: int = 1
) -> PrefixTree:
    """Return the row of `documents`.

    Args:
        documents: token ids of each document, 1-D integers.
        groups: a number for each document, ``(N,)``; only documents of one group share.
        min_shared: documents share at least so many tokens, or none.

    Examples:
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> tree.place([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])]).tolist()
        [7, 8, 9, 1, 9, 2]
        >>> tree.position_ids.tolist()
        [0, 1, 2, 3, 2, 3]
    """
    groups = [0] * len(documents) if groups is None else groups
    order = sorted(
        range(len(documents)), key=lambda d: (groups[d], documents[d].astype(">i8").tobytes())
    )
    depths = _shared_depths([documents[d] for d in order], [groups[d] for d in order], min_shared)
    lengths = np.array([len(documents[d]) for d in order], np.int64)
    starts = np.concatenate([[0], np.cumsum(lengths - depths)])
    targets: list[np.ndarray] = [np.zeros(0, np.int64)] * len(documents)
    path = as_targets = np.zeros(0, np.int64)  # rows of the tokens of the document before
    paths = []
    for run, (document, depth) in enumerate(zip(order, depths.tolist(), strict=True)):
        own = np.arange(starts[run], starts[run + 1])
        # A branch repeats its first token, which is a target where it stood first.
        repeats = int(len(own) > 0 and 0 < depth < len(path))
        path = np.concatenate([path[:depth], own])
        as_targets = np.concatenate([as_targets[: depth + repeats], own[repeats:]])
        paths.append(path)
        targets[document] = as_targets
    cuts = _cuts(starts, depths, paths)
    keys = [_keys(paths, starts, first, last) for first, last in pairwise(cuts)]
    return PrefixTree(
        order=np.array(order, np.int64),
        starts=starts,
        depths=depths,
        targets=targets,
        cu_seqlens=cuts.astype(np.int32),
        cu_seqlens_k=np.cumsum([0, *map(len, keys)]).astype(np.int32),
        key_index=np.concatenate(keys) if keys else np.zeros(0, np.int64),
        position_ids=np.concatenate(
            [np.arange(d, n) for d, n in zip(depths, lengths, strict=True)] or [np.zeros(0, int)]
        ),
    )


def _shared_depths(
    documents: Sequence[np.ndarray], groups: Sequence[int], min_shared: int
) -> np.ndarray:
    """Return how many tokens of its path each of the sorted documents takes from the one before."""
    depths = np.zeros(len(documents), np.int64)
    for i in range(1, len(documents)):
        if groups[i] != groups[i - 1]:
            continue
        before, document = documents[i - 1], documents[i]
        common = common_length(before, document)
        # A document that ends has no next token to disagree about.
        depth = common if common == len(before) else common - 1
        depths[i] = depth if depth >= min_shared else 0
    return depths


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(a), len(b))
    differ = np.flatnonzero(a[:length] != b[:length])
    return int(differ[0]) if len(differ) else length


def _cuts(starts: np.ndarray, depths: np.ndarray, paths: Sequence[np.ndarray]) -> np.ndarray:
    """Return rows at which segments start, and T: at runs, and behind rows where a run branches."""
    branches = [
        path[depth - 1] + 1 for path, depth in zip(paths, depths.tolist(), strict=True) if depth
    ]
    return np.unique(np.concatenate([starts, np.array(branches, np.int64)]))


def _keys(paths: Sequence[np.ndarray], starts: np.ndarray, first: int, last: int) -> np.ndarray:
    """Return the rows that the segment ``[first, last)`` sees, its own last."""
    run = int(np.searchsorted(starts, first, side="right")) - 1
    path = paths[run]
    return path[: int(np.searchsorted(path, last - 1)) + 1]
