"""Charts as inline SVG: histograms in the colors of the page.

The page's style sheet gives the colors, so that a chart follows light and dark.
"""

from collections.abc import Sequence

import numpy as np

from trl_packing.pages.axes import HEIGHT, WIDTH, Axis, round_up, y_axis
from trl_packing.pages.page import escape

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
