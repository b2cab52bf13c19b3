"""Compare runs: what they trained, their losses, and the settings and versions that differ.

    run.json              a record of ours: everything is known
    trainer_state.json    of any Trainer: log and steps; tokens where TRL logged num_tokens

A step of a packed run holds more documents than one of a padded run. So runs are compared where
they have trained equally many documents, or tokens.
"""

import json
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import pandas as pd

from trl_packing.data.printable import escape_hidden
from trl_packing.training.page import HtmlPage, render
from trl_packing.training.run_page import (
    FILE,
    ON_STEPS,
    RunRecord,
    Totals,
    in_json,
    is_eval_loss,
    is_number,
    storable,
    values_of_curves,
)

# `transformers.trainer.TRAINER_STATE_NAME`, whose import takes seconds.
STATE = "trainer_state.json"

_WIDEST_VALUE = 28  # characters of a setting in the text
_OF_EACH_RUN = ("output_dir", "logging_dir", "run_name")


def load_run(given: str) -> RunRecord:
    """Return the run in `given`: an output folder, a checkpoint, or one of the two files.

    Raises:
        ValueError: there is no run, or its file cannot be read.
    """
    path = Path(given)
    checkpoints = path.glob("checkpoint-*")
    last_first = sorted(checkpoints, key=lambda each: (len(each.name), each.name), reverse=True)
    files = [path, *(place / name for place in (path, *last_first) for name in (FILE, STATE))]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(f"{given} holds no run ({FILE} or {STATE}); name the output_dir of one")
    try:
        text = file.read_text(encoding="utf-8")
        found = json.loads(text)
        is_ours = isinstance(found, dict) and "format" in found
        record = RunRecord.from_json(text) if is_ours else _run_of_state(found)
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ValueError(f"{file} cannot be read as a run: {problem!r}") from problem
    record.name = given
    return record


def _run_of_state(state: Any) -> RunRecord:
    """Return the run of a `trainer_state.json`, which another trainer may have written."""
    log = state["log_history"]
    tokens = {entry["step"]: entry["num_tokens"] for entry in log if "num_tokens" in entry}
    known = "tokens are its num_tokens"
    if not tokens or sorted(tokens.values()) != [tokens[step] for step in sorted(tokens)]:
        # TRL counts from 0 in a resumed run.
        tokens, known = {}, "its num_tokens are missing or restart, so tokens are unknown"
    lacks = "documents, time, settings and versions are not recorded"
    return RunRecord(
        name="",
        path="another trainer, or a run without run.json",
        log=log,
        totals={step: Totals(tokens=int(number)) for step, number in tokens.items()},
        status="finished" if any("train_runtime" in entry for entry in log[-2:]) else "unknown",
        step=state["global_step"],
        max_steps=state["max_steps"],
        notes=[f"read from {STATE}: {lacks}; {known}"],
    )


