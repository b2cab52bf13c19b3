"""The page of a run, `run.html`."""

import json
from pathlib import Path

from trl_packing.pages.curves import values_of_curves
from trl_packing.pages.page import HtmlPage, render
from trl_packing.pages.record import RunRecord


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
        Path(__file__).with_name("run.html"),
        title=f"Run · {record.name}",
        record=record,
        notes=notes,
        shown=shown,
        settings=settings,
        versions=[*record.facts.items(), *record.versions.items()],
        data=shown["data"],
        script="curves.js",
    )
