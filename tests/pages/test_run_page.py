"""The record of a run, its charts, and its page: every value is drawn, and any text is safe."""

import json
import math
import re

import pytest
from helpers.browser import HOSTILE, open_page
from hypothesis import given
from hypothesis import strategies as st

from trl_packing.pages.record import NOTHING, UNKNOWN, Point, RunRecord, Totals
from trl_packing.pages.run_page import charts_of, run_page, thinned

TEXT = "".join(HOSTILE)


def record(**changes):
    log = []
    for step in range(10, 110, 10):
        rest = ("learning_rate", "grad_norm", "tokens_per_second", "utilization", "entropy")
        numbers = {"loss": 30 / step, "epoch": step / 100, "step": step}
        log.append(numbers | dict.fromkeys(rest, 1))
    log[5:5] = [{"eval_loss": 1.0, "eval_loss_math": 0.5, "eval_runtime": 3.0, "step": 50}]
    log.append({"train_loss": 1.0, "train_runtime": 5.0, "train_seconds": 4.0, "step": 100})
    totals = {s: Totals(s * 20, s * 900, s * 500, s * 910, s * 0.5) for s in range(0, 101, 10)}
    values = {
        "name": "outputs/a",
        "path": "packed",
        "log": log,
        "totals": totals,
        "step": 100,
        "max_steps": 100,
        "status": "finished",
        "report": [["documents", "a report", False], ["checked", "packed − alone 0", False]],
        "verdict": "isolated",
        "settings": {"learning_rate": 1e-3, "seed": 1},
        "changed": ["learning_rate"],
        "versions": {"torch": "2.13"},
        "facts": {"model": "tiny"},
        "resumed": [50],
    }
    return RunRecord(**values | changes)


# --- the record -----------------------------------------------------------------------------------

LOG = [
    {"loss": 2.5, "epoch": 0.5, "step": 10},
    {"eval_loss": 2.0, "step": 10},
    {"loss": math.nan, "grad_norm": math.inf, "step": 20, "words": "Infinity and more"},
    {"loss": 2.0, "flag": True, "step": 25},
]


def test_a_point_joins_a_log_entry_with_the_totals_of_its_step():
    totals = {0: NOTHING, 10: Totals(30, 400, 200, 480, 1.5), 20: Totals(61, 800, 390, 960, 3.0)}
    made = RunRecord("a", log=LOG, totals=totals, step=20)
    first, second, third = made.series["loss"]
    assert first == (10, 30, 400, 1.5, 2.5)
    assert second[:4] == (20, 61, 800, 3.0)
    assert third == (25, None, None, None, 2.0), "the ranks have not shared their counts there"
    assert list(made.series) == ["loss", "epoch", "step", "eval_loss", "grad_norm"]
    assert RunRecord("a", totals=totals, step=25).total == UNKNOWN, "not those of an earlier step"


def test_a_record_is_the_same_after_it_was_written_and_read(tmp_path):
    file = tmp_path / "run.json"
    settings = {"a": None, "b": [1, 2.5, "NaN is a text here"]}
    written = record(log=LOG, settings=settings)
    json.loads(written.to_json(), parse_constant=pytest.fail)  # strict JSON
    file.write_text(written.to_json(), encoding="utf-8")
    read = RunRecord.load(file)
    assert read.to_json() == written.to_json()
    assert (read.totals, read.settings, read.resumed) == (written.totals, settings, [50])
    assert repr(read.log) == repr(LOG)  # NaN differs from itself
    for text in ("[]", "not json", '{"format": 2}', '{"format": 1}'):
        file.write_text(text, encoding="utf-8")
        with pytest.raises(ValueError, match=r"not the record|another version|Expecting value"):
            RunRecord.load(file)


# --- charts ---------------------------------------------------------------------------------------


def test_sources_of_the_training_share_a_chart_of_losses():
    log = [{"loss": 1.0, "loss_of_mine": 3.0, "step": step} for step in (1, 2)]
    for source, tokens in (("math", 30), ("code", 10)):
        for entry in log:
            names = ("loss", "num_documents", "num_trained_tokens")
            entry |= {f"{name}_{source}": 2 for name in names}
            entry[f"num_tokens_{source}"] = tokens * entry["step"]
    log.append({"train_loss_math": 1.0, "train_num_tokens_math": 90, "step": 2})
    main, rest = charts_of(record(log=log))
    assert [chart.title for chart in (*main, *rest)] == ["loss", "loss by source", "loss_of_mine"]
    assert list(main[1].curves) == ["loss_math", "loss_code"]


finite = st.floats(-1e6, 1e6)


