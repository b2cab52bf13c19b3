"""Histograms as inline SVG, in the colors of the page.

The page's style sheet gives the colors, so that a chart follows light and dark.
"""

from collections.abc import Iterator, Sequence

import numpy as np

from trl_packing.training.page import escape

WIDTH, HEIGHT = 520, 220
_LEFT, _RIGHT, _TOP, _BASE = 54, WIDTH - 8, 20, HEIGHT - 42

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
    is_log = bool(values.min() > 0 and values.max() > _LONG_TAIL * np.median(values))
    edges = _edges(values, bins, is_log)
    low, high = float(edges[0]), float(edges[-1])
    ends = np.log([low, high]) if is_log else np.array([low, high])

    def x(value: float) -> float:
        share = ((np.log(value) if is_log else value) - ends[0]) / (ends[1] - ends[0])
        return float(_LEFT + (_RIGHT - _LEFT) * share)

    counts = np.histogram(values, edges)[0]
    beyond = counts * 0 if cut is None else np.histogram(values[values > cut], edges)[0]

    def y(count: float) -> float:
        return float(_BASE - (_BASE - _TOP) * count / counts.max())

    parts = []
    for tick in ticks(0, counts.max(), most=4):
        if tick % 1:
            continue
        if tick:
            parts.append(f'<path d="M{_LEFT} {y(tick):.1f}H{_RIGHT}" stroke="var(--grid)"/>')
        parts.append(_text(short(tick), _LEFT - 6, f"{y(tick) + 4:.1f}", "end"))
    for left, right, count, red in zip(edges, edges[1:], counts, beyond, strict=False):
        title = f"{escape(_range(left, right, values.dtype))}: {count:,} {escape(counted)}"
        width = max(x(right) - x(left) - 1, 0.5)
        for top, base, fill in ((count, red, color), (red, 0, "var(--red)")):
            if top > base:
                parts.append(
                    f'<rect x="{x(left):.1f}" y="{y(top):.1f}" width="{width:.1f}" '
                    f'height="{y(base) - y(top):.1f}" fill="{fill}"><title>{title}</title></rect>'
                )
    parts.append(f'<path d="M{_LEFT} {_BASE}H{_RIGHT}" stroke="var(--axis)"/>')
    for tick in log_ticks(low, high) if is_log else ticks(low, high):
        parts.append(f'<path d="M{x(tick):.1f} {_BASE}v4" stroke="var(--axis)"/>')
        side = "end" if x(tick) > WIDTH - 20 else "middle"
        at = min(x(tick), WIDTH - 1) if side == "end" else x(tick)
        parts.append(_text(short(tick), f"{at:.1f}", _BASE + 17, side))
    parts.append(_text(escape(label), (_LEFT + _RIGHT) / 2, HEIGHT - 6, "middle"))
    if cut is not None and low <= cut <= high:
        parts += _mark(cut, x(cut))
    head = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{escape(label)}">'
    return head + "".join(parts) + "</svg>"


def _mark(value: float, x: float) -> Iterator[str]:
    """Yield a dashed line at a value, and the value."""
    line = f'd="M{x:.1f} {_TOP - 8}V{_BASE}" stroke="var(--red)" stroke-dasharray="4 3"'
    side, at = ("end", x - 5) if x > WIDTH / 2 else ("start", x + 5)
    yield f"<path {line}/>"
    yield _text(f"{value:,.6g}", f"{at:.1f}", _TOP - 4, side, ' class="mark"')


def _text(text: str, x: object, y: object, side: str, more: str = "") -> str:
    return f'<text x="{x}" y="{y}"{more} text-anchor="{side}">{text}</text>'


def _edges(values: np.ndarray, bins: int, is_log: bool) -> np.ndarray:
    """Return round edges of about `bins` bars; a bar holds its left edge."""
    low, high = float(values.min()), float(values.max())
    is_integer = np.issubdtype(values.dtype, np.integer)
    if is_log:
        edges = np.geomspace(low, high * 1.0001 + is_integer, bins + 1)
        return np.unique(np.round(edges)) if is_integer else edges
    if is_integer and high - low < bins:
        return np.arange(low, max(high, low + 6) + 2) - 0.5  # bars of one value are never broad
    width = _round_up((high - low or 1) / (bins - 1), steps=(1, 2, 2.5, 4, 5, 10))
    width = np.ceil(width) if is_integer else width
    first = np.floor(low / width)
    last = np.floor(high / width) + 1 if is_integer else max(np.ceil(high / width), first + 1)
    return np.arange(first, last + 1) * width


def _range(left: float, right: float, dtype: np.dtype) -> str:
    if not np.issubdtype(dtype, np.integer):
        return f"{left:,.4g} to {right:,.4g}"
    first, last = int(np.ceil(left)), int(np.ceil(right)) - 1
    return f"{first:,}" if first == last else f"{first:,} to {last:,}"


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between `low` and `high`, at most `most` of them."""
    step = _round_up((high - low) / most)
    first = np.ceil(low / step)
    found = [float(i * step) + 0.0 for i in np.arange(first, np.floor(high / step) + 1)]
    return found if len(found) <= most else ticks(low, high, most - 1)


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
    for size, letter in ((1e9, "G"), (1e6, "M"), (1e4, "k")):
        if abs(value) >= size:
            return f"{value / (1e3 if letter == 'k' else size):,.4g}{letter}"
    return f"{value:,.5g}"
