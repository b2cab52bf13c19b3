"""Curves of what runs logged: over documents, tokens, steps or hours, of one run or of several.

records  →  charts_of_one, charts_of_several  →  values_of_curves  →  curves.html, curves.js
"""

import math
import re
from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.pages.record import UNKNOWN, Point, RunRecord

# Notes beside charts, and those behind the losses.
_NOTES = {
    "loss": "mean over trained tokens since the last log",
    "grad_norm": "before clipping",
    "tokens_per_second": "tokens of documents",
    "computed_tokens_per_second": "a token that documents share counts once",
    "utilization": "computed tokens of documents / room for tokens",
}
_MAIN = ("learning_rate", "grad_norm", "tokens_per_second", "utilization")
_SHARES = ("utilization", "mean_token_accuracy")
_MAY_BE_LOG = ("loss", "loss by source", "grad_norm", "learning_rate")
_EVAL_LOSS = re.compile(r"eval_(.+_)?loss(_.+)?")
# Counts and times of day are axes, or figures of the whole run.
_NO_CURVE = re.compile(
    r"epoch|step|num_tokens|num_input_tokens_seen|total_flos|train_(loss|runtime|.*seconds?|tokens|"
    r"trained_tokens|computed_tokens|documents|utilization|documents_per_step|peak_memory_gib)|"
    r"eval_(.*_)?(runtime|samples_per_second|steps_per_second|num_tokens|num_documents.*)"
)
_COUNT = "num_trained_tokens_"  # of a source, in the training log
_MOST_POINTS = 1000  # more than a wide screen has pixels for

ON_STEPS = (
    "The steps of a packed and of a padded run hold different numbers of documents. Compare such "
    "runs over documents or tokens."
)
# The name of an axis, its words, and its place in a point.
_AXES = {
    "documents": ("documents trained", 1),
    "tokens": ("tokens trained, without padding", 2),
    "steps": ("optimizer steps", 0),
    "hours": ("training time", 3),
}


class Chart(NamedTuple):
    """A frame with curves: name, number of its color, and points of each."""

    title: str
    curves: Sequence[tuple[str, int, Sequence[Point]]]

    @property
    def note(self) -> str:
        """What stands beside the title: what the curves are, and which values they leave out."""
        notes = [_NOTES.get(self.title, "")]
        notes += [_gaps(name, points) for name, _, points in self.curves]
        return " · ".join(filter(None, notes))

    def drawn(self) -> dict[str, Any]:
        """Return what curves.js draws."""
        curves = []
        for name, color, points in self.curves:
            shown = [_as_json(point) for point in thinned(points)]
            curves.append({"name": name, "color": color, "points": shown})
        return {
            "may_be_log": self.title in _MAY_BE_LOG or is_eval_loss(self.title),
            "percent": self.title in _SHARES,
            "curves": curves,
        }


def is_eval_loss(name: str) -> bool:
    """Return whether `name` is that of an evaluation loss, of a set or a source too."""
    return _EVAL_LOSS.fullmatch(name) is not None


def shown_names(records: Iterable[RunRecord]) -> tuple[dict[str, list[str]], list[str]]:
    """Return the logged names with curves: the main ones by kind, and those that a reader opens."""
    logged = dict.fromkeys(name for record in records for name in record.series)
    sources = [name.removeprefix(_COUNT) for name in logged if name.startswith(_COUNT)]
    hidden = set()
    for source in sources:
        for count in ("loss_", "num_documents_", "num_tokens_", _COUNT):
            hidden |= {f"{count}{source}", f"train_{count}{source}"}
    names = [name for name in logged if name not in hidden and not _NO_CURVE.fullmatch(name)]
    kinds = {"loss": ["loss"], "loss by source": [f"loss_{source}" for source in sources]}
    kinds["eval_loss"] = [name for name in names if is_eval_loss(name)]
    kinds |= {name: [name] for name in _MAIN}
    main = {}
    for kind, of_kind in kinds.items():
        hidden.update(of_kind)
        if known := [name for name in of_kind if name in logged]:
            main[kind] = known
    return main, [name for name in names if name not in hidden]


def charts_of_one(record: RunRecord) -> tuple[list[Chart], list[Chart]]:
    """Return the main charts of a run, one for each kind of number, and those of other names."""

    def chart(title: str, names: Iterable[str]) -> Chart:
        return Chart(title, [(n, color, record.points(n)) for color, n in enumerate(names)])

    main, rest = shown_names([record])
    charts = [chart(kind, names) for kind, names in main.items()]
    return charts, [chart(name, [name]) for name in rest]


def charts_of_several(records: Sequence[RunRecord]) -> tuple[list[Chart], list[Chart]]:
    """Return the main charts of runs and the others: one for each name, a curve for each run."""

    def chart(name: str) -> Chart:
        curves = [(run.name, color, run.points(name)) for color, run in enumerate(records)]
        return Chart(name, [curve for curve in curves if curve[-1]])

    main, rest = shown_names(records)
    charts = [chart(name) for names in main.values() for name in names]
    return charts, [chart(name) for name in rest]


def values_of_curves(records: Sequence[RunRecord], *, axis: str = "documents") -> dict[str, Any]:
    """Return what curves.html shows of runs, and with it, as `data`, what curves.js draws.

    A value that is NaN or infinite leaves a gap, marked on the x-axis. Long curves are thinned.
    `axis` is the first x-axis shown.
    """
    marks = []
    record, *others = records
    if others:
        main, rest = charts_of_several(records)
    else:
        main, rest = charts_of_one(record)
        for step in record.resumed:
            at = record.totals.get(step, UNKNOWN)
            place = step, at.documents, at.tokens, at.seconds
            marks.append((f"resumed at step {step:,}", place))
    charts = [*main, *rest]
    points = [point for chart in charts for *_, of_curve in chart.curves for point in of_curve]
    axes = []
    for name, (_, number) in _AXES.items():
        if any(point[number] is not None for point in points):
            axes.append(name)
    drawn = [chart.drawn() for chart in charts]
    data = {
        "axis": axis if axis in axes else next(iter(axes), "steps"),
        "labels": {name: words for name, (words, _) in _AXES.items()},
        "warnings": {"steps": ON_STEPS},
        "marks": marks,
        "reloads": not others and record.status == "running",
        "charts": drawn,
    }
    return {"axes": axes, "main": main, "rest": rest, "data": data}


def thinned(points: Sequence[Point], most: int = _MOST_POINTS) -> Sequence[Point]:
    """Return at most `most` points, an even number: the smallest and the largest of each stretch.

    Gaps are kept: NaN and infinity are the largest, or the smallest, values.
    """
    if len(points) <= most:
        return points
    values = np.array([point.value for point in points])
    kept = {0, len(points) - 1}
    for stretch in np.array_split(np.arange(len(points)), most // 2 - 1):
        order = stretch[np.argsort(values[stretch])]
        kept |= {int(order[0]), int(order[-1])}
    return [points[at] for at in sorted(kept)]


def _as_json(point: Point) -> list[float | None]:
    *place, value = point
    return [*place, float(f"{value:.7g}") if math.isfinite(value) else None]


def _gaps(name: str, points: Sequence[Point]) -> str:
    """Return in words which values of a curve are left out; "" if none is."""
    lost = [point.step for point in points if not math.isfinite(point.value)]
    values = quantity(len(lost), "value")
    return f"{values} of {name} NaN or infinite, left out (from step {lost[0]:,})" if lost else ""
