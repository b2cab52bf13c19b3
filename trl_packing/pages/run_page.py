"""The page of a run, `run.html`."""

import json
from pathlib import Path
from typing import Any

from trl_packing.pages.curves import values_of_curves
from trl_packing.pages.page import HtmlPage, render
from trl_packing.pages.record import RunRecord


def run_page(record: RunRecord) -> HtmlPage:
    """Return the page of a run, the text of a file that opens from disk."""
    shown = values_of_curves(record)
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
        settings=[(name, _as_text(record.settings.get(name))) for name in record.changed],
        versions=[*record.facts.items(), *record.versions.items()],
        data=shown["data"],
        script="curves.js",
    )


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    """Return the cards of the page: value and name of what is known."""
    total = record.total
    steps = f"of {record.max_steps:,} steps" if record.max_steps else "steps"
    counts = {"documents": total.documents, "tokens": total.tokens}
    if (total.tokens or 0) > (total.computed_tokens or 0):
        counts["tokens computed: documents share the others"] = total.computed_tokens
    found = [(record.status, f"written {record.written}"), (f"{record.step:,}", steps)]
    for name, count in counts.items():
        if count is not None:
            found.append((f"{count:,}", name))
    if total.seconds is not None:
        found.append((f"{total.seconds:,.1f} s", "of training"))
    for name in ("loss", "eval_loss"):
        if name in record.series:
            found.append((f"{record.series[name][-1].value:.4g}", name))
    if record.verdict:
        found.append((record.verdict, "documents on this model"))
    return [*found, (record.path, "rows")]


def _as_text(value: Any) -> str:
    """Return a setting as text: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
