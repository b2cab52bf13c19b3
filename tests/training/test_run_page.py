"""The page of a run shows its curves, report and settings, whatever texts they hold."""

import math

import pytest
from helpers.browser import HOSTILE, open_page

from trl_packing.training.run_curves import charts_of, num_main
from trl_packing.training.run_page import run_page
from trl_packing.training.run_record import RunRecord, Totals

TEXT = "".join(HOSTILE)


def record(**changes):
    log = []
    for step in range(10, 110, 10):
        log.append(
            {
                "loss": 30 / step,
                "learning_rate": 1e-3,
                "grad_norm": 1.0,
                "epoch": step / 100,
                "tokens_per_second": 5000.0,
                "utilization": 0.99,
                "entropy": 2.0,
                "step": step,
            }
        )
        if step % 50 == 0:
            log.append(
                {
                    "eval_loss": 1.0,
                    "eval_loss_math": 0.5,
                    "eval_loss_code": 1.5,
                    "eval_runtime": 3.0,
                    "eval_num_documents_code": 7,
                    "step": step,
                }
            )
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
        "report": [["documents", "a report"], ["checked", "packed − alone 0"]],
        "verdict": "isolated",
        "settings": {"learning_rate": 1e-3, "seed": 1},
        "changed": ["learning_rate"],
        "versions": {"torch": "2.13"},
        "facts": {"model": "tiny"},
        "resumed": [50],
    }
    return RunRecord(**values | changes)


def written(folder, made):
    path = folder / "run.html"
    path.write_text(run_page(made))
    return path


def test_charts_are_grouped_by_kind_and_figures_of_the_whole_run_have_none():
    charts = charts_of([record()])
    main = [chart.title for chart in charts[: num_main(charts)]]
    assert main == [
        "loss",
        "eval_loss",
        "learning rate",
        "gradient norm",
        "tokens per second",
        "utilization",
    ]
    assert [chart.title for chart in charts[num_main(charts) :]] == ["entropy"]
    assert [c.name for c in charts[1].curves] == ["eval_loss", "eval_loss_math", "eval_loss_code"]


def test_sources_of_the_training_share_a_chart_of_losses_and_one_of_tokens():
    log = [
        {
            "loss": 1.0,
            f"loss_{s}": 1.0,
            f"num_documents_{s}": 2,
            f"num_trained_tokens_{s}": 5,
            "loss_code": 2.0,
            "num_documents_code": 1,
            "num_tokens_math": 30 * step,
            "num_tokens_code": 10 * step,
            "num_trained_tokens_code": 4,
            "loss_of_mine": 3.0,
            "step": step,
        }
        for s in ("math",)
        for step in (1, 2)
    ]
    log.append({"train_loss_math": 1.0, "train_num_tokens_math": 90, "step": 2})
    charts = charts_of([record(log=log)])
    titles = ["loss", "loss by source", "share of tokens by source", "loss_of_mine"]
    assert [chart.title for chart in charts] == titles
    assert num_main(charts) == 3
    assert [c.name for c in charts[1].curves] == ["loss_math", "loss_code"]
    shares = {c.name: [p.value for p in c.points] for c in charts[2].curves}
    assert shares == {"math": [0.75, 0.75], "code": [0.25, 0.25]}
    assert charts[2].percent
    # An interval of a stream may lack a source.
    lacking = [log[0], {n: v for n, v in log[1].items() if n != "num_tokens_code"}]
    of_stream = charts_of([record(log=lacking)])[2].curves
    assert [[p.value for p in curve.points] for curve in of_stream] == [[0.75, 1.0], [0.25, 0.0]]
    # Two runs: a chart for each loss, with a curve for each run.
    both = charts_of([record(log=log), record(log=log, name="outputs/b")])
    assert [c.title for c in both] == ["loss", "loss_math", "loss_code", "loss_of_mine"]


def test_a_metric_of_the_users_gets_a_chart():
    log = [{"my_reward": 0.5, "step": 1}, {"my_reward": 0.6, "step": 2}]
    (chart,) = charts_of([record(log=log)])
    assert chart.title == "my_reward"
    assert num_main([chart]) == 0


def test_the_page_shows_figures_report_settings_and_versions(tmp_path):
    with open_page(written(tmp_path, record())) as opened:
        text = opened.text()
        for words in (
            "2,000",
            "90,000",
            "50.0 s",
            "a report",
            "packed − alone 0",
            "isolated",
            "learning_rate",
            "2.13",
            "of 100 steps",
            "packed and padded runs can be compared",
        ):
            assert words in text, words
        assert "seed" not in text, "it has its default"
        marks = opened.evaluate(
            "[...document.querySelectorAll('.mark title')].map(t => t.textContent)"
        )
        assert set(marks) == {"resumed at step 50"}
        assert opened.problems() == []
        opened.click("details summary")
        assert opened.evaluate("document.querySelectorAll('details .line').length") == 1


@pytest.mark.parametrize(
    "made",
    [
        record(log=[], totals={}, step=0),
        record(totals={}),
        record(log=[{"loss": math.nan, "step": 1}, {"loss": math.inf, "step": 2}]),
        record(log=[{"loss": 0.0, "step": 100}]),
        record(status="running"),
    ],
    ids=["nothing logged", "steps alone", "no number", "one zero", "running"],
)
@pytest.mark.parametrize("width", [390, 1280])
def test_odd_runs_have_a_page(tmp_path, made, width):
    with open_page(written(tmp_path, made), width=width) as opened:
        assert opened.problems() == []


@pytest.mark.parametrize("width", [390, 1280])
def test_hostile_texts_are_shown_and_do_nothing(tmp_path, width):
    log = [{"loss": 1.0, f"eval_loss_{TEXT}": 2.0, TEXT: 1.0, "step": 10}]
    made = record(
        name=TEXT,
        path=TEXT,
        log=log,
        status=TEXT,
        written=TEXT,
        report=[["loss", TEXT]],
        changed=[TEXT],
        settings={TEXT: {TEXT: TEXT}},
        versions={TEXT: TEXT},
        facts={TEXT: TEXT},
        notes=[TEXT],
    )
    with open_page(written(tmp_path, made), width=width, dark=True) as opened:
        assert opened.problems() == []
        assert "<img src=x" in opened.text("table")


def test_hostile_texts_act_where_they_are_not_escaped(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.training.report_layout.escape", str)
    with open_page(written(tmp_path, record(report=[["", TEXT]]))) as opened:
        assert "hostile text acts" in opened.problems()
