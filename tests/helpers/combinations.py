"""All combinations of values as parameters of a test: a few are fast, the others are slow.

    combined("ab", [1, 2, 3])      fast  a1 b2 a3      slow  a2 b1 b3

Each value is in one fast combination at least.
"""

from collections.abc import Iterable
from itertools import product
from typing import Any

import pytest


def combined(*values: Iterable[Any]) -> list[Any]:
    """Return a parameter for each combination of one value from each of `values`."""
    choices = [list(v) for v in values]
    longest = max(map(len, choices))
    fast = {tuple(i % len(c) for c in choices) for i in range(longest)}
    return [
        pytest.param(
            *(c[i] for c, i in zip(choices, at, strict=True)),
            marks=() if at in fast else pytest.mark.slow,
        )
        for at in product(*(range(len(c)) for c in choices))
    ]
