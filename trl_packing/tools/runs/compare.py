"""Compare runs: what they trained, their losses, and the settings and versions that differ.

    outputs/a, outputs/b  →  load_run  →  compare  →  Comparison    text, JSON, compare_page

A step of a packed run holds more documents than one of a padded run. So runs are compared where
they have trained equally many documents, or tokens; over steps only if their steps are equal.
"""

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from textwrap import fill
from typing import Any

from trl_packing.formatting.printable import escape_hidden
from trl_packing.pages.curves import Values
from trl_packing.training.run_curves import is_eval_loss
from trl_packing.training.run_page import in_json, in_words
from trl_packing.training.run_record import Point, RunRecord, storable

OVER = ("documents", "tokens", "steps", "hours")

_EQUAL = 0.02  # documents a step that differ by less are equal: the last step may be smaller
_WIDEST_VALUE = 28  # characters of a setting in the text
_OF_EACH_RUN = ("output_dir", "logging_dir", "run_name")


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; each list has an item for every run, None where it is unknown.

    Attributes:
        runs: their names.
        figures: what was trained, and the last logged losses, by name.
        over: the axis on which the runs are compared; None if there is none for all of them.
        at: the place on `over` up to which all runs were trained; hours in seconds.
        losses: by name, the last ones logged up to `at`.
        settings: that differ, by name.
        versions: of packages, model and device, that differ.
        notes: what is unknown or cannot be compared.
    """

    runs: list[str]
    figures: dict[str, list[Any]]
    over: str | None
    at: float | None
    losses: dict[str, list[float | None]]
    settings: dict[str, list[Any]]
    versions: dict[str, list[str | None]]
    notes: list[str]

    def to_json(self) -> str:
        """Return the comparison as JSON; NaN and infinity are texts."""
        return json.dumps(storable(asdict(self)), allow_nan=False)

    def tables(self) -> list[tuple[str, dict[str, list[str]]]]:
        """Return the tables of the comparison, in words: a title, and rows by name."""
        figures = {name: _cells(name, values) for name, values in self.figures.items()}
        found = [("at the end of each run", figures)]
        if self.over is not None and self.at is not None:
            at = in_words(self.at) if self.over == "hours" else f"{self.at:,.0f} {self.over}"
            where = (
                f"after {at}{' of training' if self.over == 'hours' else ''}, which all runs had"
            )
            found.append((where, {name: _cells(name, v) for name, v in self.losses.items()}))
        settings = {n: [_setting(v) for v in values] for n, values in self.settings.items()}
        found.append(("settings that differ", settings))
        versions = {n: [v or "–" for v in values] for n, values in self.versions.items()}
        return [*found, ("model, machine and versions that differ", versions)]

    def __str__(self) -> str:
        parts = []
        for title, rows in self.tables():
            parts.append(_as_text(title, self.runs, rows) if rows else f"{title}: none")
        notes = "\n".join(
            fill(escape_hidden(note), 100, initial_indent="- ", subsequent_indent="  ")
            for note in self.notes
        )
        return "\n\n".join([*parts, notes] if notes else parts)


def compare(records: Sequence[RunRecord], over: str | None = None) -> Comparison:
    """Compare runs.

    Args:
        records: at least two.
        over: the axis on which they are compared; by default the first of documents, tokens,
            steps that serves all of them.

    Raises:
        ValueError: `over` is unknown for a run.
    """
    over = _axis(records, over)
    names = list(dict.fromkeys(name for record in records for name in record.names()))
    losses = [name for name in names if name == "loss" or is_eval_loss(name)]
    ends = [_end(record, over) for record in records] if over else []
    at = min((end for end in ends if end is not None), default=None)
    return Comparison(
        runs=_names(records),
        figures=_figures(records, losses),
        over=over if at is not None else None,
        at=at,
        losses={name: [_last_before(r.points(name), over, at) for r in records] for name in losses}
        if over and at is not None
        else {},
        settings=_differing([record.settings for record in records], leave_out=_OF_EACH_RUN),
        versions=_differing([record.facts | record.versions for record in records]),
        notes=_notes(records, over),
    )


def steps_that_differ(records: Sequence[RunRecord]) -> str | None:
    """Return why the steps of these runs cannot be compared; None if they can."""
    sizes = [_documents_per_step(record) for record in records]
    known = [size for size in sizes if size is not None]
    if len(known) == len(sizes) and max(known) <= min(known) * (1 + _EQUAL):
        return None
    words = ", ".join(
        f"{name} {'unknown' if size is None else f'{size:,.1f}'}"
        for name, size in zip(_names(records), sizes, strict=True)
    )
    return f"Runs cannot be compared over steps. Documents a step: {words}."


def on_different_machines(records: Sequence[RunRecord]) -> bool:
    """Return whether at least two of these runs are known to differ in device or ranks."""
    machines = {(r.facts.get("device"), r.facts.get("ranks")) for r in records if r.facts}
    return len(machines) > 1


def place_on(over: str) -> Callable[[Values], float | None]:
    """Return the function from a point to its place on an axis."""
    place = {"steps": 0, "documents": 1, "tokens": 2, "hours": 3}[over]
    return lambda point: point[place]


# --- parts ------------------------------------------------------------------------------------


def _axis(records: Sequence[RunRecord], asked: str | None) -> str | None:
    if asked is not None:
        missing = [r.name for r in records if _end(r, asked) is None]
        if missing:
            raise ValueError(
                f"--over {asked}: unknown for {', '.join(missing)}; leave it out, or name another"
            )
        return asked
    axes = ["documents", "tokens", *(["steps"] if steps_that_differ(records) is None else [])]
    return next((a for a in axes if all(_end(r, a) is not None for r in records)), None)


def _end(record: RunRecord, over: str) -> float | None:
    """Return the last known place of a run on an axis."""
    places = map(place_on(over), record.points("loss"))
    return max((place for place in places if place is not None), default=None)


def _last_before(points: Sequence[Point], over: str, at: float) -> float | None:
    place = place_on(over)
    known = [(place(point), point.value) for point in points]
    before = [value for where, value in known if where is not None and where <= at]
    return before[-1] if before else None


def _figures(records: Sequence[RunRecord], losses: Sequence[str]) -> dict[str, list[Any]]:
    totals = [record.total for record in records]
    found: dict[str, list[Any]] = {
        "status": [record.status for record in records],
        "steps": [record.step for record in records],
        "documents": [total.documents for total in totals],
        "documents a step": [_documents_per_step(record) for record in records],
        "tokens": [total.tokens for total in totals],
        "trained tokens": [total.trained_tokens for total in totals],
        "tokens computed": [total.computed_tokens for total in totals],
        "training time": [total.seconds for total in totals],
        "tokens a second": [
            total.tokens / total.seconds if total.tokens and total.seconds else None
            for total in totals
        ],
    }
    return found | {name: [record.last(name) for record in records] for name in losses}


def _documents_per_step(record: RunRecord) -> float | None:
    documents = record.total.documents
    return documents / record.step if documents and record.step else None


def _differing(found: Sequence[dict[str, Any]], leave_out: Sequence[str] = ()) -> dict[str, Any]:
    """Return the values that differ among those runs that recorded any."""
    recorded = [values for values in found if values]
    names = dict.fromkeys(name for values in recorded for name in values)
    return {
        name: [values.get(name) for values in found]
        for name in names
        if name not in leave_out and any(v.get(name) != recorded[0].get(name) for v in recorded)
    }


def _notes(records: Sequence[RunRecord], over: str | None) -> list[str]:
    named = zip(_names(records), records, strict=True)
    notes = [f"{name}: {note}" for name, record in named for note in record.notes]
    if (problem := steps_that_differ(records)) is not None:
        notes.insert(0, problem)
    if over is None:
        notes.insert(0, "No axis is known for all runs, so their losses are compared nowhere.")
    if on_different_machines(records):
        notes.append("The runs used different machines: training times cannot be compared.")
    return notes


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return the names of runs without the folder that all are in."""
    names = [record.name.rstrip("/") for record in records]
    parts = [name.split("/") for name in names]
    while len({p[0] for p in parts}) == 1 and all(len(p) > 1 for p in parts):
        parts = [p[1:] for p in parts]
    short = ["/".join(p) for p in parts]
    return short if len(set(short)) == len(short) else names


