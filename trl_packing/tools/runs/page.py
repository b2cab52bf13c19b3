"""The page of several runs: their curves in the same frames, and where they differ.

records, Comparison  →  compare_page()  →  text of a file that opens from disk
"""

from collections.abc import Sequence
from dataclasses import replace

from trl_packing.pages.curves import Curves
from trl_packing.pages.page import asset, columns, escape, page, section, table
from trl_packing.tools.runs.compare import (
    OVER,
    Comparison,
    on_different_machines,
    steps_that_differ,
)
from trl_packing.training.run_curves import charts_of, num_main
from trl_packing.training.run_record import RunRecord


def compare_page(records: Sequence[RunRecord], comparison: Comparison) -> str:
    """Return the page of a comparison of these runs."""
    named = [replace(r, name=name) for r, name in zip(records, comparison.runs, strict=True)]
    charts = charts_of(named)
    curves = Curves(charts, axis=comparison.over or "steps", warnings=_warnings(named))
    tables = [_section(rows, comparison.runs) for rows in comparison.tables()]
    sections = [
        *(f'<p class="note">{escape(note)}</p>' for note in comparison.notes),
        columns(*tables[:-2]),
        *curves.sections(main=num_main(charts)),
        columns(*tables[-2:]),
    ]
    title = f"Runs · {' · '.join(comparison.runs)}"
    return page(title, sections, data=curves.data(), script=asset("curves.js"))


def _section(rows: tuple[str, dict[str, list[str]]], runs: Sequence[str]) -> str:
    title, values = rows
    title = title[0].upper() + title[1:]
    if not values:
        return section(title, '<p class="note">none</p>')
    return section(title, table(["", *runs], [[name, *cells] for name, cells in values.items()]))


def _warnings(records: Sequence[RunRecord]) -> dict[str, str]:
    """Return what is wrong with each axis for these runs."""
    found = {}
    for axis in OVER:
        place = {"documents": "documents", "tokens": "tokens", "hours": "seconds"}.get(axis)
        lack = [r.name for r in records if place and getattr(r.total, place) is None]
        if lack:
            found[axis] = f"Not shown, because their {axis} are unknown: {', '.join(lack)}."
    if (problem := steps_that_differ(records)) is not None:
        found["steps"] = problem
    if on_different_machines(records):
        found["hours"] = f"The runs used different machines. {found.get('hours', '')}".strip()
    return found
