"""Curves that the reader explores: every value is drawn, gaps are said, nothing breaks out."""

import math

import pytest
from helpers.browser import HOSTILE, open_page
from hypothesis import given
from hypothesis import strategies as st

from trl_packing.training.curves import Chart, Curve, Curves, thinned
from trl_packing.training.page import asset, page

finite = st.floats(-1e6, 1e6)


def points(values, *, documents=3):
    """Points of steps 10, 20, ...; a step holds some documents of 5 tokens."""
    return [
        (10 * i, 10 * i * documents, 50 * i * documents, 5.0 * i, value)
        for i, value in enumerate(values, 1)
    ]


def curves(*charts, **changes):
    return Curves(charts, axis="documents", **changes)


def written(folder, made, title="curves"):
    path = folder / "page.html"
    path.write_text(page(title, made.sections(main=1), data=made.data(), script=asset("curves.js")))
    return path


@given(st.lists(st.one_of(finite, st.just(math.nan)), min_size=1, max_size=300))
def test_thinned_curves_keep_order_ends_and_extremes(values):
    given_points = points(values)
    kept = thinned(given_points, 20)
    assert len(kept) <= 20 or len(values) <= 20
    assert kept == sorted(kept, key=lambda point: point[0])
    assert (kept[0], kept[-1]) == (given_points[0], given_points[-1])
    assert set(map(id, kept)) <= set(map(id, given_points))
    if len(values) <= 20:
        assert kept == given_points
    elif not any(map(math.isnan, values)):
        shown = [point[4] for point in kept]
        assert (max(shown), min(shown)) == (max(values), min(values))


def test_values_in_the_page_are_those_of_the_points():
    values = [6.123456789, math.nan, -math.inf, 1e-9]
    made = curves(Chart("loss", [Curve("loss", points(values))]))
    drawn = made.data()["charts"][0]["curves"][0]["points"]
    assert [p[4] for p in drawn] == [6.123457, None, None, 1e-9]  # a value, no bound
    assert drawn[0][:4] == [10, 30, 150, 5.0]
    assert "2 values of loss NaN or infinite, left out (step 20, 30)" in "".join(
        made.sections(main=1)
    )


# --- in a browser -----------------------------------------------------------------------------


def two_curves():
    first = Curve("first", points([4.0, 3.0, math.nan, 2.0, 1.0]), 0)
    second = Curve("second", points([5.0, 4.0, 3.0], documents=7), 1)
    return curves(
        Chart("loss", [first, second], may_be_log=True),
        Chart("other", [Curve("x", points([1.0, 2.0]))]),
        marks=[("resumed at step 20", [20, 60, 300, 10.0])],
        warnings={"steps": "not over steps"},
    )


def labels(page, chart=0):
    """Return the texts of a chart."""
    texts = f"document.querySelectorAll('[data-chart=\"{chart}\"] > svg text')"
    return page.evaluate(f"[...{texts}].map(t => t.textContent)")


def line(page, place=0):
    """Return the corners of a drawn line, and whether it has a gap."""
    path = page.evaluate(
        f"document.querySelectorAll('[data-chart=\"0\"] .line')[{place}].getAttribute('d')"
    )
    return path.count("M") + path.count("L"), path.count("M") - 1


def test_the_axis_is_chosen_and_survives_a_reload(tmp_path):
    with open_page(written(tmp_path, two_curves())) as opened:
        assert "documents trained" in labels(opened)
        assert line(opened) == (4, 1), "four values with a gap"
        assert line(opened, 1) == (3, 0)
        assert opened.evaluate("document.querySelectorAll('[data-chart=\"0\"] .gap').length") == 1
        assert opened.evaluate("document.getElementById('warning').hidden")
        opened.click("input[value=steps] + span")
        assert "optimizer steps" in labels(opened)
        assert opened.text("#warning") == "not over steps"
        opened.click("input[value=hours] + span")
        assert any("seconds" in text for text in labels(opened))
        assert "over=hours" in opened.evaluate("location.hash")
        opened.reload()
        assert any("seconds" in text for text in labels(opened))
        assert opened.problems() == []


def test_a_hovered_place_shows_the_values_of_all_curves_there(tmp_path):
    with open_page(written(tmp_path, two_curves())) as opened:
        opened.hover("[data-chart='0'] > svg")
        said = opened.text(".tip")
        # The middle of the axis is at 105 documents: 50 steps of the first, near 140 of the second.
        assert "first" in said
        assert "second" in said
        assert "documents" in said
        assert "5" in said
        assert opened.evaluate("document.querySelectorAll('.cursor').length") == 2, "in both charts"


def test_a_logarithmic_axis_and_smoothing_change_the_drawing(tmp_path):
    with open_page(written(tmp_path, two_curves())) as opened:
        before = opened.evaluate("document.querySelector('[data-chart=\"0\"]').innerHTML")
        opened.click("#log")
        logarithmic = opened.evaluate("document.querySelector('[data-chart=\"0\"]').innerHTML")
        opened.evaluate(
            "(s => { s.value = 0.9; s.dispatchEvent(new Event('input')); })"
            "(document.getElementById('smooth'))"
        )
        smooth = opened.evaluate("document.querySelector('[data-chart=\"0\"]').innerHTML")
        assert len({before, logarithmic, smooth}) == 3
        opened.hover("[data-chart='0'] > svg")
        assert "smoothed" in opened.text(".tip")
        assert opened.problems() == []


@pytest.mark.parametrize("dark", [False, True])
@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_names_are_shown_and_do_nothing(tmp_path, width, dark):
    made = curves(
        Chart(HOSTILE[0], [Curve(text, points([2.0, 1.0]), i) for i, text in enumerate(HOSTILE)]),
        warnings={"steps": "".join(HOSTILE)},
        marks=[("".join(HOSTILE), [10, 30, 150, 5.0])],
    )
    with open_page(written(tmp_path, made, HOSTILE[1]), width=width, dark=dark) as opened:
        opened.click("input[value=steps] + span")
        opened.hover("[data-chart='0'] > svg")
        assert opened.problems() == []
        assert HOSTILE[2] in opened.text(".legend")
        assert HOSTILE[2] in opened.text(".tip")
