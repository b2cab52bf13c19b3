"""Compare runs: what they trained, their losses, and the settings and versions that differ.

    outputs/a, outputs/b  →  load_run  →  compare  →  Comparison    text, JSON, compare_page

A step of a packed run holds more documents than one of a padded run. So runs are compared where
they have trained equally many documents, or tokens; over steps only if their steps are equal.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from textwrap import fill
from typing import Any

from trl_packing.formatting.printable import escape_hidden
from trl_packing.pages.curves import Curves
from trl_packing.pages.page import HtmlPage, asset, columns, escape, page, section, table
from trl_packing.training.run_page import (
    RunRecord,
    charts_of,
    in_json,
    in_words,
    is_eval_loss,
    storable,
)

_PLACES = {"documents": 1, "tokens": 2, "steps": 0}  # of an axis in a point of a curve
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
        at: the place on `over` up to which all runs were trained.
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

    def tables(self) -> Iterator[tuple[str, list[list[str]]]]:
        """Yield the tables in words: a title, and rows with their name and a cell for each run.

        Rows of numbers end with the difference of the last run from the first.
        """
        yield "at the end of each run", [_figure(*row) for row in self.figures.items()]
        if self.at is not None:
            where = f"after {self.at:,.0f} {self.over}, which all runs had"
            yield where, [_figure(*row) for row in self.losses.items()]
        for title, found in (
            ("settings that differ", self.settings),
            ("model, machine and versions that differ", self.versions),
        ):
            yield (
                title,
                [[n, *("–" if v is None else in_json(v) for v in vs)] for n, vs in found.items()],
            )

    def head(self, rows: Sequence[Sequence[str]]) -> list[str]:
        """Return the names of the columns of a table with these rows."""
        beside = max((len(row) for row in rows), default=0) - 1 - len(self.runs)
        return [*self.runs, *["difference" if len(self.runs) == 2 else "last − first"] * beside]

    def __str__(self) -> str:
        parts = []
        for title, rows in self.tables():
            lines = [[title, *self.head(rows)], *rows] if rows else [[f"{title}: none"]]
            parts.append(
                _aligned([[escape_hidden(n), *map(_clipped, cells)] for n, *cells in lines])
            )
        notes = [
            fill(escape_hidden(note), 100, initial_indent="- ", subsequent_indent="  ")
            for note in self.notes
        ]
        return "\n\n".join([*parts, *(["\n".join(notes)] if notes else [])])


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare runs, over the first of documents, tokens and equal steps that serves all of them."""
    names, problem = _names(records), steps_that_differ(records)
    over, at = _axis(records, problem)
    logged = dict.fromkeys(name for record in records for name in record.series)
    losses = [name for name in logged if name == "loss" or is_eval_loss(name)]
    notes = [
        f"{name}: {note}"
        for name, record in zip(names, records, strict=True)
        for note in record.notes
    ]
    if problem is not None:
        notes.insert(0, problem)
    if over is None:
        notes.insert(0, "No axis is known for all runs, so their losses are compared nowhere.")
    if on_different_machines(records):
        notes.append("The runs used different machines: training times cannot be compared.")
    return Comparison(
        runs=names,
        figures=_figures(records, losses),
        over=over,
        at=at,
        losses={name: [_last_before(r, name, over, at) for r in records] for name in losses}
        if over and at is not None
        else {},
        settings=_differing([record.settings for record in records]),
        versions=_differing([record.facts | record.versions for record in records]),
        notes=notes,
    )


def compare_page(records: Sequence[RunRecord], comparison: Comparison) -> HtmlPage:
    """Return the page of a comparison: the tables, and the curves of all runs in one frame."""
    named = [replace(r, name=name) for r, name in zip(records, comparison.runs, strict=True)]
    charts, main = charts_of(named)
    curves = Curves(charts, axis=comparison.over or "steps", warnings=_warnings(named))
    tables = [
        section(title[0].upper() + title[1:], table(["", *comparison.head(rows)], rows))
        if rows
        else section(title[0].upper() + title[1:], '<p class="note">none</p>')
        for title, rows in comparison.tables()
    ]
    sections = [
        *(f'<p class="note">{escape(note)}</p>' for note in comparison.notes),
        columns(*tables[:-2]),
        *curves.sections(main=main),
        columns(*tables[-2:]),
    ]
    title = f"Runs · {' · '.join(comparison.runs)}"
    return page(title, sections, data=curves.data(), script=asset("curves.js"))


