"""The record of a run survives a file, NaN included, and joins the log with what was trained."""

import json
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from trl_packing.training.run_record import NOTHING, UNKNOWN, RunRecord, Totals

LOG = [
    {"loss": 2.5, "epoch": 0.5, "step": 10},
    {"eval_loss": 2.0, "step": 10},
    {"loss": math.nan, "grad_norm": math.inf, "step": 20, "words": "Infinity and more"},
    {"loss": 2.0, "flag": True, "step": 25},
]


def record(**changes):
    totals = {0: NOTHING, 10: Totals(30, 400, 200, 480, 1.5), 20: Totals(61, 800, 390, 960, 3.0)}
    return RunRecord(**{"name": "a", "log": LOG, "totals": totals, "step": 20} | changes)


def test_a_point_joins_a_log_entry_with_the_totals_of_its_step():
    first, second, third = record().points("loss")
    assert first == (10, 30, 400, 1.5, 2.5)
    assert second[:4] == (20, 61, 800, 3.0)
    assert math.isnan(second.value)
    assert third == (25, None, None, None, 2.0), "the ranks have not shared their counts there"
    assert record().points("eval_loss") == [(10, 30, 400, 1.5, 2.0)]
    assert record().names() == ["loss", "epoch", "step", "eval_loss", "grad_norm"]


def test_the_totals_of_the_run_are_those_of_its_last_step():
    assert record().total == Totals(61, 800, 390, 960, 3.0)
    assert record(step=25).total == UNKNOWN, "not those of an earlier step"


def test_what_is_unknown_before_stays_unknown_in_the_sum():
    some = Totals(1, 2, 3, None, 0.5)
    assert NOTHING.plus(some) == some
    assert UNKNOWN.plus(some) == UNKNOWN


def test_a_record_is_the_same_after_it_was_written_and_read():
    settings = {"a": None, "b": [1, 2.5, "NaN is a text here"]}
    written = record(settings=settings, versions={"torch": "2"}, resumed=[10])
    json.loads(written.to_json(), parse_constant=pytest.fail)  # strict JSON
    read = RunRecord.from_json(written.to_json())
    assert read.to_json() == written.to_json()
    assert (read.totals, read.settings, read.resumed) == (written.totals, settings, [10])
    assert repr(read.log) == repr(LOG)  # NaN differs from itself


@given(st.floats())
def test_every_float_survives(value):
    (point,) = RunRecord.from_json(
        RunRecord("a", log=[{"loss": value, "step": 1}]).to_json()
    ).points("loss")
    assert point.value == value or (math.isnan(value) and math.isnan(point.value))


def test_a_growing_log_is_read_to_its_end():
    """Entries are converted once: a run writes its record many times."""
    growing = record(log=LOG[:1])
    assert len(growing.points("loss")) == 1
    assert len(RunRecord.from_json(growing.to_json()).log) == 1
    growing.log = LOG
    assert [p.step for p in growing.points("loss")] == [10, 20, 25]
    assert RunRecord.from_json(growing.to_json()).names() == record().names()
    assert growing.to_json() == record().to_json()


def test_objects_in_a_log_become_texts():
    class Odd:
        def __str__(self):
            return "odd"

    read = RunRecord.from_json(RunRecord("a", log=[{"x": Odd(), "step": 1}]).to_json())
    assert read.log == [{"x": "odd", "step": 1}]


@pytest.mark.parametrize(
    "text", ["{}", "[]", "3", "not json", '{"format": 2}', '{"format": 1, "name": "a", "log": 3}']
)
def test_another_file_is_refused(text):
    RunRecord.from_json(record().to_json())  # the control
    with pytest.raises(ValueError):
        RunRecord.from_json(text)


@pytest.mark.parametrize("totals", ['["30", 400, ', "[30, 400, 5, ", '{"documents": 30}, ['])
def test_damaged_totals_are_refused(totals):
    text = record().to_json()
    with pytest.raises(ValueError):
        RunRecord.from_json(text.replace("[30, 400, ", totals))
    assert "[30, 400, " in text
