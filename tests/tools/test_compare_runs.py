"""Runs are compared where they trained equally much; what cannot be compared is said."""

import json
import math

import pytest
from helpers.browser import HOSTILE, open_page
from helpers.command import says
from transformers.trainer import TRAINER_STATE_NAME

from trl_packing.pages.record import FILE, NOTHING, RunRecord, Totals
from trl_packing.pages.runs import compare_page
from trl_packing.tools.compare_runs import compare, comparison_text, load_run


def made(name, *, documents_per_step, steps=4, losses=None, **changes):
    """A run that logs every step, and whose loss is 10, 9, 8, ..."""
    losses = losses or [10.0 - i for i in range(steps)]
    log = [{"loss": loss, "step": i} for i, loss in enumerate(losses, 1)]
    totals = {
        i: Totals(i * documents_per_step, 100 * i * documents_per_step, i, 2 * i, 3.0 * i)
        for i in range(1, steps + 1)
    }
    values = {
        "log": log,
        "totals": {0: NOTHING, **totals},
        "step": steps,
        "status": "finished",
        "settings": {"seed": 1, "output_dir": name, "packing": documents_per_step > 4},
        "versions": {"torch": "2"},
        "facts": {"device": "CPU"},
    }
    return RunRecord(name, **values | changes)


PACKED = made("out/packed", documents_per_step=20)
PADDED = made("out/padded", documents_per_step=4, steps=10)
TRL = [{"loss": 5.0 - i, "num_tokens": 1000.0 * i, "step": 5 * i} for i in (1, 2, 3)]


def saved(folder, record):
    folder.mkdir(parents=True, exist_ok=True)
    (folder / FILE).write_text(record.to_json())
    return str(folder)


def state(folder, history):
    folder.mkdir(parents=True, exist_ok=True)
    content = {"log_history": history, "global_step": history[-1]["step"], "max_steps": 9}
    (folder / TRAINER_STATE_NAME).write_text(json.dumps(content))
    return str(folder)


def test_losses_are_compared_after_equally_many_documents():
    found = compare([PACKED, PADDED])
    assert (found["runs"], found["over"], found["at"]) == (
        ["out/packed", "out/padded"],
        "documents",
        40,
    )
    # 40 documents are 2 packed steps and 10 padded ones.
    assert found["losses"] == {"loss": [9.0, 1.0]}
    assert found["figures"]["loss"] == [7.0, 1.0], "at the end of each run"
    assert found["figures"]["documents a step"] == [20.0, 4.0]
    assert found["figures"]["tokens a second"] == [80 * 100 / 12, 40 * 100 / 30]
    assert found["differing"] == {"packing": [True, False]}
    unknown = compare([PACKED, made("out/u", documents_per_step=20, totals={})])
    assert (unknown["over"], unknown["losses"]) == (None, {})
    assert "No axis is known" in comparison_text(unknown)


def test_a_run_of_trl_is_compared_over_its_tokens(tmp_path):
    found = compare([PACKED, load_run(state(tmp_path / "t", TRL))])
    assert (found["over"], found["at"], found["losses"]) == ("tokens", 3000, {"loss": [10.0, 2.0]})
    assert found["figures"]["documents"] == [80, None]
    assert found["differing"] == {}, "those of the other run are not recorded"
    assert "has only tokens (num_tokens" in " ".join(comparison_text(found).split())


def test_a_run_is_found_by_folder_checkpoint_and_file(tmp_path):
    ours = saved(tmp_path / "ours", PACKED)
    for given in (ours, f"{ours}/{FILE}"):
        assert load_run(given).points("loss") == PACKED.points("loss")
    state(tmp_path / "theirs" / "checkpoint-5", TRL[:1])
    state(tmp_path / "theirs" / "checkpoint-15", TRL)
    for given in ("theirs", f"theirs/checkpoint-15/{TRAINER_STATE_NAME}"):
        assert len(load_run(str(tmp_path / given)).points("loss")) == 3
    assert len(load_run(str(tmp_path / "theirs/checkpoint-5")).points("loss")) == 1


MISTAKES = [
    (["{a}"], "has nothing to be compared with; name two runs"),
    (["{a}", "{a}/none"], "holds no run (run.json or trainer_state.json); name the output_dir"),
    (["{a}", "{broken}"], "cannot be read as a run"),
    (["{a}", "{a}", "--html", "{a}/no/c.html"], "in a folder that exists"),
]


@pytest.mark.parametrize(("arguments", "message"), MISTAKES)
def test_mistakes_are_one_sentence(tmp_path, capsys, arguments, message):
    places = {"a": saved(tmp_path / "a", PACKED), "broken": str(tmp_path / "broken")}
    (tmp_path / "broken").mkdir()
    (tmp_path / "broken" / FILE).write_text('{"format": 1, "name"')
    words = (argument.format(**places) for argument in arguments)
    said = says(capsys, "compare", *words, status=2).strip()
    assert message in said
    assert len(said.splitlines()) == 1


def test_json_holds_the_comparison_and_no_nan(tmp_path, capsys):
    broken = made("n", documents_per_step=20, losses=[1.0, 2.0, 3.0, math.nan])
    runs = [saved(tmp_path / "a", PACKED), saved(tmp_path / "n", broken)]
    found = json.loads(says(capsys, "compare", *runs, "--json"), parse_constant=pytest.fail)
    assert found["figures"]["loss"] == [7.0, "NaN"]


def test_runs_are_told_apart_by_a_difference_however_small():
    near = made("out/near", documents_per_step=20, losses=[10.0, 9.0, 8.0, 7.0 + 2e-6])
    text = comparison_text(compare([PACKED, near]))
    (loss, *_) = [line for line in text.splitlines() if line.startswith("loss ")]
    assert loss.split() == ["loss", "7.0000", "7.0000", "+2e-06", "(+0.0%)"]


def test_a_terminal_of_80_columns_shows_all_that_differs(monkeypatch):
    monkeypatch.setenv("COLUMNS", "80")
    name = "gradient_checkpointing_kwargs"
    settings = [{name: ["module"] * 20 + [last], "seed": seed} for last, seed in ((1, 1), (2, "1"))]
    first, second = (
        made(f"out/{'long' * 12}", documents_per_step=20, settings=one) for one in settings
    )
    found = compare([first, second])
    text = comparison_text(found)
    assert max(map(len, text.splitlines())) <= 80
    rows = text.partition("that differ:")[2].split(name)[1].splitlines()
    assert {"1]", "2]"} < {*rows[-1].split()}
    assert "seed" not in text, "1 and '1' look alike"
    assert max(map(len, comparison_text(compare([PACKED] * 5)).splitlines())) <= 80


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_shows_the_curves_of_all_runs(tmp_path, width):
    text = "".join(HOSTILE)
    changes = {"settings": {text: 1}, "versions": {text: "2"}, "notes": [text]}
    hostile = made(text, documents_per_step=20, **changes)
    records = [PACKED, hostile, load_run(state(tmp_path / "t", TRL))]
    assert "\x1b" not in comparison_text(compare(records))
    path = tmp_path / "compare.html"
    path.write_text(compare_page(records, compare(records)))
    with open_page(path, width=width) as opened:
        assert opened.evaluate("document.querySelectorAll('[data-chart=\"0\"] .line').length") == 3
        checked = "document.querySelector('input[name=axis]:checked').value"
        assert opened.evaluate(checked) == "tokens"
        opened.click("input[value=steps] + span")
        assert "over documents or tokens" in opened.text("#warning")
        assert "<img src=x" in opened.text()
        assert opened.problems() == []
