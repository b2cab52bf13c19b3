"""Histograms as numbers that plan.html draws, in the pixels of its SVG."""

from collections.abc import Sequence
from typing import Any

import numpy as np

from trl_packing.pages.page import PageData

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
) -> PageData:
    """Return how often values occur, as numbers of a picture.

    Args:
        values: finite numbers, at least one.
        label: of the x-axis, which is logarithmic if the largest is far above the median.
        counted: name of the things that are counted: "documents", whose bars are blue.
        cut: a value marked by a dashed line. Values above it are red.
    """
    color = "var(--blue)" if counted == "documents" else "var(--green)"
    limit = np.inf if cut is None else cut
    is_log = bool(values.min() > 0 and values.max() > _LONG_TAIL * np.median(values))
    edges = _edges(values, is_log)
    counts = np.histogram(values, edges)[0]
    red_counts = np.histogram(values[values > limit], edges)[0]
    low = float(edges[0])
    high = float(edges[-1])
    most = float(counts.max())
    scale = np.log if is_log else np.asarray

    def across(numbers: Any) -> Any:
        return np.interp(scale(numbers), scale([low, high]), [_LEFT, _RIGHT]).tolist()

    def up(numbers: Any) -> Any:
        return np.interp(numbers, [0, most], [_BASE, _TOP]).tolist()

    places = across(edges)
    bars = []
    for i, (count, red) in enumerate(zip(counts, red_counts, strict=True)):
        title = f"{_range(edges[i], edges[i + 1], values.dtype)}: {count:,} {counted}"
        width = max(places[i + 1] - places[i] - 1, 0.5)
        for top, base, fill in ((count, red, color), (red, 0, "var(--red)")):
            if top > base:
                bars.append((places[i], up(top), width, up(base) - up(top), fill, title))
    ticks_across = []
    for number in log_ticks(low, high) if is_log else ticks(low, high):
        place = across(number)
        ticks_across.append((place, "end" if place > WIDTH - 20 else "middle", short(number)))
    mark = None
    if low <= limit <= high:
        place = across(limit)
        side, beside = ("end", -5) if place > WIDTH / 2 else ("start", 5)
        mark = {"x": place, "text": f"{limit:,.6g}", "side": side, "text_x": place + beside}
    return {
        "label": label,
        "counts": [(up(n), short(n)) for n in ticks(0, most, most=4) if n % 1 == 0],
        "bars": bars,
        "ticks": ticks_across,
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
    if is_integer:
        width = np.ceil(width)
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
    """Return 1, 2, 5, 10, ... between `low` and `high`; powers of 10 alone on a long axis."""
    first = int(np.floor(np.log10(low)))
    last = int(np.ceil(np.log10(high)))
    decades = [10.0**power for power in range(first, last + 1)]
    found = [step * decade for decade in decades for step in (1, 2, 5)]
    found = [number for number in found if low <= number <= high]
    return found if len(found) <= 9 else [number for number in found if number in decades]


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
