"""Pages show any text and do nothing else, and charts the numbers that they are given."""

import re

import numpy as np
import pytest
from helpers.browser import HOSTILE, open_page

from trl_packing.cli.program import check_can_write
from trl_packing.pages.histograms import histogram
from trl_packing.pages.page import render

TEMPLATE = """{% extends "page.html" %}
{% from "parts.html" import bars, card, cards, section, table %}
{% block body %}
{% call section(texts[1], texts[4]) %}
{% call cards() %}{{ card(texts[2], texts[3]) }}{% endcall %}
{% endcall %}
{{ table(texts, [texts, [2]]) }}
{% set items = [{"name": texts[0], "size": 2}, {"name": "b", "size": 1}] %}
{% call(item) bars(items, "size") %}{{ texts[3] }}{% endcall %}
<p id="said" title="{{ texts[3] }}"></p>
{% endblock %}"""


def written(tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(text)
    return path


def good_page(tmp_path):
    (tmp_path / "template.html").write_text(TEMPLATE)
    (tmp_path / "show.js").write_text("document.querySelector('#said').textContent = data.text;")
    values = {"texts": list(HOSTILE), "data": {"text": "".join(HOSTILE)}, "script": "show.js"}
    return render(tmp_path / "template.html", title=HOSTILE[0], note=HOSTILE[6], **values)


def test_hostile_text_is_shown_and_does_nothing_else(tmp_path):
    with open_page(written(tmp_path, good_page(tmp_path))) as opened:
        assert opened.problems() == []
        assert opened.text("#said") == "".join(HOSTILE)
        for place in ("table", "h1", "h2", ".cards", ".bars"):
            assert any(text in opened.text(place) for text in HOSTILE)
        assert "\\u202e\\x1b[2Jbackwards" in opened.text("table")
        assert opened.evaluate("document.querySelector('.bars i + i, .bar i').style.width")


def test_hostile_text_that_acts_is_seen(tmp_path):
    with open_page(written(tmp_path, f"<!doctype html><p>{HOSTILE[0]}</p>")) as opened:
        assert "hostile text acts" in "\n".join(opened.problems())


def test_a_page_replaces_an_older_page_and_nothing_else(tmp_path):
    check_can_write(str(written(tmp_path, good_page(tmp_path))))
    data = tmp_path / "c.jsonl"
    data.write_text('{"text": "a"}\n')
    for path, problem in ((data, "exists and is no page"), (tmp_path, "must name a file")):
        with pytest.raises(ValueError, match=f"^--html .*{problem}"):
            check_can_write(str(path))


# --- charts ---------------------------------------------------------------------------------------

BAR = re.compile(r"([\d.,]+)(?: to ([\d.,]+))?: ([\d,]+) ")


def shown(chart):
    """Return first value, last value and count of each bar."""
    titles = [BAR.match(title.replace(",", "")) for *_, title in chart["bars"]]
    return [(float(t[1]), float(t[2] or t[1]), int(t[3])) for t in titles]


LONG_TAIL = np.append(np.full(900, 100), [5, 40_000])  # its axis is logarithmic
DRAWN = [np.random.default_rng(0).integers(1, high, 5000) for high in (4, 33, 40_001)]


@pytest.mark.parametrize("values", [*DRAWN, LONG_TAIL], ids=["3", "32", "40,000", "long tail"])
def test_the_bars_of_a_histogram_hold_each_value_once(values):
    found = shown(histogram(values, label="tokens", counted="documents"))
    assert 2 < len(found) < 45
    for first, last, count in found:
        assert count == ((values >= first) & (values <= last)).sum()
    assert sum(count for *_, count in found) == len(values)
