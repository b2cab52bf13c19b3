"""Compare runs: what they trained, their losses, and the settings and versions that differ.

    run.json              a record of ours: everything is known
    trainer_state.json    of any Trainer: log and steps; tokens where TRL logged num_tokens

A step of a packed run holds more documents than one of a padded run. So runs are compared where
they have trained equally many documents, or tokens.
"""

import json
import shutil
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from trl_packing.data.printable import escape_hidden
from trl_packing.pages.curves import is_eval_loss
from trl_packing.pages.record import FILE, RunRecord, Totals
from trl_packing.pages.runs import tables

# `transformers.trainer.TRAINER_STATE_NAME`, whose import takes seconds.
STATE = "trainer_state.json"

_NAME, _CELL = 30, 22  # characters, so that the settings of two runs fit into 80 columns

_OF_EACH_RUN = ("output_dir", "logging_dir", "run_name")


def load_run(given: str) -> RunRecord:
    """Return the run in `given`: an output folder, a checkpoint, or one of the two files.

    Raises:
        ValueError: there is no run, or its file cannot be read.
    """
    path = Path(given)
    last_first = sorted(path.glob("checkpoint-*"), key=lambda p: (len(p.name), p.name))[::-1]
    files = [path, *(place / name for place in (path, *last_first) for name in (FILE, STATE))]
    file = next((file for file in files if file.is_file()), None)
    if file is None:
        raise ValueError(f"{given} holds no run ({FILE} or {STATE}); name the output_dir of one")
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
        record = RunRecord.load(file) if "format" in found else _run_of_state(found)
    except (OSError, ValueError, TypeError, KeyError) as problem:
        raise ValueError(f"{file} cannot be read as a run: {problem!r}") from problem
    return replace(record, name="/".join(path.absolute().parts[-2:]))


def _run_of_state(state: Any) -> RunRecord:
    """Return the run of a `trainer_state.json`, which another trainer may have written."""
    log = state["log_history"]
    tokens = {entry["step"]: int(entry["num_tokens"]) for entry in log if "num_tokens" in entry}
    # TRL counts from 0 in a resumed run.
    restarts = sorted(tokens.values()) != [tokens[step] for step in sorted(tokens)]
    is_finished = any("train_runtime" in entry for entry in log[-2:])
    return RunRecord(
        name="",
        log=log,
        totals={} if restarts else {step: Totals(tokens=n) for step, n in tokens.items()},
        status="finished" if is_finished else "unknown",
        step=state["global_step"],
        notes=[f"{STATE} has only tokens (num_tokens, unless they restart), steps and losses"],
    )


def compare(records: Sequence[RunRecord]) -> dict[str, Any]:
    """Compare runs where all have trained equally many documents, or tokens.

    Each list below has an item for every run, None where it is unknown:

        figures      what was trained, and the last logged losses, by name
        over, at     the axis of the comparison, and the place up to which all were trained; or None
        losses       the last ones logged up to that place, by name
        differing    settings, facts and versions that differ among runs that recorded any
        notes        what is unknown or cannot be compared
    """
    over, at = _common_place(records)
    figures: dict[str, list[Any]] = {}
    for record in records:
        for name, value in _figures(record).items():
            figures.setdefault(name, []).append(value)
    losses = {}
    for name in dict.fromkeys(name for record in records for name in record.series):
        if name == "loss" or is_eval_loss(name):
            figures[name] = [record.last(name) for record in records]
            if over is not None:
                losses[name] = [_last_before(record, name, over, at) for record in records]
    notes = [f"{record.name}: {note}" for record in records for note in record.notes]
    if over is None:
        notes.insert(0, "No axis is known for all runs, so their losses are compared nowhere.")
    names = [record.name for record in records]
    return {
        "runs": names,
        "figures": figures,
        "over": over,
        "at": at,
        "losses": losses,
        "differing": _differing([r.settings | r.facts | r.versions for r in records]),
        "notes": notes,
    }


def _common_place(records: Sequence[RunRecord]) -> tuple[str | None, Any]:
    """Return the axis on which all losses are known, and the place up to which all were trained."""
    for axis in ("documents", "tokens"):
        furthest: list[Any] = []
        for record in records:
            places = [getattr(point, axis) for point in record.points("loss")]
            furthest.append(max((place for place in places if place is not None), default=None))
        if None not in furthest:
            return axis, min(furthest)
    return None, None


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


def _last_before(record: RunRecord, name: str, axis: str, at: Any) -> float | None:
    """Return the last loss that was logged up to the place `at` of an axis."""
    for point in reversed(record.points(name)):
        place = getattr(point, axis)
        if place is not None and place <= at:
            return point.value
    return None


def _differing(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that differ among those runs that recorded any."""
    recorded = [values for values in found if values]
    differing = {}
    for name in dict.fromkeys(name for values in recorded for name in values):
        is_equal = all(values.get(name) == recorded[0].get(name) for values in recorded)
        if not is_equal and name not in _OF_EACH_RUN:
            differing[name] = [values.get(name) for values in found]
    return differing


def comparison_text(found: dict[str, Any]) -> str:
    """Return the tables and notes of a comparison for a terminal."""
    columns = max(shutil.get_terminal_size((100, 24)).columns, 50)
    parts = []
    for (title, *runs), rows in tables(found):
        lines = _wrapped(["", *runs])
        for row in rows:
            lines += _wrapped(row)
        names, *cells = zip(*lines, strict=True)
        table = pd.DataFrame(dict(enumerate(cells)), names).to_string(
            header=False, line_width=columns
        )
        parts.append(f"{title}:\n\n{table}" if rows else f"{title}: none")
    notes = [textwrap.fill(f"- {escape_hidden(note)}", columns) for note in found["notes"]]
    return "\n\n".join([*parts, *notes])


def _wrapped(row: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the lines of a row of a table: a name, and cells of at most `_CELL` characters."""
    name, *cells = map(escape_hidden, row)
    wrapped = [textwrap.wrap(cell, _CELL) for cell in cells]
    return [*zip_longest(textwrap.wrap(name, _NAME), *wrapped, fillvalue="")]