@given(st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=300))
def test_thinned_curves_keep_order_ends_and_extremes(values):
    points = [Point(10 * i, 30 * i, 150 * i, 5.0 * i, value) for i, value in enumerate(values)]
    kept = thinned(points, 20)
    assert kept == points if len(values) <= 20 else len(kept) <= 20
    assert [point.step for point in kept] == sorted(point.step for point in kept)
    assert (kept[0], kept[-1]) == (points[0], points[-1])
    if not any(map(math.isnan, values)):
        shown = [point.value for point in kept]
        assert (max(shown), min(shown)) == (max(values), min(values))


# --- the page -------------------------------------------------------------------------------------


def written(folder, made):
    path = folder / "run.html"
    path.write_text(run_page(made))
    return path


def test_the_page_shows_figures_report_settings_and_versions(tmp_path):
    with open_page(written(tmp_path, record())) as opened:
        text = opened.text()
        for words in (
            *("2,000", "90,000", "50.0 s", "a report", "packed − alone 0", "isolated"),
            *("learning_rate", "2.13", "of 100 steps", "packed and padded runs can be compared"),
        ):
            assert words in text, words
        assert "seed" not in text, "it has its default"
        marks = "[...document.querySelectorAll('.mark title')].map(t => t.textContent)"
        assert set(opened.evaluate(marks)) == {"resumed at step 50"}
        assert opened.problems() == []
        opened.click("details summary")
        assert opened.evaluate("document.querySelectorAll('details .line').length") == 1


def test_values_in_the_page_are_those_of_the_log():
    values = (6.123456789, math.nan, -math.inf, 1e-9)
    page = run_page(record(log=[{"loss": x, "step": 10 * i} for i, x in enumerate(values, 1)]))
    data = json.loads(re.search(r'id="data">(.*?)</script>', page)[1])
    drawn = data["charts"][0]["curves"][0]["points"]
    assert [point[4] for point in drawn] == [6.123457, None, None, 1e-9]  # a value, no bound
    assert drawn[0][:4] == [10, 200, 9000, 5.0]
    assert "2 values of loss NaN or infinite, left out (from step 20)" in page


ODD = [
    record(log=[], totals={}, step=0),
    record(totals={}, log=[{"loss": math.nan, "step": 1}, {"loss": math.inf, "step": 2}]),
    record(log=[{"loss": 0.0, "step": 100}], status="running"),
]


@pytest.mark.parametrize("made", ODD, ids=["nothing logged", "no number", "one zero"])
def test_odd_runs_have_a_page(tmp_path, made):
    with open_page(written(tmp_path, made), width=390) as opened:
        assert opened.problems() == []


def test_hostile_texts_are_shown_and_do_nothing(tmp_path):
    log = [{"loss": 1.0, f"eval_loss_{TEXT}": 2.0, "eval_loss": 1.0, TEXT: 1.0, "step": 10}]
    texts = dict.fromkeys(("name", "path", "status", "written"), TEXT)
    tables = {"settings": {TEXT: {TEXT: TEXT}}, "versions": {TEXT: TEXT}, "facts": {TEXT: TEXT}}
    lists = {"report": [["loss", TEXT, False]], "changed": [TEXT], "notes": [TEXT], "log": log}
    made = record(**texts, **tables, **lists)
    with open_page(written(tmp_path, made), width=390, dark=True) as opened:
        assert "<img src=x" in opened.text("table")
        opened.hover("[data-chart='1'] > svg")
        assert "<img src=x" in opened.text("[data-chart='1'] .tip")
        assert opened.problems() == []


# --- the controls of its curves -------------------------------------------------------------------


def test_axis_scale_and_smoothing_are_chosen_and_survive_a_reload(tmp_path):
    log = [{"loss": x, "step": 10 * i} for i, x in enumerate((4.0, 3.0, math.nan, 2.0, 1.0), 1)]
    drawing = "document.querySelector('[data-chart=\"0\"] > svg').innerHTML"
    smooth = "document.getElementById('smooth')"
    with open_page(written(tmp_path, record(log=log))) as opened:
        assert "documents trained" in (shown := opened.evaluate(drawing))
        line = opened.evaluate("document.querySelector('.line').getAttribute('d')")
        assert (line.count("M"), line.count("L")) == (2, 2), "four values with a gap"
        assert opened.evaluate("document.getElementById('warning').hidden")
        opened.click("#log")
        assert shown != (logarithmic := opened.evaluate(drawing))
        opened.evaluate(f"{smooth}.value = 0.9; {smooth}.dispatchEvent(new Event('input'))")
        assert opened.evaluate(drawing) != logarithmic
        opened.hover("[data-chart='0'] > svg")
        assert "smoothed" in opened.text(".tip")
        opened.click("input[value=steps] + span")
        assert "optimizer steps" in opened.evaluate(drawing)
        assert "over documents or tokens" in opened.text("#warning")
        opened.click("input[value=hours] + span")
        opened.reload()
        assert "seconds" in opened.evaluate(drawing)
        assert opened.problems() == []
