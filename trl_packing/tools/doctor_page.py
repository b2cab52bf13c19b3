"""The page of the doctor: the sections of a diagnosis as tables."""

from trl_packing.pages.page import cards, page, section, table
from trl_packing.tools.doctor_findings import Diagnosis


def doctor_page(diagnosis: Diagnosis) -> str:
    """Return the page of a diagnosis as HTML."""
    sections = []
    for part in diagnosis.sections:
        rows = [(f.status, f.name, f.text) for f in part.findings]
        sections.append(section(part.title, table(("", "", ""), rows), note=part.note))
    if diagnosis.failures:
        reasons = [(f.name, f.text) for f in diagnosis.failures]
        sections.insert(0, section(diagnosis.verdict, table(("", ""), reasons)))
    return page("trl-packing doctor", [cards(_cards(diagnosis)), *sections])


def _cards(diagnosis: Diagnosis) -> list[tuple[str, str]]:
    facts = diagnosis.facts
    device = facts["machine"]["devices"][0]
    found = [
        ("no" if diagnosis.failures else "yes", "this machine can train"),
        (f"{len(facts['machine']['devices'])} × {device['kind']}", device["name"]),
        (str(facts["attention"]["chosen"]), "attention"),
    ]
    memory = facts["memory"]
    if memory and memory["without"]:
        for key, name in (("without", "without"), ("with_checkpointing", "with")):
            found.append((f"{memory[key]['peak'] / 1e9:,.1f} GB", f"{name} gradient checkpointing"))
    return found