# --- text -------------------------------------------------------------------------------------


def _cells(name: str, values: Sequence[Any]) -> list[str]:
    return [_cell(name, value) for value in values]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "training time":
        return in_words(value)
    if name == "tokens a second":
        return f"{value:,.0f}"
    if name == "documents a step":
        return f"{value:,.1f}"
    if isinstance(value, float):
        return f"{value:.4f}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _setting(value: Any) -> str:
    return "–" if value is None else in_json(value)


def _as_text(title: str, runs: Sequence[str], rows: dict[str, list[str]]) -> str:
    head = [title, *(escape_hidden(name) for name in runs)]
    body = [[name, *map(_clipped, values)] for name, values in rows.items()]
    lines = [head, *body]
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(_aligned(line, widths) for line in lines)


def _aligned(cells: Sequence[str], widths: Sequence[int]) -> str:
    """Return a line of a table: the first cell to the left, the others to the right."""
    sides = "<" + ">" * (len(cells) - 1)
    cells = [f"{c:{s}{w}}" for c, s, w in zip(cells, sides, widths, strict=True)]
    return "  ".join(cells).rstrip()


def _clipped(value: str) -> str:
    value = escape_hidden(value)
    return value if len(value) <= _WIDEST_VALUE else value[: _WIDEST_VALUE - 1] + "…"
