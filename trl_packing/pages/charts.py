"""Charts as inline SVG: histograms in the colors of the page.

The page's style sheet gives the colors, so that a chart follows light and dark.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np

from trl_packing.pages.page import escape

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BOTTOM = 54, 8, 20, 42
_BASE = HEIGHT - _BOTTOM


@dataclass(frozen=True)
class Axis:
    """The x-axis from `low` to `high`, in one frame of fixed size."""

    low: float
    high: float
    is_log: bool = False

    def x(self, value: float) -> float:
        """Return the place of a value in pixels."""
        low, high = self.low, self.high
        if self.is_log:
            value, low, high = np.log(value), np.log(low), np.log(high)
        return float(_LEFT + (WIDTH - _LEFT - _RIGHT) * (value - low) / (high - low))

    def ticks(self) -> list[float]:
        """Return round numbers on the axis."""
        return log_ticks(self.low, self.high) if self.is_log else ticks(self.low, self.high)

    def drawn(self, label: str) -> list[str]:
        """Return the line, its ticks and its label."""
        parts = [f'<path d="M{_LEFT} {_BASE}H{WIDTH - _RIGHT}" stroke="var(--axis)"/>']
        for tick in self.ticks():
            x = self.x(tick)
            parts.append(f'<path d="M{x:.1f} {_BASE}v4" stroke="var(--axis)"/>')
            side = "end" if x > WIDTH - 20 else "middle"
            x = min(x, WIDTH - 1) if side == "end" else x
            parts.append(
                f'<text x="{x:.1f}" y="{_BASE + 17}" text-anchor="{side}">{short(tick)}</text>'
            )
        middle = (_LEFT + WIDTH - _RIGHT) / 2
        parts.append(
            f'<text x="{middle}" y="{HEIGHT - 6}" text-anchor="middle">{escape(label)}</text>'
        )
        return parts

    def mark(self, value: float | None) -> list[str]:
        """Return a dashed line at a value, with the value; nothing if it is not on the axis."""
        if value is None or not self.low <= value <= self.high:
            return []
        x = self.x(value)
        side = "end" if x > WIDTH / 2 else "start"
        return [
            f'<path d="M{x:.1f} {_TOP - 8}V{_BASE}" stroke="var(--red)" stroke-dasharray="4 3"/>',
            f'<text x="{x + (-5 if side == "end" else 5):.1f}" y="{_TOP - 4}" class="mark" '
            f'text-anchor="{side}">{value:,.6g}</text>',
        ]


def y_axis(
    high: float, low: float = 0.0, *, whole: bool = False
) -> tuple[list[str], Callable[[float], float]]:
    """Return gridlines with their values, and the function from a value to its pixels.

    Args:
        high: the highest value.
        low: the lowest value.
        whole: leave out ticks that are no whole numbers.
    """
    if high == low:
        low, high = (low - 0.5, high + 0.5) if low else (0.0, 1.0)

    def y(value: float) -> float:
        return float(_BASE - (_BASE - _TOP) * (value - low) / (high - low))

    parts = []
    for tick in ticks(low, high, most=4):
        if whole and tick % 1:
            continue
        if tick != 0 or low < 0:
            parts.append(
                f'<path d="M{_LEFT} {y(tick):.1f}H{WIDTH - _RIGHT}" stroke="var(--grid)"/>'
            )
        parts.append(
            f'<text x="{_LEFT - 6}" y="{y(tick) + 4:.1f}" text-anchor="end">{short(tick)}</text>'
        )
    return parts, y


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between `low` and `high`, at most `most` of them."""
    step = round_up((high - low) / most)
    first = np.ceil(low / step)
    found = [float(i * step) + 0.0 for i in np.arange(first, np.floor(high / step) + 1)]
    return found if len(found) <= most else ticks(low, high, most - 1)


def round_up(value: float, steps: Sequence[float] = (1, 2, 5, 10)) -> float:
    """Return the next number that is one of `steps` × 10ⁿ."""
    magnitude = 10.0 ** np.floor(np.log10(value))
    # The margin is for rounding errors: 0.30000000000000004 is a round 0.3.
    return next(float(s * magnitude) for s in steps if s * magnitude >= value * 0.999999)


