"""The segments of a row with shared prefixes: a tree of tokens that the same documents hold.

row          S S S Q Q a a a | Q b b | S R R c
segments     [S S] [S Q] [Q a a a] [Q b b] [S R R c]
parent         –     0       1        1        0
documents    A B C  A B      A        B        C
"""

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import pairwise

import numpy as np

from trl_packing.packing.prefix_tree import PrefixTree


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of a row, which the same documents hold.

    Attributes:
        start: its first token in the row, a boundary of `cu_seqlens`.
        stop: the next boundary.
        position: of its first token in the documents.
        parent: the segment that the documents hold before it; None where they begin.
        holders: documents that hold it, as their places in the sorted order of the tree.
        repeats: Whether its first token is a copy of the last common token, which is a target
            in another branch.
    """

    start: int
    stop: int
    position: int
    parent: int | None
    holders: tuple[int, ...]
    repeats: bool


def segments_of(tree: PrefixTree) -> list[Segment]:
    """Return the segments of the row of `tree`, in its order.

    Examples:
        >>> from trl_packing.packing.prefix_tree import build_prefix_tree
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> [(s.start, s.stop, s.position, s.parent, s.holders) for s in segments_of(tree)]
        [(0, 2, 0, None, (0, 1)), (2, 4, 2, 0, (0,)), (4, 6, 2, 0, (1,))]
    """
    return [_segment(tree, *part) for part in enumerate(pairwise(tree.cu_seqlens.tolist()))]


def _segment(tree: PrefixTree, number: int, rows: tuple[int, int]) -> Segment:
    start, stop = rows
    position = int(tree.position_ids[start])
    run = int(np.searchsorted(tree.starts[:-1], start, side="right")) - 1
    parent, repeats = None, False
    if position:
        before = tree.key_index[tree.cu_seqlens_k[number] + position - 1]
        parent = int(np.searchsorted(tree.cu_seqlens, before, side="right")) - 1
    if position and start == tree.starts[run]:
        # The document before goes on with another token, or ends here.
        repeats = position < tree.depths[run - 1] + tree.starts[run] - tree.starts[run - 1]
    return Segment(
        start, stop, position, parent, _holders(tree.depths, run, position), bool(repeats)
    )


def _holders(depths: np.ndarray, run: int, position: int) -> tuple[int, ...]:
    """Return the documents that hold a position of `run`: itself, and those that go on from it."""
    behind = np.flatnonzero(depths[run + 1 :] <= position)
    return tuple(range(run, run + 1 + int(behind[0]) if len(behind) else len(depths)))


def levels_of(segments: Sequence[Segment]) -> list[int]:
    """Return how many segments stand before each in its documents."""
    levels: list[int] = []
    for segment in segments:
        levels.append(0 if segment.parent is None else levels[segment.parent] + 1)
    return levels
