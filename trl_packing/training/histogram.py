"""`Histogram`: how often whole numbers occur, in a few counts."""

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Histogram:
    """Counts of whole numbers: ``counts[i]`` of them lie in ``[edges[i], edges[i + 1])``.

    Attributes:
        edges: rising whole numbers, one more than counts.
        counts: as many as bars.

    Examples:
        >>> Histogram.of(np.array([3, 1, 3, 8]), bars=4)
        Histogram(edges=(1, 3, 5, 7, 9), counts=(1, 2, 0, 1))
    """

    edges: tuple[int, ...]
    counts: tuple[int, ...]

    @classmethod
    def of(cls, values: np.ndarray, bars: int = 32) -> "Histogram":
        """Return the histogram of `values`, non-negative whole numbers, in at most `bars` bars."""
        low, high = int(values.min()), int(values.max())
        width = -(-(high - low + 1) // bars)
        counts = np.bincount((values - low) // width)
        edges = low + width * np.arange(len(counts) + 1)
        return cls(tuple(edges.tolist()), tuple(counts.tolist()))
