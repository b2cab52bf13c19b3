"""The page of a run, `run.html`: curves, the packing report, settings, versions.

RunRecord  →  run_page()  →  text of a file that opens from disk
"""

import json
from typing import Any

from trl_packing.pages.curves import Curves
from trl_packing.pages.page import asset, cards, columns, escape, page, section, table
from trl_packing.training.report_layout import as_html
from trl_packing.training.run_curves import charts_of, num_main
from trl_packing.training.run_record import RunRecord

FILE = "run.html"

_ON_STEPS = (
    "The steps of a packed and of a padded run hold different numbers of documents. Compare such "
    "runs over documents or tokens."
)


def run_page(record: RunRecord) -> str:
    """Return the page of a run."""
    charts = charts_of([record])
    curves = Curves(
        charts,
        axis="documents",
        marks=[(f"resumed at step {step:,}", _place(record, step)) for step in record.resumed],
        warnings={"steps": _ON_STEPS},
        reloads=record.status == "running",
    )
    sections = [
        cards(_figures(record)),
        *(f'<p class="note">{escape(note)}</p>' for note in _notes(record)),
        *curves.sections(main=num_main(charts)),
        section("Packed and checked", as_html(record.report)) if record.report else "",
        columns(_settings(record), _versions(record)),
    ]
    name = record.name
    return page(f"Run · {name}", sections, data=curves.data(), script=asset("curves.js"))


def _notes(record: RunRecord) -> list[str]:
    if record.path.startswith("TRL"):
        return [f"{record.path}. Documents are not counted there.", *record.notes]
    return record.notes


def _figures(record: RunRecord) -> list[tuple[str, str]]:
    total, loss = record.total, record.last("loss")
    of_all = f"of {record.max_steps:,} steps" if record.max_steps else "steps"
    found = [(record.status, f"written {record.written}"), (f"{record.step:,}", of_all)]
    counts = {"documents": total.documents, "tokens": total.tokens}
    found += [(f"{count:,}", name) for name, count in counts.items() if count is not None]
    if total.tokens and total.computed_tokens and total.tokens > total.computed_tokens:
        found.append((f"{total.computed_tokens:,}", "tokens computed: documents share the others"))
    if total.seconds is not None:
        found.append((in_words(total.seconds), "of training"))
    if loss is not None:
        found.append((f"{loss:.4g}", "loss"))
    evaluated = record.last("eval_loss")
    if evaluated is not None:
        found.append((f"{evaluated:.4g}", "eval_loss"))
    if record.verdict:
        found.append((record.verdict, "documents on this model"))
    path, _, _ = record.path.partition(":")  # a note has the reason
    return [*found, (path, "rows")]


def in_words(seconds: float) -> str:
    """Return a duration in words.

    >>> [in_words(s) for s in (9.25, 75, 3725, 90_000)]
    ['9.2 s', '1 min 15 s', '1 h 02 min', '25 h 00 min']
    """
    if seconds < 60:
        return f"{seconds:.1f} s"
    if seconds < 3600:
        return f"{int(seconds // 60)} min {int(seconds % 60):02} s"
    return f"{int(seconds // 3600)} h {int(seconds % 3600 // 60):02} min"


def _place(record: RunRecord, step: int) -> list[float | None]:
    at = record.totals.get(step)
    if at is None:
        return [step, None, None, None]
    return [step, at.documents, at.tokens, at.seconds]


def _settings(record: RunRecord) -> str:
    rows = [(name, in_json(record.settings.get(name))) for name in record.changed]
    if not rows:
        return section("Settings", '<p class="note">all have their defaults</p>')
    found = f'<div class="wrapped">{table(["setting", "value"], rows)}</div>'
    return section("Settings", found, note="other than the defaults")


def _versions(record: RunRecord) -> str:
    rows = [*record.facts.items(), *record.versions.items()]
    return section("Model, machine, versions", table(["", ""], rows)) if rows else ""


def in_json(value: Any) -> str:
    """Return a setting as text: texts as they are, all else as JSON."""
    return value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
