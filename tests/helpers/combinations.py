"""Parameters of a test, of which a few are fast and the others slow.

combined("ab", [1, 2, 3])      fast  a1 b2 a3      slow  a2 b1 b3      each value is in a fast one
fast("abc", "a")               fast  a             slow  b c
"""

from collections.abc import Collection, Iterable
from itertools import product
from typing import Any

import pytest


def combined(*values: Iterable[Any]) -> list[Any]:
    """Return a parameter for each combination of one value from each of `values`."""
    choices = [list(v) for v in values]
    longest = max(map(len, choices))
    quick = {tuple(i % len(c) for c in choices) for i in range(longest)}
    return [
        pytest.param(
            *(c[i] for c, i in zip(choices, at, strict=True)),
            marks=() if at in quick else pytest.mark.slow,
        )
        for at in product(*(range(len(c)) for c in choices))
    ]


def fast(values: Iterable[Any], quick: Collection[Any]) -> list[Any]:
    """Return a parameter for each of `values`; those that are not among `quick` are slow."""
    return [pytest.param(v, marks=() if v in quick else pytest.mark.slow) for v in values]
