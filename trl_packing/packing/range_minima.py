"""Minima of ranges of an array, many ranges at once.

    values        5 2 7 3 | 6 1 8 4 | 9 2 5 6          blocks of 16 (here 4)
    first ones    5 2 2 2 | 6 1 1 1 | 9 2 2 2          minima from the start of each block
    last ones     2 2 3 3 | 1 1 4 4 | 2 2 5 6          minima up to the end of each block
    blocks        2         1         2                and of 2, 4, 8, ... blocks

A range in several blocks has four minima: of its part of the first block, of the last one, and two
overlapping powers of two of blocks between. Memory is linear: about 2 1/2 times the array.
"""

import numpy as np

_BLOCK = 16


class RangeMinima:
    """Answers minima of ranges of `values` ``(N,)`` integers.

    Examples:
        >>> RangeMinima(np.array([5, 2, 7, 3])).of(np.array([0, 2]), np.array([3, 3])).tolist()
        [2, 7]
    """

    def __init__(self, values: np.ndarray):
        self.values = values
        size = -(-len(values) // _BLOCK) * _BLOCK
        most = np.iinfo(values.dtype).max
        blocks = np.full(size, most, values.dtype)
        blocks[: len(values)] = values
        blocks = blocks.reshape(-1, _BLOCK)
        self._from_start = np.minimum.accumulate(blocks, axis=1).ravel()
        self._to_end = np.minimum.accumulate(blocks[:, ::-1], axis=1)[:, ::-1].ravel()
        self._levels = [blocks.min(1, initial=most)]
        while (width := 1 << (len(self._levels) - 1)) * 2 <= len(blocks):
            last = self._levels[-1]
            self._levels.append(np.minimum(last[:-width], last[width:]))

    def of(self, starts: np.ndarray, stops: np.ndarray) -> np.ndarray:
        """Return ``values[start:stop].min()`` of each range, none empty, ``(ranges,)``."""
        first, last = starts // _BLOCK, (stops - 1) // _BLOCK
        minima = np.minimum(self._to_end[starts], self._from_start[stops - 1])
        between = last - first - 1
        exponents = np.frexp(np.maximum(between, 1))[1] - 1
        for level in np.unique(exponents[between > 0]).tolist():
            at = np.flatnonzero((between > 0) & (exponents == level))
            table = self._levels[level]
            left, right = table[first[at] + 1], table[last[at] - (1 << level)]
            minima[at] = np.minimum(minima[at], np.minimum(left, right))
        inside = np.flatnonzero(first == last)  # those took too much of their block
        minima[inside] = self.values[starts[inside]]
        for step in range(1, _BLOCK):
            inside = inside[starts[inside] + step < stops[inside]]
            if not len(inside):
                break
            minima[inside] = np.minimum(minima[inside], self.values[starts[inside] + step])
        return minima
