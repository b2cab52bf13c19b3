"""Charts as inline SVG: histograms and lines in the colors of the page.

The page's style sheet gives the colors, so that a chart follows light and dark.
"""

from collections.abc import Callable, Iterable, Mapping, Sequence

import numpy as np

from trl_packing.pages.axes import HEIGHT, WIDTH, Axis, round_up, y_axis
from trl_packing.pages.page import escape

# A histogram of positive values gets a logarithmic axis if most of them would share a few bars.
_LONG_TAIL = 16

_MOST_POINTS = 600  # of a line; the page stays small and the curve looks the same


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


def lines(
    series: Mapping[str, tuple[Sequence[float], Sequence[float]]],
    *,
    x_label: str,
    y_label: str = "",
    from_zero: bool = False,
) -> str:
    """Return curves in one frame, with a legend if they are more than one.

    Args:
        series: name -> x and y of its points, ascending in x. Points that are not finite are gaps.
        x_label: of the x-axis.
        y_label: name of the chart, for readers that do not see it.
        from_zero: start the y-axis at 0.
    """
    points = {name: _thinned(*map(np.asarray, xy)) for name, xy in series.items()}
    xs, ys = (np.concatenate([np.zeros(0), *(p[i] for p in points.values())]) for i in (0, 1))
    seen = np.isfinite(xs) & np.isfinite(ys)
    if not seen.any():
        return '<p class="note">nothing to show</p>'
    xs, ys = xs[seen], ys[seen]
    x_axis = Axis(float(xs.min()), float(xs.max()) if np.ptp(xs) else float(xs.min()) + 1)
    axis, y = y_axis(float(ys.max()), 0.0 if from_zero else float(ys.min()))
    curves = [
        f'<path d="{_path(px, py, x_axis, y)}" fill="none" stroke="{series_color(i)}" '
        f'stroke-width="1.6" stroke-linejoin="round"><title>{escape(name)}</title></path>'
        for i, (name, (px, py)) in enumerate(points.items())
    ]
    chart = _svg([*axis, *curves, *x_axis.drawn(x_label)], y_label or x_label)
    return legend(points) * (len(points) > 1) + chart


def legend(names: Iterable[str]) -> str:
    """Return names beside their colors, in the order of `series_color`."""
    items = (
        f'<span><i style="background:{series_color(i)}"></i>{escape(name)}</span>'
        for i, name in enumerate(names)
    )
    return f'<p class="legend">{"".join(items)}</p>'


def series_color(index: int) -> str:
    """Return the color of a series in CSS; six differ."""
    return f"var(--series-{index % 6})"


def _thinned(x: np.ndarray, y: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return at most `_MOST_POINTS` points, the first and the last among them."""
    if len(x) <= _MOST_POINTS:
        return x.astype(float), y.astype(float)
    at = np.unique(np.linspace(0, len(x) - 1, _MOST_POINTS).round().astype(int))
    return x[at].astype(float), y[at].astype(float)


def _path(x: np.ndarray, y: np.ndarray, x_axis: Axis, height: Callable[[float], float]) -> str:
    parts, pen = [], "M"
    for px, py in zip(x.tolist(), y.tolist(), strict=True):
        if not (np.isfinite(px) and np.isfinite(py)):
            pen = "M"
            continue
        parts.append(f"{pen}{x_axis.x(px):.1f} {height(py):.1f}")
        pen = "L"
    if len(parts) == 1:  # a lone point is drawn as a short line
        parts.append("h2")
    return "".join(parts)


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
