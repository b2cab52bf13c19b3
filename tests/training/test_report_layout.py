"""A report fits its terminal, shows hostile text as text, and draws what it counts."""

import re
import sys
from dataclasses import replace
from html.parser import HTMLParser

import numpy as np
import pytest
from IPython.core.interactiveshell import InteractiveShell

from trl_packing.data.counts import PreparationCounts
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.histogram import Histogram
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
    lengths=Histogram.of(np.arange(1, 1151)),
    documents_by_bin=Histogram.of(np.array([2, 3, 3, 5])),
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


def test_a_histogram_counts_every_number_once():
    values = np.random.default_rng(0).integers(3, 9_000, 5_000)
    histogram = Histogram.of(values)
    assert len(histogram.counts) <= 32
    expected, _ = np.histogram(values, histogram.edges)
    assert list(histogram.counts) == expected.tolist()
    assert sum(histogram.counts) == 5_000
    assert Histogram.of(np.array([7, 7])) == Histogram((7, 8), (2,))


def test_the_plot_draws_the_counts():
    lengths, by_bin = REPORT.plot().axes
    (drawn,) = lengths.patches
    assert drawn.get_data().values.tolist() == list(REPORT.lengths.counts)
    assert lengths.get_xlabel() == "tokens of a document"
    assert [line.get_xdata()[0] for line in lengths.lines] == [1024]
    assert lengths.get_title(loc="right") == "max_length=1,024"
    assert by_bin.patches[0].get_data().edges.tolist() == [1.5, 2.5, 3.5, 4.5, 5.5], "on 2 to 5"
    assert len(replace(REPORT, documents_by_bin=None).plot().axes) == 1


def test_a_notebook_shows_the_plot_and_ipython_the_text():
    format_of = InteractiveShell.instance().display_formatter.format
    drawn, _ = format_of(REPORT.plot())
    assert drawn["image/png"].startswith(b"\x89PNG")
    shown, _ = format_of(REPORT)
    assert shown["text/plain"] == str(REPORT)
    assert shown["text/html"] == REPORT._repr_html_()


def test_a_missing_matplotlib_is_named(monkeypatch):
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    with pytest.raises(ValueError, match=r"pip install 'trl-packing\[plots\]'"):
        REPORT.plot()
    with pytest.raises(ValueError, match="not known of a stream"):
        replace(REPORT, lengths=None).plot()
