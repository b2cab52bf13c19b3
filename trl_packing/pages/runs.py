"""The page of a run, `run.html`, and the page and the tables of a comparison of several runs."""

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from trl_packing.pages.curves import values_of_curves
from trl_packing.pages.page import HtmlPage, render
from trl_packing.pages.record import RunRecord, is_number


def run_page(record: RunRecord) -> HtmlPage:
    """Return the page of a run, the text of a file that opens from disk."""
    shown = values_of_curves([record])
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
    if record.verdict:
        found.append((record.verdict, "documents on this model"))
    return [*found, (record.path, "rows")]


def compare_page(records: Sequence[RunRecord], found: dict[str, Any]) -> HtmlPage:
    """Return the page of a comparison: the tables, and the curves of all runs in one frame."""
    shown = values_of_curves(records, axis=found["over"] or "")
    return render(
        Path(__file__).with_name("compare.html"),
        title=f"Runs · {' · '.join(found['runs'])}",
        notes=found["notes"],
        tables=list(tables(found)),
        shown=shown,
        data=shown["data"],
        script="curves.js",
    )


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


def in_json(value: Any) -> str:
    """Return a setting as text: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
