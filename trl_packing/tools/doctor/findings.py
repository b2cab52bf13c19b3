"""Findings of the doctor: what it prints, and writes as JSON.

ok     as it should be
-      not used here, and why
note   training works, and this is worth knowing
fail   training would fail; the text says why, and the way out
"""

import textwrap
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Literal

from trl_packing.formatting.printable import escape_hidden

Status = Literal["ok", "-", "note", "fail"]

_NAMES = 18  # columns of the names of findings


@dataclass(frozen=True)
class Finding:
    """One line of the doctor: a name, and a sentence or a value."""

    status: Status
    name: str
    text: str


@dataclass(frozen=True)
class Section:
    """Findings under a heading, with a note beside it."""

    title: str
    findings: tuple[Finding, ...]
    note: str = ""


@dataclass(frozen=True)
class Diagnosis:
    """All sections, and the facts behind them as plain values for JSON."""

    sections: tuple[Section, ...]
    facts: dict[str, Any] = field(default_factory=dict)

    @property
    def failures(self) -> list[Finding]:
        """The reasons why training would fail; empty if it would not."""
        return self._of("fail")

    def _of(self, status: Status) -> list[Finding]:
        return [f for section in self.sections for f in section.findings if f.status == status]

    @property
    def verdict(self) -> str:
        """One sentence: whether this machine can train."""
        if not self.failures:
            return "Nothing here would stop a training run."
        reasons = len(self.failures)
        return f"Training would fail, for {reasons} reason{'s' * (reasons > 1)}:"

    def as_json(self) -> dict[str, Any]:
        """Return everything as plain values."""
        return {
            "trains": not self.failures,
            "failures": [f"{f.name}: {f.text}" for f in self.failures],
            "notes": [
                f"{f.name}: {f.text}"
                for s in self.sections
                for f in s.findings
                if f.status == "note"
            ],
            **self.facts,
        }

    def text(self, width: int = 80) -> str:
        """Return the diagnosis for a terminal of `width` columns."""
        lines: list[str] = []
        for section in self.sections:
            heading = section.title + f" ({section.note})" * bool(section.note)
            lines += [*textwrap.wrap(heading, width), *_lines(section.findings, width), ""]
        lines += textwrap.wrap(self.verdict, width)
        for failure in self.failures:
            lines += _wrap(f"{failure.name}: {failure.text}", "  - ", width)
        return "\n".join(lines)


def _lines(findings: tuple[Finding, ...], width: int) -> Iterator[str]:
    for finding in findings:
        name = finding.name if len(finding.name) < _NAMES else finding.name + " "
        yield from _wrap(finding.text, f"  {finding.status:4}  {name:{_NAMES}}", width)


def _wrap(text: str, start: str, width: int) -> list[str]:
    """Return `text` after `start`; further lines are indented by as much."""
    return textwrap.wrap(
        escape_hidden(text),
        max(width, len(start) + 20),
        initial_indent=start,
        subsequent_indent=" " * len(start),
        break_on_hyphens=False,
    )
