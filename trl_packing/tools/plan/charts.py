"""Histograms as numbers that plan.html draws, in the pixels of its SVG."""

from collections.abc import Sequence
from typing import Any

import numpy as np

WIDTH, HEIGHT = 520, 220
_LEFT = 54
_RIGHT = WIDTH - 8
_TOP = 20
_BASE = HEIGHT - 42

_MOST_BARS = 32
# A histogram of positive values gets a logarithmic axis if most of them would share a few bars.
_LONG_TAIL = 16


def histogram(
    values: np.ndarray, *, label: str, counted: str = "", cut: float | None = None
) -> dict[str, Any]:
    """Return how often values occur, as numbers of a picture.

    Args:
        values: finite numbers, at least one.
        label: of the x-axis, which is logarithmic if the largest is far above the median.
        counted: name of the things that are counted: "documents", whose bars are blue.
        cut: a value marked by a dashed line. Values above it are red.
    """
    color = "var(--blue)" if counted == "documents" else "var(--green)"
    is_log = bool(values.min() > 0 and values.max() > _LONG_TAIL * np.median(values))
    edges = _edges(values, is_log)
    low, high = float(edges[0]), float(edges[-1])
    counts = np.histogram(values, edges)[0]
    beyond = counts * 0 if cut is None else np.histogram(values[values > cut], edges)[0]

    def x(value: float) -> float:
        at, first, last = np.log([value, low, high]) if is_log else (value, low, high)
        return float(_LEFT + (_RIGHT - _LEFT) * (at - first) / (last - first))

    def y(count: float) -> float:
        return float(_BASE - (_BASE - _TOP) * count / counts.max())

    bars = []
    for left, right, count, red in zip(edges, edges[1:], counts, beyond, strict=False):
        title = f"{_range(left, right, values.dtype)}: {count:,} {counted}"
        width = max(x(right) - x(left) - 1, 0.5)
        for top, base, fill in ((count, red, color), (red, 0, "var(--red)")):
            if top > base:
                bars.append((x(left), y(top), width, y(base) - y(top), fill, title))
    places = log_ticks(low, high) if is_log else ticks(low, high)
    mark = None
    if cut is not None and low <= cut <= high:
        side, beside = ("end", -5) if x(cut) > WIDTH / 2 else ("start", 5)
        mark = {"x": x(cut), "text": f"{cut:,.6g}", "side": side, "text_x": x(cut) + beside}
    return {
        "label": label,
        "counts": [(y(n), short(n)) for n in ticks(0, counts.max(), most=4) if n % 1 == 0],
        "bars": bars,
        "ticks": [(x(n), "end" if x(n) > WIDTH - 20 else "middle", short(n)) for n in places],
        "mark": mark,
    }


def _edges(values: np.ndarray, is_log: bool) -> np.ndarray:
    """Return round edges of the bars; a bar holds its left edge."""
    low, high = float(values.min()), float(values.max())
    is_integer = np.issubdtype(values.dtype, np.integer)
    if is_log:
        edges = np.geomspace(low, high * 1.0001 + is_integer, _MOST_BARS + 1)
        return np.unique(np.round(edges)) if is_integer else edges
    if is_integer and high - low < _MOST_BARS:
        return np.arange(low, max(high, low + 6) + 2) - 0.5  # bars of one value are never broad
    width = _round_up((high - low or 1) / (_MOST_BARS - 1), steps=(1, 2, 2.5, 4, 5, 10))
    width = np.ceil(width) if is_integer else width
    first = np.floor(low / width)
    last = np.floor(high / width) + 1 if is_integer else max(np.ceil(high / width), first + 1)
    return np.arange(first, last + 1) * width


def _range(left: float, right: float, dtype: np.dtype) -> str:
    if not np.issubdtype(dtype, np.integer):
        return f"{left:,.4g} to {right:,.4g}"
    first = int(np.ceil(left))
    last = int(np.ceil(right)) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between `low` and `high`, at most `most` of them."""
    step = _round_up((high - low) / most)
    found = np.arange(np.ceil(low / step), np.floor(high / step) + 1) * step + 0.0
    return found.tolist() if len(found) <= most else ticks(low, high, most - 1)


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... between `low` and `high`; fewer for each decade of a long axis."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found = [s * 10.0**d for d in decades for s in (1, 2, 5) if low <= s * 10.0**d <= high]
    return found if len(found) <= 9 else [t for t in found if f"{t:e}".startswith("1")]


def _round_up(value: float, steps: Sequence[float] = (1, 2, 5, 10)) -> float:
    """Return the next number that is one of `steps` × 10ⁿ."""
    magnitude = 10.0 ** np.floor(np.log10(value))
    # The margin is for rounding errors: 0.30000000000000004 is a round 0.3.
    return next(float(s * magnitude) for s in steps if s * magnitude >= value * 0.999999)


def short(value: float) -> str:
    """Return a number in a few characters: 12k, 1.5M, 0.02."""
    if value < 1e4:
        return f"{value:,.5g}"
    return f"{value / 1e6:,.4g}M" if value >= 1e6 else f"{value / 1e3:,.4g}k"
