"""The page of a run, `run.html`: curves of what it logged, over documents, tokens, steps or hours.

record  →  charts_of  →  values_of_curves  →  run_page: run.html, curves.html, curves.js
"""

import json
import math
import re
from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.pages.page import HtmlPage, PageData, render
from trl_packing.pages.record import Point, RunRecord

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
# An evaluation loss, of a set or a source too.
_EVAL_LOSS = re.compile(r"eval_(.+_)?loss(_.+)?")
# Counts and times of day are axes, or figures of the whole run.
_NO_CURVE = re.compile(
    r"epoch|step|num_tokens|num_input_tokens_seen|total_flos|train_(loss|runtime|.*seconds?|tokens|"
    r"trained_tokens|computed_tokens|documents|utilization|documents_per_step|peak_memory_gib)|"
    r"eval_(.*_)?(runtime|samples_per_second|steps_per_second|num_tokens|num_documents.*)"
)
_COUNT = "num_trained_tokens_"  # of a source, in the training log
_MOST_POINTS = 1000  # more than a wide screen has pixels for

_ON_STEPS = (
    "The steps of a packed and of a padded run hold different numbers of documents. Compare such "
    "runs over documents or tokens."
)
# The name of an axis, its words, and the field of a point.
_AXES = {
    "documents": ("documents trained", "documents"),
    "tokens": ("tokens trained, without padding", "tokens"),
    "steps": ("optimizer steps", "step"),
    "hours": ("training time", "seconds"),
}


def run_page(record: RunRecord) -> HtmlPage:
    """Return the page of a run, the text of a file that opens from disk."""
    shown = values_of_curves(record)
    notes = record.notes
    if record.trl_path:
        notes = [f"{record.path}: {record.trl_path}. Documents are not counted there.", *notes]
    settings = []
    for name in record.changed:
        value = record.settings.get(name)
        if not isinstance(value, str):
            value = json.dumps(value, ensure_ascii=False)
        settings.append((name, value))
    return render(
        "run.html",
        title=f"Run · {record.name}",
        record=record,
        notes=notes,
        shown=shown,
        settings=settings,
        versions=[*record.facts.items(), *record.versions.items()],
        data=shown["data"],
        script="curves.js",
    )


class Chart(NamedTuple):
    """A frame with curves: the points of each by its name."""

    title: str
    curves: dict[str, list[Point]]

    @property
    def note(self) -> str:
        """What stands beside the title: what the curves are, and which values they leave out."""
        notes = [_NOTES.get(self.title, "")]
        for name, points in self.curves.items():
            lost = [point.step for point in points if not math.isfinite(point.value)]
            if lost:
                values = f"{quantity(len(lost), 'value')} of {name}"
                notes.append(f"{values} NaN or infinite, left out (from step {lost[0]:,})")
        return " · ".join(filter(None, notes))

    def drawn(self) -> PageData:
        """Return what curves.js draws."""
        curves = []
        for color, (name, points) in enumerate(self.curves.items()):
            shown = []
            for *place, value in thinned(points):
                shown.append([*place, float(f"{value:.7g}") if math.isfinite(value) else None])
            curves.append({"name": name, "color": color, "points": shown})
        return {
            "may_be_log": self.title in _MAY_BE_LOG or bool(_EVAL_LOSS.fullmatch(self.title)),
            "percent": self.title in _SHARES,
            "curves": curves,
        }


def charts_of(record: RunRecord) -> tuple[list[Chart], list[Chart]]:
    """Return the main charts of a run, one for each kind of number, and those of other names."""
    series = record.series
    sources = [name.removeprefix(_COUNT) for name in series if name.startswith(_COUNT)]
    hidden = set()
    for source in sources:
        for count in ("loss_", "num_documents_", "num_tokens_", _COUNT):
            hidden |= {f"{count}{source}", f"train_{count}{source}"}
    names = [name for name in series if name not in hidden and not _NO_CURVE.fullmatch(name)]
    kinds = {"loss": ["loss"], "loss by source": [f"loss_{source}" for source in sources]}
    kinds["eval_loss"] = [name for name in names if _EVAL_LOSS.fullmatch(name)]
    kinds |= {name: [name] for name in _MAIN}
    main = []
    for kind, of_kind in kinds.items():
        hidden.update(of_kind)
        curves = {name: series[name] for name in of_kind if name in series}
        if curves:
            main.append(Chart(kind, curves))
    rest = [name for name in names if name not in hidden]
    return main, [Chart(name, {name: series[name]}) for name in rest]


def values_of_curves(record: RunRecord) -> PageData:
    """Return what curves.html shows of a run, and with it, as `data`, what curves.js draws.

    A value that is NaN or infinite leaves a gap, marked on the x-axis. Long curves are thinned.
    """
    main, rest = charts_of(record)
    charts = [*main, *rest]
    points = [point for chart in charts for curve in chart.curves.values() for point in curve]
    axes, labels = [], {}
    for name, (label, place) in _AXES.items():
        labels[name] = label
        if any(getattr(point, place) is not None for point in points):
            axes.append(name)
    drawn = [chart.drawn() for chart in charts]
    data = {
        "axis": axes[0] if axes else "steps",
        "labels": labels,
        "warnings": {"steps": _ON_STEPS},
        "marks": [(f"resumed at step {step:,}", record.place(step)) for step in record.resumed],
        "reloads": record.status == "running",
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