@dataclass(frozen=True)
class Comparison:
    """Runs beside each other; each list has an item for every run, None where it is unknown.

    Attributes:
        figures: what was trained, and the last logged losses, by name.
        over: the axis on which the runs are compared; None if there is none for all of them.
        at: the place on `over` up to which all runs were trained.
        losses: by name, the last ones logged up to `at`.
        settings: that differ, by name; `versions` also of model and device.
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

    def tables(self) -> Iterator[tuple[list[str], list[list[str]]]]:
        """Yield the head and the rows of each table in words: a name, and a cell for each run."""
        head = [*self.runs, "difference" if len(self.runs) == 2 else "last − first"]
        numbers = {"at the end of each run": self.figures}
        if self.at is not None:
            numbers[f"after {self.at:,.0f} {self.over}, which all runs had"] = self.losses
        for title, figures in numbers.items():
            rows = [[n, *map(_cell, v), _difference(v[0], v[-1])] for n, v in figures.items()]
            yield [title, *head], rows
        others = {"settings": self.settings, "model, machine and versions": self.versions}
        for title, found in others.items():
            rows = [[n, *("–" if v is None else in_json(v) for v in vs)] for n, vs in found.items()]
            yield [f"{title} that differ", *self.runs], rows

    def __str__(self) -> str:
        parts = []
        for head, rows in self.tables():
            (title, *runs), *lines = [[escape_hidden(c) for c in row] for row in (head, *rows)]
            table = pd.DataFrame(
                [cells for _, *cells in lines],
                [name for name, *_ in lines],
                pd.Index(runs, name=title),
            )
            parts.append(table.to_string(max_colwidth=_WIDEST_VALUE) if rows else f"{title}: none")
        return "\n\n".join([*parts, *(f"- {escape_hidden(note)}" for note in self.notes)])


def compare(records: Sequence[RunRecord]) -> Comparison:
    """Compare runs where all have trained equally many documents, or tokens."""
    short = [Path(record.name).name for record in records]
    names = short if len({*short}) == len(short) else [record.name for record in records]
    over, at = None, None
    for axis in ("tokens", "documents"):
        places = [[getattr(point, axis) for point in r.points("loss")] for r in records]
        known = [[float(place) for place in run if place is not None] for run in places]
        if all(known):
            over, at = axis, min(map(max, known))
    logged = dict.fromkeys(name for record in records for name in record.series)
    losses = [name for name in logged if name == "loss" or is_eval_loss(name)]
    notes = [f"{name}: {n}" for name, r in zip(names, records, strict=True) for n in r.notes]
    if over is None:
        notes.insert(0, "No axis is known for all runs, so their losses are compared nowhere.")
    rows = [_figures(record) | {name: record.last(name) for name in losses} for record in records]
    return Comparison(
        runs=names,
        figures={name: [row[name] for row in rows] for name in rows[0]},
        over=over,
        at=at,
        losses={n: [_last_before(r, n, over, at) for r in records] for n in losses * bool(over)},
        settings=_differing([record.settings for record in records]),
        versions=_differing([record.facts | record.versions for record in records]),
        notes=notes,
    )


def _figures(record: RunRecord) -> dict[str, Any]:
    total, step = record.total, record.step
    return {
        "status": record.status,
        "steps": step,
        "documents": total.documents,
        "documents a step": total.documents / step if total.documents and step else None,
        "tokens": total.tokens,
        "trained tokens": total.trained_tokens,
        "tokens computed": total.computed_tokens,
        "seconds of training": total.seconds,
        "tokens a second": total.tokens / total.seconds if total.tokens and total.seconds else None,
    }


def compare_page(records: Sequence[RunRecord], comparison: Comparison) -> HtmlPage:
    """Return the page of a comparison: the tables, and the curves of all runs in one frame."""
    named = [replace(r, name=name) for r, name in zip(records, comparison.runs, strict=True)]
    warnings = {"steps": ON_STEPS}
    for axis, name in (("documents", "documents"), ("tokens", "tokens"), ("hours", "seconds")):
        if lack := [r.name for r in named if getattr(r.total, name) is None]:
            warnings[axis] = f"Not shown, because their {axis} are unknown: {', '.join(lack)}."
    shown = values_of_curves(named, axis=comparison.over or "steps", warnings=warnings)
    return render(
        Path(__file__).with_name("compare.html"),
        title=f"Runs · {' · '.join(comparison.runs)}",
        notes=comparison.notes,
        tables=list(comparison.tables()),
        shown=shown,
        data=shown["data"],
        script="curves.js",
    )


def _last_before(record: RunRecord, name: str, axis: Any, at: Any) -> float | None:
    known = [(getattr(point, axis), point.value) for point in record.points(name)]
    before = [value for where, value in known if where is not None and where <= at]
    return before[-1] if before else None


def _differing(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that differ among those runs that recorded any."""
    recorded = [values for values in found if values]
    names = dict.fromkeys(name for values in recorded for name in values)
    return {
        name: [values.get(name) for values in found]
        for name in names
        if name not in _OF_EACH_RUN and any(v.get(name) != recorded[0].get(name) for v in recorded)
    }


def _difference(first: Any, last: Any) -> str:
    """Return the difference of two numbers in words, "" for anything else."""
    if not (is_number(first) and is_number(last)):
        return ""
    sign = "+" if last > first else "−" if last < first else "±"
    share = f" ({(last - first) / abs(first):+.1%})" if first and last != first else ""
    return f"{sign}{_cell(abs(last - first))}{share}"


def _cell(value: Any) -> str:
    if value is None or not is_number(value):
        return "–" if value is None else str(value)
    # Runs of the same documents differ by little; a difference is never written as 0.
    digits = ",.0f" if isinstance(value, int) else ",.4f" if not 0 < abs(value) < 1e-4 else ".0e"
    return f"{value:{digits}}"
