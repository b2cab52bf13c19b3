"""Charts as inline SVG: histograms and lines in the colors of the page.

The page's style sheet gives the colors, so that a chart follows light and dark.
"""

from collections.abc import Sequence

import numpy as np

from trl_packing.pages.page import escape

_WIDTH, _HEIGHT, _LEFT, _BOTTOM, _TOP = 520, 190, 8, 34, 14


def histogram(
    values: Sequence[float] | np.ndarray,
    *,
    label: str,
    cut: float | None = None,
    color: str = "var(--blue)",
    bins: int = 32,
) -> str:
    """Return how often values occur.

    Args:
        values: finite numbers.
        label: of the x-axis.
        cut: a value marked by a dashed line, such as max_length.
        color: of the bars, in CSS.
        bins: most bars. Integers in a narrow range get a bar each.
    """
    values = np.asarray(values)
    if not values.size:
        return '<p class="note">nothing to show</p>'
    edges = _edges(values, bins)
    counts, edges = np.histogram(values, edges)
    width = (_WIDTH - 2 * _LEFT) / len(counts)
    room = _HEIGHT - _BOTTOM - _TOP
    bars = []
    for i, count in enumerate(counts.tolist()):
        height = room * count / counts.max()
        where = f"{edges[i]:,.5g} to {edges[i + 1]:,.5g}: {count:,}"
        bars.append(
            f'<rect x="{_LEFT + i * width:.2f}" y="{_TOP + room - height:.2f}" '
            f'width="{max(width - 1, 0.5):.2f}" height="{height:.2f}" fill="{color}">'
            f"<title>{escape(where)}</title></rect>"
        )
    low, high = float(edges[0]), float(edges[-1])
    return _svg([*bars, *_axis(low, high, label), *_cut(cut, low, high)], label)


def _edges(values: np.ndarray, bins: int) -> np.ndarray:
    low, high = values.min(), values.max()
    if np.issubdtype(values.dtype, np.integer) and high - low < bins:
        return np.arange(low, high + 2) - 0.5
    return np.linspace(low, high if high > low else low + 1, bins + 1)


def _position(value: float, low: float, high: float) -> float:
    return _LEFT + (_WIDTH - 2 * _LEFT) * (value - low) / (high - low)


def _axis(low: float, high: float, label: str) -> list[str]:
    base = _HEIGHT - _BOTTOM
    parts = [f'<path d="M{_LEFT} {base}H{_WIDTH - _LEFT}" stroke="var(--line)"/>']
    for tick in ticks(low, high):
        x = _position(tick, low, high)
        parts.append(f'<text x="{x:.1f}" y="{base + 14}" text-anchor="middle">{tick:,.6g}</text>')
    middle = _WIDTH / 2
    parts.append(
        f'<text x="{middle}" y="{_HEIGHT - 4}" text-anchor="middle">{escape(label)}</text>'
    )
    return parts


def ticks(low: float, high: float, most: int = 7) -> list[float]:
    """Return round numbers between `low` and `high`, at most `most` of them."""
    rough = (high - low) / most
    magnitude = 10.0 ** np.floor(np.log10(rough))
    step = next(float(s * magnitude) for s in (1, 2, 5, 10) if s * magnitude >= rough)
    first = np.ceil(low / step)
    return [float(i * step) + 0.0 for i in np.arange(first, np.floor(high / step) + 1)]


def _cut(cut: float | None, low: float, high: float) -> list[str]:
    if cut is None or not low <= cut <= high:
        return []
    x = _position(cut, low, high)
    base = _HEIGHT - _BOTTOM
    return [
        f'<path d="M{x:.1f} {_TOP - 4}V{base}" stroke="var(--red)" stroke-dasharray="4 3"/>',
        f'<text x="{x:.1f}" y="{_TOP - 5}" text-anchor="{"end" if x > _WIDTH / 2 else "start"}">'
        f"{cut:,.6g}</text>",
    ]


def _svg(parts: Sequence[str], title: str) -> str:
    return (
        f'<svg viewBox="0 0 {_WIDTH} {_HEIGHT}" role="img" aria-label="{escape(title)}">'
        + "".join(parts)
        + "</svg>"
    )
