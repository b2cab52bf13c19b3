"""The record of a run, `run.json`, and its page, `run.html`: curves, report, settings, versions.

    log        entries of `state.log_history`, unchanged
    totals     what was trained up to an optimizer step      {200: Totals(documents=1612, ...)}

    records  →  charts_of  →  values_of_curves  →  curves.html, curves.js     (one run, or more)

JSON has no NaN and no infinity, so they are stored as texts: "NaN", "Infinity".
"""

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.pages.page import HtmlPage, render, storable

FILE, PAGE = "run.json", "run.html"

_FORMAT = 1


class Totals(NamedTuple):
    """What was trained up to an optimizer step, by all ranks; None: unknown.

    `tokens` are without padding, `computed_tokens` with it, `seconds` without evaluations.
    """

    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    computed_tokens: int | None = None
    seconds: float | None = None


NOTHING = Totals(0, 0, 0, 0, 0.0)
UNKNOWN = Totals()


class Point(NamedTuple):
    """A logged number, and what was trained when it was logged; None: unknown."""

    step: int
    documents: int | None
    tokens: int | None
    seconds: float | None
    value: float


@dataclass
class RunRecord:
    """A run as far as it was trained.

    Attributes:
        name: the output folder, or the name that the user gave the run.
        path: "packed", "padding-free" or "TRL's path"; `trl_path` is the reason for that.
        log: entries of `state.log_history`.
        totals: by optimizer step.
        status: "running", "finished", or the reason why the run stopped.
        step: optimizer steps so far; `max_steps` of the whole run, 0: unknown.
        written: time of the last change, in UTC.
        report: lines of the packing report; empty on TRL's path.
        verdict: of the isolation check: "isolated", "leaks", ...; "" without a report.
        settings: all settings, as JSON; `changed` names those that differ from their defaults.
        facts: model, device and number of ranks, in words.
        resumed: steps at which the run was resumed.
        notes: sentences about what is unknown.
    """

    name: str
    path: str = ""
    trl_path: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[int, Totals] = field(default_factory=dict)
    status: str = "running"
    step: int = 0
    max_steps: int = 0
    written: str = ""
    report: list[Any] = field(default_factory=list)
    verdict: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def series(self) -> dict[str, list[Point]]:
        """The logged numbers by name, in the order of the log."""
        found: dict[str, list[Point]] = {}
        for entry in self.log:
            if is_number(step := entry.get("step")):
                at = self.totals.get(int(step), UNKNOWN)
                place = int(step), at.documents, at.tokens, at.seconds
                for name, value in entry.items():
                    if is_number(value):
                        found.setdefault(name, []).append(Point(*place, float(value)))
        return found

    def points(self, name: str) -> list[Point]:
        """Return the logged numbers of this name, in the order of the log."""
        return self.series.get(name, [])

    def last(self, name: str) -> float | None:
        """Return the last logged number of this name; None if there is none."""
        return self.series[name][-1].value if name in self.series else None

    @property
    def total(self) -> Totals:
        """The totals that the run has trained."""
        return self.totals.get(self.step, UNKNOWN)

    def to_json(self) -> str:
        """Return the record as JSON."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(storable({"format": _FORMAT, **plain}), allow_nan=False)

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read the record that `to_json` has written to `path`; ValueError: it holds none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != _FORMAT:
                raise ValueError("written by another version of trl_packing")
            found["totals"] = {int(s): Totals(*t) for s, t in found["totals"].items()}
            texts = ("NaN", "Infinity", "-Infinity")
            found["log"] = [
                {n: float(v) if v in texts else v for n, v in entry.items()}
                for entry in found["log"]
            ]
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"not the record of a run ({problem!r})") from problem


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a logged value is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


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
    note: str = ""
    may_be_log: bool = False
    percent: bool = False


def is_eval_loss(name: str) -> bool:
    """Return whether `name` is that of an evaluation loss, of a set or a source too."""
    return _EVAL_LOSS.fullmatch(name) is not None


def charts_of(records: Sequence[RunRecord]) -> tuple[list[Chart], int]:
    """Return the charts of the numbers that runs logged, and how many of the first are main ones.

    A single run has a chart a kind (loss, losses by source, ...), several runs have one a name.
    """
    logged = dict.fromkeys(name for record in records for name in record.series)
    sources = [name.removeprefix(_COUNT) for name in logged if name.startswith(_COUNT)]
    counts = ("loss_", "num_documents_", "num_tokens_", _COUNT)
    of_sources = {f"{count}{source}" for count in counts for source in sources}
    of_sources |= {f"train_{name}" for name in of_sources}
    names = [name for name in logged if name not in of_sources and not _NO_CURVE.fullmatch(name)]
    losses = [name for name in names if is_eval_loss(name)]
    groups = {"loss": ["loss"], "loss by source": [f"loss_{source}" for source in sources]}
    groups |= {"eval_loss": losses} | {name: [name] for name in _MAIN}
    groups = {title: [n for n in group if n in logged] for title, group in groups.items()}
    if len(records) > 1:
        groups = {name: [name] for group in groups.values() for name in group}
    charts = [_chart(records, title, group) for title, group in groups.items() if group]
    rest = [name for name in names if name not in ("loss", *losses, *_MAIN)]
    return charts + [_chart(records, name, [name]) for name in rest], len(charts)


def _chart(records: Sequence[RunRecord], title: str, names: list[str]) -> Chart:
    """Return a chart with a curve for each name of one run, or for each run of one name."""
    shown = [(record, name) for record in records for name in names]
    curves = [
        (record.name if len(records) > 1 else name, color, record.points(name))
        for color, (record, name) in enumerate(shown)
        if name in record.series
    ]
    may_be_log = title in _MAY_BE_LOG or is_eval_loss(title)
    return Chart(title, curves, _NOTES.get(title, ""), may_be_log, title in _SHARES)


def values_of_curves(
    records: Sequence[RunRecord], *, axis: str = "documents", warnings: dict[str, str]
) -> dict[str, Any]:
    """Return what curves.html shows of runs, and with it, as `data`, what curves.js draws.

    A value that is NaN or infinite leaves a gap, marked on the x-axis. Long curves are thinned.
    `axis` is the first x-axis shown, and `warnings` are shown for axes.
    """
    record, *others = records
    places = [(step, record.totals.get(step, UNKNOWN)) for step in record.resumed]
    marks = [
        (f"resumed at step {step:,}", (step, at.documents, at.tokens, at.seconds))
        for step, at in places
    ]
    charts, main = charts_of(records)
    every = [point for chart in charts for *_, points in chart.curves for point in points]
    axes = [name for name, (_, at) in _AXES.items() if any(p[at] is not None for p in every)]
    frames, drawn = [], []
    for chart in charts:
        notes = [chart.note, *(_gaps(name, points) for name, _, points in chart.curves)]
        frames.append((chart.title, " · ".join(filter(None, notes))))
        curves = [
            {"name": name, "color": color, "points": [_as_json(p) for p in thinned(points)]}
            for name, color, points in chart.curves
        ]
        drawn.append({"may_be_log": chart.may_be_log, "percent": chart.percent, "curves": curves})
    data = {
        "axis": axis if axis in axes else next(iter(axes), "steps"),
        "labels": {name: words for name, (words, _) in _AXES.items()},
        "warnings": warnings,
        "marks": [] if others else marks,
        "reloads": not others and record.status == "running",
        "charts": drawn,
    }
    return {"axes": axes, "main": frames[:main], "rest": frames[main:], "data": data}


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


def run_page(record: RunRecord) -> HtmlPage:
    """Return the page of a run, the text of a file that opens from disk."""
    shown = values_of_curves([record], warnings={"steps": ON_STEPS})
    notes = record.notes
    if record.trl_path:
        notes = [f"{record.path}: {record.trl_path}. Documents are not counted there.", *notes]
    return render(
        Path(__file__).with_name("run.html"),
        title=f"Run · {record.name}",
        figures=_figures(record),
        notes=notes,
        shown=shown,
        report=record.report,
        settings=[(name, in_json(record.settings.get(name))) for name in record.changed],
        versions=[*record.facts.items(), *record.versions.items()],
        data=shown["data"],
        script="curves.js",
    )


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    """Return the cards of the page: value and name of what is known."""
    total = record.total
    shared = total.computed_tokens if (total.tokens or 0) > (total.computed_tokens or 0) else None
    steps = f"of {record.max_steps:,} steps" if record.max_steps else "steps"
    counts = {
        "documents": total.documents,
        "tokens": total.tokens,
        "tokens computed: documents share the others": shared,
    }
    losses = {name: record.last(name) for name in ("loss", "eval_loss")}
    found = [(record.status, f"written {record.written}"), (f"{record.step:,}", steps)]
    found += [(f"{count:,}", name) for name, count in counts.items() if count is not None]
    if total.seconds is not None:
        found.append((f"{total.seconds:,.1f} s", "of training"))
    found += [(f"{value:.4g}", name) for name, value in losses.items() if value is not None]
    found += [(record.verdict, "documents on this model")] * bool(record.verdict)
    return [*found, (record.path, "rows")]


def in_json(value: Any) -> str:
    """Return a setting as text: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
