"""The browser of the page tests sees what a page may not do: each check has a negative control."""

import json
import time

import pytest
from helpers.browser import HOSTILE, open_page

from trl_packing.training.page import cards, escape, page, section, table


def written(tmp_path, text):
    path = tmp_path / "page.html"
    path.write_text(text)
    return path


def good_page(script="document.querySelector('#said').textContent = data.text;"):
    return page(
        HOSTILE[0],
        [
            section(HOSTILE[1], cards([(HOSTILE[2], HOSTILE[3])]), note=HOSTILE[4]),
            section("table", table(HOSTILE, [HOSTILE])),
            f'<p id="said" title="{escape(HOSTILE[3])}"></p>',
        ],
        data={"text": "".join(HOSTILE)},
        script=script,
    )


def says(opened, problem):
    """Return whether a problem is among those of a page, of which some are told a moment later."""
    end = time.monotonic() + 30
    while not (found := problem in "\n".join(opened.problems())):
        if time.monotonic() > end:
            break
    return found


def test_hostile_text_is_shown_and_does_nothing_else(tmp_path):
    with open_page(written(tmp_path, good_page())) as opened:
        assert opened.problems() == []
        assert opened.text("#said") == "".join(HOSTILE)
        assert "<img src=x onerror" in opened.text("table")


@pytest.mark.parametrize(
    ("text", "problem"),
    [
        ("<script>missing()</script>", "error: ReferenceError: missing is not defined"),
        ("<script>setTimeout(() => missing())</script>", "error: ReferenceError: missing"),
        ("<script>fetch('http://localhost:9/x')</script>", "request: http://localhost:9/x"),
        ("<div style='width: 3000px'>wide</div>", "the page is 30"),
        *[(text, "hostile text acts") for text in (*HOSTILE[:1], *HOSTILE[2:4], HOSTILE[6])],
    ],
)
def test_a_bad_page_is_caught(tmp_path, text, problem):
    with open_page(written(tmp_path, f"<!doctype html><p>{text}</p>")) as opened:
        assert says(opened, problem), opened.problems()


def test_the_policy_refuses_what_a_page_loads(tmp_path):
    path = written(
        tmp_path, good_page().replace("<h1>", "<img src='http://localhost:9/a.png'><h1>")
    )
    with open_page(path) as opened:
        assert says(opened, "Content Security Policy"), opened.problems()


def test_data_that_ends_its_script_is_caught(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.training.page.json_in_html", json.dumps)
    with open_page(written(tmp_path, good_page())) as opened:
        assert "hostile text acts" in opened.problems()
