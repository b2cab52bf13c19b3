"""Histograms as numbers that plan.html draws, in the pixels of its SVG."""

from collections.abc import Sequence
from dataclasses import dataclass
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


@dataclass(frozen=True)
class Axis:
    """Values from `low` to `high` on the pixels from `start` to `stop`."""

    low: float
    high: float
    start: float
    stop: float
    is_log: bool = False

    def pixel(self, value: float) -> float:
        """Return the place of `value`."""
        places = np.array([value, self.low, self.high], float)
        at, low, high = np.log(places) if self.is_log else places
        return float(self.start + (self.stop - self.start) * (at - low) / (high - low))


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
    counts = np.histogram(values, edges)[0]
    beyond = np.zeros_like(counts)
    if cut is not None:
        beyond = np.histogram(values[values > cut], edges)[0]
    across = Axis(float(edges[0]), float(edges[-1]), _LEFT, _RIGHT, is_log)
    up = Axis(0, float(counts.max()), _BASE, _TOP)
    bars = []
    for left, right, count, red in zip(edges[:-1], edges[1:], counts, beyond, strict=True):
        title = f"{_range(left, right, values.dtype)}: {count:,} {counted}"
        start = across.pixel(left)
        width = max(across.pixel(right) - start - 1, 0.5)
        top, base = up.pixel(count), up.pixel(red)
        if count > red:
            bars.append((start, top, width, base - top, color, title))
        if red > 0:
            bars.append((start, base, width, up.pixel(0) - base, "var(--red)", title))
    return {
        "label": label,
        "counts": [(up.pixel(n), short(n)) for n in ticks(0, up.high, most=4) if n % 1 == 0],
        "bars": bars,
        "ticks": _ticks_of(across),
        "mark": _mark(cut, across),
    }


def _ticks_of(axis: Axis) -> list[tuple[float, str, str]]:
    """Return place, alignment and words of the numbers below an axis."""
    found = []
    for number in (log_ticks if axis.is_log else ticks)(axis.low, axis.high):
        place = axis.pixel(number)
        found.append((place, "end" if place > WIDTH - 20 else "middle", short(number)))
    return found


def _mark(cut: float | None, axis: Axis) -> dict[str, Any] | None:
    """Return the line at `cut`, and the side of it on which its number stands."""
    if cut is None or not axis.low <= cut <= axis.high:
        return None
    place = axis.pixel(cut)
    if place > WIDTH / 2:
        return {"x": place, "text": f"{cut:,.6g}", "side": "end", "text_x": place - 5}
    return {"x": place, "text": f"{cut:,.6g}", "side": "start", "text_x": place + 5}


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
    first, last = int(np.floor(np.log10(low))), int(np.ceil(np.log10(high)))
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
