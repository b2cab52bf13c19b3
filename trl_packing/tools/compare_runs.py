"""Compare runs: what they trained, their losses, and the settings and versions that differ.

    run.json              a record of ours: everything is known
    trainer_state.json    of any Trainer: log and steps; tokens where TRL logged num_tokens

A step of a packed run holds more documents than one of a padded run. So runs are compared where
they have trained equally many documents, or tokens.
"""

import json
import shutil
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

import pandas as pd

from trl_packing.data.printable import escape_hidden
from trl_packing.pages.page import HtmlPage, render
from trl_packing.training.run_page import (
    FILE,
    ON_STEPS,
    RunRecord,
    Totals,
    in_json,
    is_eval_loss,
    is_number,
    values_of_curves,
)

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
    return RunRecord(
        name="",
        log=log,
        totals={} if restarts else {step: Totals(tokens=n) for step, n in tokens.items()},
        status="finished" if any("train_runtime" in entry for entry in log[-2:]) else "unknown",
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
    over, at = None, None
    for axis in ("tokens", "documents"):
        places = [[getattr(point, axis) for point in r.points("loss")] for r in records]
        known = [[place for place in run if place is not None] for run in places]
        if all(known):
            over = axis
            at = min(map(max, known))
    logged = dict.fromkeys(name for record in records for name in record.series)
    losses = [name for name in logged if name == "loss" or is_eval_loss(name)]
    notes = [f"{record.name}: {note}" for record in records for note in record.notes]
    if over is None:
        notes.insert(0, "No axis is known for all runs, so their losses are compared nowhere.")
    rows = [_figures(record) | {name: record.last(name) for name in losses} for record in records]
    return {
        "runs": [record.name for record in records],
        "figures": {name: [row[name] for row in rows] for name in rows[0]},
        "over": over,
        "at": at,
        "losses": {n: [_last_before(r, n, over, at) for r in records] for n in losses if over},
        "differing": _differing([r.settings | r.facts | r.versions for r in records]),
        "notes": notes,
    }


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
    known = [(getattr(point, axis), point.value) for point in record.points(name)]
    return next((v for where, v in reversed(known) if where is not None and where <= at), None)


def _differing(found: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the values that differ among those runs that recorded any."""
    recorded = [values for values in found if values]
    names = dict.fromkeys(name for values in recorded for name in values)
    differ = {n for n in names if any(v.get(n) != recorded[0].get(n) for v in recorded)}
    return {n: [v.get(n) for v in found] for n in names if n in differ and n not in _OF_EACH_RUN}


def tables(found: dict[str, Any]) -> Iterator[tuple[list[str], list[list[str]]]]:
    """Yield head and rows of each table of a comparison in words: a name, a cell for each run."""
    head = [*found["runs"], "difference" if len(found["runs"]) == 2 else "last − first"]
    numbers = {"at the end of each run": found["figures"]}
    if found["at"] is not None:
        numbers[f"after {found['at']:,.0f} {found['over']}, which all runs had"] = found["losses"]
    for title, figures in numbers.items():
        rows = [[n, *map(_cell, v), _difference(v[0], v[-1])] for n, v in figures.items()]
        yield [title, *head], rows
    rows = []
    for name, values in found["differing"].items():
        cells = ["–" if value is None else in_json(value) for value in values]
        if len({*cells}) > 1:  # 1 and "1" look alike
            rows.append([name, *cells])
    yield ["settings, model, data, machine and versions that differ", *found["runs"]], rows


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


def compare_page(records: Sequence[RunRecord], found: dict[str, Any]) -> HtmlPage:
    """Return the page of a comparison: the tables, and the curves of all runs in one frame."""
    shown = values_of_curves(records, axis=found["over"] or "", warnings={"steps": ON_STEPS})
    return render(
        Path(__file__).with_name("compare.html"),
        title=f"Runs · {' · '.join(found['runs'])}",
        notes=found["notes"],
        tables=list(tables(found)),
        shown=shown,
        data=shown["data"],
        script="curves.js",
    )


def _difference(first: Any, last: Any) -> str:
    """Return the difference of two numbers in words, "" for anything else."""
    if not (is_number(first) and is_number(last)):
        return ""
    return _cell(last - first, "+") + (f" ({(last - first) / abs(first):+.1%})" if first else "")


def _cell(value: Any, sign: str = "") -> str:
    if not is_number(value):
        return "–" if value is None else str(value)
    # Runs of the same documents differ by little; a difference is never written as 0.
    digits = ",.0f" if isinstance(value, int) else ",.4f" if not 0 < abs(value) < 1e-4 else ".0e"
    return f"{value:{sign}{digits}}"