def _warnings(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what is wrong with each axis of the page for these runs."""
    found = {}
    for axis, name in (("documents", "documents"), ("tokens", "tokens"), ("hours", "seconds")):
        if lack := [r.name for r in records if getattr(r.total, name) is None]:
            found[axis] = f"Not shown, because their {axis} are unknown: {', '.join(lack)}."
    if (problem := steps_that_differ(records)) is not None:
        found["steps"] = problem
    if on_different_machines(records):
        found["hours"] = f"The runs used different machines. {found.get('hours', '')}".strip()
    return found


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
    return len({(r.facts.get("device"), r.facts.get("ranks")) for r in records if r.facts}) > 1


# --- parts ------------------------------------------------------------------------------------


def _axis(records: Sequence[RunRecord], problem: str | None) -> tuple[str | None, float | None]:
    """Return the axis of a comparison, and the place up to which all runs were trained."""
    for over in ("documents", "tokens", *["steps"] * (problem is None)):
        places = [[point[_PLACES[over]] for point in r.points("loss")] for r in records]
        known = [[float(place) for place in run if place is not None] for run in places]
        if all(known):
            return over, min(max(run) for run in known)
    return None, None


def _last_before(record: RunRecord, name: str, over: str, at: float) -> float | None:
    known = [(point[_PLACES[over]], point.value) for point in record.points(name)]
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


def _differing(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that differ among those runs that recorded any."""
    recorded = [values for values in found if values]
    names = dict.fromkeys(name for values in recorded for name in values)
    return {
        name: [values.get(name) for values in found]
        for name in names
        if name not in _OF_EACH_RUN and any(v.get(name) != recorded[0].get(name) for v in recorded)
    }


def _names(records: Sequence[RunRecord]) -> list[str]:
    """Return the names of runs without the folder that all are in."""
    names = [record.name.rstrip("/") for record in records]
    parts = [name.split("/") for name in names]
    while len({p[0] for p in parts}) == 1 and all(len(p) > 1 for p in parts):
        parts = [p[1:] for p in parts]
    short = ["/".join(p) for p in parts]
    return short if len(set(short)) == len(short) else names


# --- text -------------------------------------------------------------------------------------


def _figure(name: str, values: Sequence[Any]) -> list[str]:
    """Return the row of a figure, with the difference of the last run from the first."""
    first, last = values[0], values[-1]
    difference = ""
    if name != "status" and first is not None and last is not None:
        difference = _cell(name, abs(last - first))
        difference = ("+" if last > first else "−" if last < first else "±") + difference
        difference += f" ({(last - first) / abs(first):+.1%})" if first and last != first else ""
    return [name, *(_cell(name, value) for value in values), difference]


def _cell(name: str, value: Any) -> str:
    if value is None:
        return "–"
    if name == "training time":
        return in_words(value)
    digits = {"tokens a second": 0, "documents a step": 1}.get(name, 4)
    if isinstance(value, float):
        # Runs of the same documents differ by little; a difference is never written as 0.
        return f"{value:,.{digits}f}" if not value or abs(value) >= 10**-digits else f"{value:.0e}"
    return f"{value:,}" if isinstance(value, int) else str(value)


def _aligned(lines: Sequence[Sequence[str]]) -> str:
    """Return a table: the first cell of a line to the left, the others to the right."""
    widths = [max(map(len, column)) for column in zip(*lines, strict=True)]
    return "\n".join(
        "  ".join([line[0].ljust(widths[0]), *map(str.rjust, line[1:], widths[1:])]).rstrip()
        for line in lines
    )


def _clipped(value: str) -> str:
    value = escape_hidden(value)
    return value if len(value) <= _WIDEST_VALUE else value[: _WIDEST_VALUE - 1] + "…"
