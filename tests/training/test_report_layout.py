"""A report fits its terminal, shows hostile text as text, and draws what it counts."""

import re
from dataclasses import replace
from html.parser import HTMLParser

import pytest
from IPython.core.interactiveshell import InteractiveShell

from trl_packing.data.counts import PreparationCounts
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.report_layout import as_html, as_text

REPORT = PackingReport(
    ranks=2,
    accumulation=4,
    micro_batch="4 bins",
    attention="document-wise SDPA (cpu, float32)",
    capacity=1024,
    documents=1_150,
    tokens=560_000,
    trained_tokens=380_000,
    bins=548,
    micro_batches_per_epoch=138,
    steps_per_epoch=18,
    documents_per_step=1_150 / 18,
    padded_documents_per_step=32,
    given_in_steps={"max_steps": 100, "warmup_steps": 10, "eval_steps": 25},
    preparation=PreparationCounts(notes=("a note " * 30,)),
)
HOSTILE = "</td><script>alert(1)</script> \x1b[2J\u202e <img src=x onerror=alert(2)>"


def columns_of(text: str) -> int:
    lines = text.splitlines()
    assert len(lines[0]) == len(lines[-1]) == max(map(len, lines)), "the frame is broken"
    assert set(lines[-1]) == {"─"}
    return len(lines[0])


@pytest.mark.parametrize(("columns", "most"), [(50, 50), (72, 72), (100, 100), (240, 100), (9, 50)])
def test_the_report_fits_its_terminal(monkeypatch, columns, most):
    monkeypatch.setenv("COLUMNS", str(columns))
    text = str(REPORT)
    assert columns_of(text) <= most
    labels = [line[:13].strip() for line in text.splitlines()[1:-1]]
    assert [label for label in labels if label] == [
        *("documents", "packed into", "an epoch", "a step", "if padded", "attention", "checked")
    ]
    words = " ".join(text.split())
    assert all(" ".join(line.split()) in words for _, line in REPORT.lines()), "nothing is left out"


def test_a_report_in_a_file_has_100_columns(monkeypatch):
    monkeypatch.delenv("COLUMNS", raising=False)
    assert 90 < columns_of(str(REPORT)) <= 100


def test_a_word_that_is_too_long_is_broken():
    assert columns_of(as_text([("model", "x" * 300)], 60)) == 60


def test_control_characters_are_shown_as_text():
    text = as_text([("attention", HOSTILE)], 100)
    assert "\x1b" not in text
    assert "\u202e" not in text
    assert r"\x1b[2J\u202e" in text


class Tags(HTMLParser):
    """The tags, attributes and text of a piece of HTML."""

    def __init__(self, html: str):
        super().__init__()
        self.tags, self.attributes, self.text = [], [], ""
        self.feed(html)

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data):
        self.text += data


def test_a_notebook_shows_every_line_and_runs_nothing():
    report = replace(REPORT, attention=HOSTILE, preparation=PreparationCounts(notes=(HOSTILE,)))
    shown = Tags(report._repr_html_())
    assert set(shown.tags) == {"table", "caption", "tr", "th", "td"}
    assert {name for name, _ in shown.attributes} == {"style", "scope", "hidden"}
    assert "<script>alert(1)</script>" in shown.text
    assert "\x1b" not in shown.text
    for label, text in REPORT.lines()[:4]:
        assert label in shown.text
        assert text in shown.text
    assert "script" in Tags("<td><script>alert(1)</script></td>").tags, "the test sees no script"


def test_a_notebook_chooses_the_colors_of_text_and_background():
    """So that the table is readable on light and dark; only the mark of a warning has a color."""
    html = as_html([("loss", "mean"), ("", "warning: few steps")])
    assert re.findall(r"#[0-9a-f]{6}", html) == ["#d29922"]
    assert not re.search(r"[;\"](color|background-color):", html)
    assert "http" not in html


def test_a_notebook_shows_a_table_and_ipython_the_text():
    shown, _ = InteractiveShell.instance().display_formatter.format(REPORT)
    assert shown["text/plain"] == str(REPORT)
    assert shown["text/html"] == REPORT._repr_html_()
