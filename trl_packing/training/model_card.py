"""Say in the model card of a run what was packed, lost and checked.

README.md in output_dir, by TRL     →  the same, with a section "Packing" and the tag "trl-packing"
"""

from importlib.metadata import version
from pathlib import Path

from trl_packing.data.counts import quantity
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.report_layout import as_text

TAG = "trl-packing"
_HEADING = "### Packing"
_BEFORE = "### Framework versions"  # of TRL's template


def with_tag(tags: str | list[str] | None) -> list[str]:
    """Return the tags of a model card, and ours.

    Example:
        >>> with_tag("math"), with_tag(None)
        (['math', 'trl-packing'], ['trl-packing'])
    """
    given = [tags] if isinstance(tags, str) else list(tags or [])
    return given if TAG in given else [*given, TAG]


def describe_packing(output_dir: str, report: PackingReport) -> None:
    """Add the section on packing to the model card in a folder."""
    card = Path(output_dir) / "README.md"
    text = card.read_text(encoding="utf-8")
    section = f"{_HEADING}\n\n{paragraph(report)}\n\n```text\n{as_text(report.lines(), 100)}\n```\n"
    before, heading, after = text.partition(_BEFORE)
    card.write_text(f"{before.rstrip()}\n\n{section}\n{heading}{after}", encoding="utf-8")


def paragraph(report: PackingReport) -> str:
    """Return what was packed, shared, lost and checked, a sentence for each."""
    checked = f"Checked before training: {report.checked}."
    return " ".join(filter(None, [_packed(report), _shared(report), _lost(report), checked]))


def _packed(report: PackingReport) -> str:
    by = f"Trained by trl-packing {version('trl-packing')} without computing on padding"
    if report.documents is None:
        return f"{by}, on a stream of documents."
    counted = f"{quantity(report.documents, 'document')} ({report.tokens or 0:,} tokens)"
    if report.bins is None:
        return f"{by}: {counted}, not packed into bins."
    filled = "" if report.utilization is None else f", {report.utilization:.2%} filled"
    return (
        f"{by}: {counted} in {report.bins:,} rows of up to {report.capacity or 0:,} tokens{filled}."
    )


def _shared(report: PackingReport) -> str:
    prefixes = report.prefixes
    if prefixes is None or not prefixes.is_shared:
        return ""
    return f"Prefixes that documents share were computed once: {prefixes}."


def _lost(report: PackingReport) -> str:
    lost = report.preparation.before - report.preparation.after
    if not report.preparation.before.documents:
        return "Preparation was not counted."
    if not (lost.tokens or lost.trained or lost.documents > 0):
        return "Preparation lost nothing."
    return f"Preparation lost {lost}."
