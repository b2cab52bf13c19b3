"""Interactive curves: charts with a common x-axis that the reader chooses.

    Curve      points (steps, documents, tokens, seconds, value) of one name
    Chart      curves in one frame
    Curves     charts  →  HTML of controls and frames, data for curves.js, which draws them

A value that is NaN or infinite leaves a gap, marked on the x-axis. Long curves are thinned.
"""

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from trl_packing.training.page import asset, escape, section

_ON_AXES = (
    "over documents or tokens, packed and padded runs can be compared; over steps, they cannot"
)

_CONTROLS = """\
<div class="controls"><fieldset id="axes"><legend>over</legend>{axes}</fieldset>\
<label>smoothing <input type="range" id="smooth" min="0" max="0.99" step="0.01" value="0"></label>\
<label><input type="checkbox" id="log"> logarithmic loss</label>{reload}</div>\
<p id="warning" class="warning" hidden></p>\
<noscript><p>The curves are drawn by a script of this page.</p></noscript>"""
_RELOAD = '<label><input type="checkbox" id="reload"> reload every 30 s</label>'

# Most points of a curve: more than a wide screen has pixels for.
MOST_POINTS = 1000

AXES = {
    "documents": "documents trained",
    "tokens": "tokens trained, without padding",
    "steps": "optimizer steps",
    "hours": "training time",
}
_PLACE = {"steps": 0, "documents": 1, "tokens": 2, "hours": 3}

# optimizer steps, documents, tokens, seconds, value; None: unknown
Values = tuple[int | None, int | None, int | None, float | None, float]


@dataclass(frozen=True)
class Curve:
    """A line of a chart.

    Attributes:
        name: shown in the legend.
        points: in the order in which they are joined.
        color: number of its color.
    """

    name: str
    points: Sequence[Values]
    color: int = 0


@dataclass(frozen=True)
class Chart:
    """A frame with curves.

    Attributes:
        title: above the frame.
        curves: lines of the frame.
        note: beside the title.
        may_be_log: whether the reader may choose a logarithmic y-axis for it.
        percent: whether values are shares, shown in percent.
    """

    title: str
    curves: Sequence[Curve]
    note: str = ""
    may_be_log: bool = False
    percent: bool = False


@dataclass(frozen=True)
class Curves:
    """Charts with a common x-axis.

    Attributes:
        charts: in their order on the page.
        axis: the first x-axis shown.
        marks: vertical lines: a label, and the place on each axis as in `Values`.
        warnings: text that is shown for an axis.
        reloads: whether the page loads itself again from time to time, as a run is training.
    """

    charts: Sequence[Chart]
    axis: str = "steps"
    marks: Sequence[tuple[str, Sequence[float | None]]] = ()
    warnings: dict[str, str] = field(default_factory=dict)
    reloads: bool = False

    def axes(self) -> list[str]:
        """Return the x-axes on which at least one point is known."""
        points = [p for chart in self.charts for curve in chart.curves for p in curve.points]
        return [name for name in AXES if any(p[_PLACE[name]] is not None for p in points)]

    def sections(self, *, main: int) -> list[str]:
        """Return HTML: controls and the first `main` charts, then the others, folded."""
        axes = self.axes()
        if not axes:
            return [section("Curves", '<p class="note">nothing is logged yet</p>')]
        radios = "".join(
            f'<label><input type="radio" name="axis" value="{name}"><span>{name}</span></label>'
            for name in axes
        )
        controls = _CONTROLS.format(axes=radios, reload=_RELOAD if self.reloads else "")
        frames = [_frame(place, chart) for place, chart in enumerate(self.charts)]
        first, rest = ("".join(part) for part in (frames[:main], frames[main:]))
        shown = f'<div class="charts">{first}</div>' if first else ""
        folded = f'<summary>Other logged numbers</summary><div class="charts">{rest}</div>'
        folded = f"<details>{folded}</details>" if rest else ""
        return [
            f"<style>\n{asset('curves.css')}</style>",
            section("Curves", controls, shown, folded, note=_ON_AXES),
        ]

    def data(self) -> dict[str, Any]:
        """Return what curves.js draws."""
        axes = self.axes()
        return {
            "axis": self.axis if self.axis in axes else next(iter(axes), "steps"),
            "labels": AXES,
            "warnings": self.warnings,
            "marks": [[label, list(place)] for label, place in self.marks],
            "reloads": self.reloads,
            "charts": [
                {
                    "may_be_log": chart.may_be_log,
                    "percent": chart.percent,
                    "curves": [
                        {"name": c.name, "color": c.color, "points": _as_json(thinned(c.points))}
                        for c in chart.curves
                    ],
                }
                for chart in self.charts
            ],
        }


def _frame(place: int, chart: Chart) -> str:
    note = " · ".join(filter(None, [chart.note, *map(_gaps, chart.curves)]))
    return (
        f'<figure class="chart" data-chart="{place}"><figcaption>{escape(chart.title)} '
        f'<span class="note">{escape(note)}</span></figcaption></figure>'
    )


def thinned(points: Sequence[Values], most: int = MOST_POINTS) -> list[Values]:
    """Return at most `most` points; the smallest and the largest of each stretch are kept.

    Args:
        points: in the order of the run. Gaps (NaN, infinity) are kept before anything else.
        most: an even number.
    """
    if len(points) <= most:
        return list(points)
    kept: set[int] = {0, len(points) - 1}
    stretches = most // 2 - 1
    for i in range(stretches):
        stretch = range(len(points) * i // stretches, len(points) * (i + 1) // stretches)
        gaps = [j for j in stretch if not math.isfinite(points[j][4])]
        finite = [j for j in stretch if math.isfinite(points[j][4])]
        ends = [choose(finite, key=lambda j: points[j][4]) for choose in (min, max) if finite]
        kept.update((gaps[:1] + ends)[:2])
    return [points[j] for j in sorted(kept)]


def _as_json(points: Sequence[Values]) -> list[list[float | None]]:
    return [
        [*place, float(f"{value:.7g}") if math.isfinite(value) else None]
        for *place, value in points
    ]


def _gaps(curve: Curve) -> str:
    """Return in words which values of a curve are left out; "" if none is."""
    lost = [p for p in curve.points if not math.isfinite(p[4])]
    if not lost:
        return ""
    steps = ", ".join(f"{p[0]:,}" for p in lost[:5]) + ", …" * (len(lost) > 5)
    word = "value of" if len(lost) == 1 else "values of"
    return f"{len(lost):,} {word} {curve.name} NaN or infinite, left out (step {steps})"