def log_ticks(low: float, high: float) -> list[float]:
    """Return 1, 2, 5, 10, ... between `low` and `high`; fewer for each decade of a long axis."""
    decades = range(int(np.floor(np.log10(low))), int(np.ceil(np.log10(high))) + 1)
    found = [s * 10.0**d for d in decades for s in (1, 2, 5) if low <= s * 10.0**d <= high]
    return found if len(found) <= 9 else [t for t in found if f"{t:e}".startswith("1")]


def short(value: float) -> str:
    """Return a number in a few characters: 12k, 1.5M, 0.02."""
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.5g}"


# A histogram of positive values gets a logarithmic axis if most of them would share a few bars.
_LONG_TAIL = 16


def histogram(
    values: Sequence[float] | np.ndarray,
    *,
    label: str,
    counted: str = "",
    cut: float | None = None,
    color: str = "var(--blue)",
    bins: int = 32,
) -> str:
    """Return how often values occur.

    Values of which the largest is far above the median get a logarithmic axis.

    Args:
        values: finite numbers.
        label: of the x-axis.
        counted: name of the things that are counted, for the text of a bar: "documents".
        cut: a value marked by a dashed line, such as max_length. Values above it are red.
        color: of the bars, in CSS.
        bins: most bars. Integers in a narrow range get a bar each.
    """
    values = np.asarray(values)
    if not values.size:
        return '<p class="note">nothing to show</p>'
    edges, is_log = bar_edges(values, bins)
    x_axis = Axis(float(edges[0]), float(edges[-1]), is_log)
    counts = np.histogram(values, edges)[0]
    beyond = counts * 0 if cut is None else np.histogram(values[values > cut], edges)[0]
    axis, y = y_axis(float(counts.max()), whole=True)
    bars = []
    for left, right, count, red in zip(edges, edges[1:], counts, beyond, strict=False):
        x, end = x_axis.x(left), x_axis.x(right)
        width = max(end - x - 1, 0.5)
        tall = ((y(count), y(red), color), (y(red), y(0), "var(--red)"))
        for top, base, fill in (tall[:1] if not red else tall) if count else ():
            bars.append(
                f'<rect x="{x:.1f}" y="{top:.1f}" width="{width:.1f}" height="{base - top:.1f}" '
                f'fill="{fill}"><title>{escape(_range(left, right, values.dtype))}: {count:,} '
                f"{escape(counted)}</title></rect>"
            )
    return _svg([*axis, *bars, *x_axis.drawn(label), *x_axis.mark(cut)], label)


def bar_edges(values: np.ndarray, bins: int = 32) -> tuple[np.ndarray, bool]:
    """Return round edges of about `bins` bars, and whether they belong on a logarithmic axis."""
    is_log = bool(values.min() > 0 and values.max() > _LONG_TAIL * np.median(values))
    return _edges(values, bins, is_log), is_log


def _edges(values: np.ndarray, bins: int, is_log: bool) -> np.ndarray:
    """Return the edges; a bar holds its left edge."""
    low, high = float(values.min()), float(values.max())
    is_integer = np.issubdtype(values.dtype, np.integer)
    if is_log:
        edges = np.geomspace(low, high * 1.0001 + is_integer, bins + 1)
        return np.unique(np.round(edges)) if is_integer else edges
    if is_integer and high - low < bins:
        return np.arange(low, max(high, low + 6) + 2) - 0.5  # bars of one value are never broad
    width = round_up((high - low or 1) / (bins - 1), steps=(1, 2, 2.5, 4, 5, 10))
    width = np.ceil(width) if is_integer else width
    first = np.floor(low / width)
    last = np.floor(high / width) + 1 if is_integer else max(np.ceil(high / width), first + 1)
    return np.arange(first, last + 1) * width


def _range(left: float, right: float, dtype: np.dtype) -> str:
    if not np.issubdtype(dtype, np.integer):
        return f"{left:,.4g} to {right:,.4g}"
    first, last = int(np.ceil(left)), int(np.ceil(right)) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )
