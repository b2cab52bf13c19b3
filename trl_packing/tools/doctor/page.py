"""The page of the doctor: a diagnosis as tables, and the memory of a step as bars."""

from typing import Any

from trl_packing.pages.page import bars, cards, columns, escape, figure, page, section
from trl_packing.tools.doctor.findings import Diagnosis, Finding, Section

_COLORS = {"ok": "good", "-": "note", "note": "warn", "fail": "bad"}  # classes of page.css


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis as HTML."""
    sections = [_section(part, diagnosis.facts) for part in diagnosis.sections]
    if diagnosis.failures:
        sections.insert(0, section(diagnosis.verdict, _table(diagnosis.failures)))
    return page("trl-packing doctor", [cards(_cards(diagnosis)), *sections])


def _section(part: Section, facts: dict[str, Any]) -> str:
    memory = facts["memory"]
    charts = _memory_bars(memory) if part.title == "Memory" and memory["without"] else ""
    return section(part.title, _table(part.findings), charts, note=part.note)


def _table(findings: Any) -> str:
    rows = "".join(_row(finding) for finding in findings)
    return f'<div class="scroll"><table class="words"><tbody>{rows}</tbody></table></div>'


def _row(finding: Finding) -> str:
    color = _COLORS[finding.status]
    return (
        f'<tr><td class="{color}">{escape(finding.status)}</td><td>{escape(finding.name)}</td>'
        f"<td>{escape(finding.text)}</td></tr>"
    )


def _cards(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    facts = diagnosis.facts
    devices, memory = facts["machine"]["devices"], facts["memory"]
    found = [
        ("no" if diagnosis.failures else "yes", "this machine can train"),
        (f"{len(devices)} × {devices[0]['kind']}", devices[0]["name"]),
        (str(facts["attention"]["chosen"]), "attention"),
    ]
    if memory and memory["without"]:
        for key, name in (("without", "without"), ("with_checkpointing", "with")):
            found.append((_gb(memory[key]["peak"]), f"a step {name} gradient checkpointing"))
    return found


def _memory_bars(memory: dict[str, Any]) -> str:
    states = {
        name: memory["states"][name] or 0 for name in ("parameters", "gradients", "optimizer")
    }
    figures = []
    for key, name in (("without", "Without"), ("with_checkpointing", "With")):
        activations = memory[key]["peak"] - sum(states.values())
        parts = (states | {"activations": activations}).items()
        chart = bars([(part, size / 1e9, _gb(size)) for part, size in parts])
        total = f"{_gb(memory[key]['peak'])} at most"
        figures.append(figure(f"{name} gradient checkpointing", chart, note=total))
    return columns(*figures)


def _gb(size: float) -> str:
    return f"{size / 1e9:,.2f} GB"
