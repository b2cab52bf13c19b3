"""A run writes its record and its page while it trains; nothing that it trains depends on them."""

import logging
import math
import os
from pathlib import Path

import pytest
import torch
from datasets import Dataset
from helpers.distributed.train import Scenario, run, run_on_ranks
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import TrainerCallback
from trl import SFTConfig

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.training import run_recorder
from trl_packing.training.run_record import FILE, NOTHING, UNKNOWN, RunRecord, Totals
from trl_packing.training.run_recorder import RunRecorder

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
SOURCES = ["math", "code"] * 3
EVALUATED = {"eval_lengths": [7, 9, 4, 12, 8, 6], "sources": SOURCES}


def counted(ranks, steps):
    """Return documents, tokens, trained and computed tokens of the first `steps` steps, by hand."""
    sums = [0, 0, 0, 0]
    for rank in ranks:
        for step, batch in zip(rank["trained_in"], rank["inputs"], strict=True):
            if step < steps:
                real = batch["input_ids"].flatten() != 0
                starts = (batch["position_ids"].flatten() == 0) & real
                trained = batch["labels"].flatten() != -100
                row = (starts.sum(), real.sum(), trained.sum(), len(real))
                sums = [a + int(b) for a, b in zip(sums, row, strict=True)]
    return sums


def assert_totals(record, ranks, *, first=0):
    """The totals of every logged step are those of the batches of all ranks."""
    assert record.log
    for entry in record.log:
        found = record.totals[entry["step"]]
        expected = counted(ranks, entry["step"])
        assert [
            found.documents,
            found.tokens,
            found.trained_tokens,
            found.computed_tokens,
        ] == expected
        micro_batches = sum(step < entry["step"] for step in ranks[0]["trained_in"])
        assert found.seconds == micro_batches  # the clock counts a second a micro-batch
    assert record.total == record.totals[record.step]
    assert record.total.documents > 0


def assert_same_points(found, expected, *, but):
    """The same points; transformers logs the loss of step `but` without the steps before it."""
    points, others = found.points("loss"), expected.points("loss")
    assert [point[:4] for point in points] == [point[:4] for point in others]
    values, expected_values = ({p.step: p.value for p in s} for s in (points, others))
    assert values.pop(but) != expected_values.pop(but)
    assert values == expected_values


def scenario(folder, **changes):
    return Scenario(str(folder), LENGTHS, counted_clock=True, **changes)


@pytest.mark.parametrize("packing", [True, False], ids=["packed", "unpacked"])
def test_the_record_holds_the_log_and_what_was_trained_at_each_entry(tmp_path, packing):
    options = {
        "eval_strategy": "steps",
        "eval_steps": 2,
        "source_column": "source",
        "logging_steps": 3,
    }
    rank = run(scenario(tmp_path, packing=packing, epochs=2, options=options, **EVALUATED))
    record = RunRecord.load(tmp_path / FILE)
    assert record.log == rank["history"]
    assert {"eval_loss_math", "eval_loss_code"} <= set(record.names())
    assert record.points("eval_loss"), "entries of steps that log no loss have points too"
    assert_totals(record, [rank])
    assert record.status == "finished"
    assert record.path == ("packed" if packing else "padding-free")
    assert record.report[0][0] == "documents"
    assert record.verdict == "not checked", "by the scenario"
    page = (tmp_path / "run.html").read_text()
    assert "eval_loss_code" in page
    assert not list(tmp_path.glob(".run*"))


def test_a_resumed_run_continues_the_record(tmp_path):
    """The checkpoint lies between two logs, and was evaluated at neither."""
    common = {"epochs": 3, "options": {"logging_steps": 2}}
    whole = run(scenario(tmp_path / "whole", save_steps=3, **common))
    expected = RunRecord.load(tmp_path / "whole" / FILE)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed = run(scenario(tmp_path / "again", resume=str(checkpoint), **common))
    found = RunRecord.load(tmp_path / "again" / FILE)
    assert found.log == resumed["history"]
    assert_same_points(found, expected, but=4)
    assert found.total == expected.total
    assert found.resumed == [3]
    assert found.notes == []
    assert 3 in found.totals
    assert 3 not in [point.step for point in found.points("loss")]
    assert "resumed at step 3" in (tmp_path / "again" / "run.html").read_text()
    assert whole["steps"] == resumed["steps"]


@pytest.mark.parametrize("broken", [None, "{", '{"format": 1}'])
def test_a_run_resumed_without_a_record_shows_what_it_knows(tmp_path, broken):
    common = {"epochs": 2, "options": {"logging_steps": 1}}
    run(scenario(tmp_path, save_steps=3, **common))
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / FILE).unlink()
    if broken is not None:
        (checkpoint / FILE).write_text(broken)
    run(scenario(tmp_path, resume=str(checkpoint), **common))
    found = RunRecord.load(tmp_path / FILE)
    assert [point.step for point in found.points("loss")] == list(range(1, found.step + 1))
    assert {point[1:4] for point in found.points("loss")} == {(None, None, None)}
    assert found.total == UNKNOWN
    assert any("shown over steps alone" in note for note in found.notes)
    assert (
        '<input type="radio" name="axis" value="documents">'
        not in (tmp_path / "run.html").read_text()
    )


def test_two_ranks_write_one_record_of_both(tmp_path):
    scenarios = {
        "run": scenario(tmp_path / "out", epochs=2, save_steps=3, options={"logging_steps": 2}),
        "again": scenario(
            tmp_path / "again",
            epochs=2,
            options={"logging_steps": 2},
            resume=str(tmp_path / "out" / "checkpoint-3"),
        ),
    }
    found = run_on_ranks(scenarios, tmp_path / "results")
    record = RunRecord.load(tmp_path / "out" / FILE)
    assert_totals(record, found["run"])
    assert record.facts["ranks"] == "2"
    assert record.log == found["run"][0]["history"]
    again = RunRecord.load(tmp_path / "again" / FILE)
    assert_same_points(again, record, but=4)
    assert again.total == record.total


# --- one trainer ------------------------------------------------------------------------------


def trainer(folder, config=PackedSFTConfig, callbacks=(), collator=None, **changes):
    arguments = {
        "output_dir": str(folder),
        "max_length": 32,
        "max_steps": 4,
        "logging_steps": 1,
        "report_to": "none",
        "disable_tqdm": True,
        "bf16": False,
        "use_cpu": True,
        "per_device_train_batch_size": 1,
        "save_strategy": "no",
    }
    return PackedSFTTrainer(
        tiny_model("llama"),
        config(**arguments | changes),
        collator,
        train_dataset=Dataset.from_list(documents_of_lengths(LENGTHS)),
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
    )


def files(folder):
    return sorted(path.name for path in Path(folder).iterdir() if path.is_file())


PAGE = ["run.html", "run.json"]


@pytest.mark.parametrize(
    ("config", "changes", "expected"),
    [
        (PackedSFTConfig, {}, PAGE),
        (PackedSFTConfig, {"run_page": False}, []),
        (SFTConfig, {}, []),  # TRL writes nothing there either
        (SFTConfig, {"save_strategy": "steps", "save_steps": 2}, ["README.md", *PAGE]),
    ],
)
def test_files_are_written_where_trl_writes(tmp_path, config, changes, expected):
    made = trainer(tmp_path, config, **changes)
    made.train()
    assert files(tmp_path) == expected
    for checkpoint in tmp_path.glob("checkpoint-*"):
        assert ("run.json" in files(checkpoint)) == bool(expected)


def test_the_page_is_never_the_reason_for_a_folder(tmp_path):
    made = trainer(tmp_path / "out")
    (tmp_path / "out").rmdir()
    made.train()
    assert not (tmp_path / "out").exists()


def test_a_removed_callback_writes_nothing(tmp_path):
    made = trainer(tmp_path)
    made.remove_callback(RunRecorder)
    made.train()
    assert files(tmp_path) == []


def test_losses_and_logs_are_those_of_a_run_without_a_page(tmp_path):
    histories, parameters = [], []
    for name, wanted in (("with", True), ("without", False)):
        torch.manual_seed(0)
        made = trainer(tmp_path / name, run_page=wanted)
        made.train()
        timeless = [
            {
                k: v
                for k, v in entry.items()
                if not any(w in k for w in ("second", "runtime", "memory"))
            }
            for entry in made.state.log_history
        ]
        histories.append(timeless)
        parameters.append([p.detach() for p in made.model.parameters()])
    assert histories[0] == histories[1]
    assert all(torch.equal(a, b) for a, b in zip(*parameters, strict=True))


def test_a_full_disk_is_warned_of_once_and_training_goes_on(tmp_path, monkeypatch, caplog):
    def full(path, text):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(run_recorder, "replace_file", full)
    monkeypatch.setattr(RunRecorder, "least_seconds", 0.0)
    made = trainer(tmp_path)
    with caplog.at_level(logging.WARNING):
        made.train()
    said = [r.message for r in caplog.records if "cannot be written" in r.message]
    assert len(said) == 1
    assert "No space left" in said[0]
    assert made.state.global_step == 4


@pytest.mark.parametrize("name", ["all_settings", "RunRecord", "run_page"])
def test_no_fault_of_the_page_stops_a_run(tmp_path, monkeypatch, caplog, name):
    def fails(*args, **kwargs):
        raise ZeroDivisionError("a fault of ours")

    place = run_recorder.run_page if name == "run_page" else run_recorder
    monkeypatch.setattr(place, name, fails)
    made = trainer(tmp_path, save_strategy="steps", save_steps=2)
    with caplog.at_level(logging.WARNING):
        made.train()
    said = [r.message for r in caplog.records if "a fault of ours" in r.message]
    assert len(said) == 1
    assert made.state.global_step == 4
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()


def test_a_part_of_a_file_is_never_left_or_seen(tmp_path, monkeypatch):
    path = tmp_path / "run.html"
    path.write_text("old")

    def fails(source, target):
        assert Path(source).read_text() == "new"
        assert path.read_text() == "old"
        raise OSError("full")

    monkeypatch.setattr(os, "replace", fails)
    with pytest.raises(OSError, match="full"):
        run_recorder.replace_file(path, "new")
    assert files(tmp_path) == ["run.html"]
    assert path.read_text() == "old"


def test_writes_are_bounded(tmp_path, monkeypatch):
    """A long run that logs every step writes at its beginning and its end alone."""
    written = []
    monkeypatch.setattr(run_recorder, "replace_file", lambda path, text: written.append(path.name))
    monkeypatch.setattr(RunRecorder, "least_seconds", 1000.0)
    trainer(tmp_path, max_steps=6).train()
    assert written == ["run.json", "run.html"] * 2
    written.clear()
    monkeypatch.setattr(RunRecorder, "least_seconds", 0.0)
    monkeypatch.setattr(RunRecorder, "most_share", math.inf)
    trainer(tmp_path, max_steps=6).train()
    assert written == ["run.json", "run.html"] * 9, "begin, 6 logs, the totals, end"


def test_a_slow_write_is_followed_by_a_longer_pause(tmp_path, monkeypatch):
    now = [0.0]

    def slow(path, text):
        now[0] += 3

    monkeypatch.setattr(run_recorder.time, "monotonic", lambda: now[0])
    monkeypatch.setattr(run_recorder, "replace_file", slow)
    made = trainer(tmp_path)
    made.train()
    assert made._recorder._next_write == pytest.approx(now[0] + 6 / 0.02)


def test_a_run_that_fails_leaves_its_curves(tmp_path):
    class Fails(TrainerCallback):
        def on_step_end(self, args, state, control, **kwargs):
            if state.global_step == 3:
                raise ZeroDivisionError

    made = trainer(tmp_path, callbacks=[Fails()])
    with pytest.raises(ZeroDivisionError):
        made.train()
    record = RunRecord.load(tmp_path / FILE)
    assert record.status == "stopped by ZeroDivisionError"
    assert [point.step for point in record.points("loss")] == [1, 2]


def test_a_second_run_of_a_trainer_begins_at_zero(tmp_path):
    made = trainer(tmp_path)
    made.train()
    first = RunRecord.load(tmp_path / FILE)
    made.train()
    second = RunRecord.load(tmp_path / FILE)
    assert second.totals[0] == NOTHING
    assert second.total.documents == first.total.documents
    assert second.log == made.state.log_history


def test_an_evaluation_after_the_run_is_added(tmp_path):
    made = trainer(tmp_path)
    made.train()
    made.eval_dataset = made.train_dataset
    found = made.evaluate(made.train_dataset)
    record = RunRecord.load(tmp_path / FILE)
    (point,) = record.points("eval_loss")
    assert point.value == found["eval_loss"]
    assert point.documents == record.total.documents > 0
    assert record.status == "finished"


def test_an_evaluation_without_a_run_writes_nothing(tmp_path):
    made = trainer(tmp_path)
    made.evaluate(made.train_dataset)
    assert files(tmp_path) == []


class Collator:
    """A user's own collator, which takes TRL's path: padded rows."""

    def __call__(self, rows):
        width = max(len(row["input_ids"]) for row in rows)
        filled = [row["input_ids"] + [0] * (width - len(row["input_ids"])) for row in rows]
        ids = torch.tensor(filled)
        mask = (ids != 0).long()
        return {"input_ids": ids, "attention_mask": mask, "labels": ids.masked_fill(ids == 0, -100)}


def test_on_trls_path_tokens_and_hours_are_known(tmp_path):
    made = trainer(tmp_path, collator=Collator(), packing=False, per_device_train_batch_size=2)
    made.train()
    record = RunRecord.load(tmp_path / FILE)
    assert record.path.startswith("TRL's path: ")
    assert record.log == made.state.log_history
    for entry in record.log:
        if "num_tokens" in entry:
            found = record.totals[entry["step"]]
            assert found == Totals(tokens=entry["num_tokens"], seconds=found.seconds)
            assert found.seconds > 0
    assert record.total.tokens > 0


def test_nan_is_a_gap_with_a_note(tmp_path):
    class Breaks(TrainerCallback):
        def on_step_end(self, args, state, control, model=None, **kwargs):
            if state.global_step == 2:
                with torch.no_grad():
                    next(model.parameters()).fill_(math.nan)

    made = trainer(tmp_path, callbacks=[Breaks()], logging_nan_inf_filter=False)
    made.train()
    record = RunRecord.load(tmp_path / FILE)
    assert [math.isnan(point.value) for point in record.points("loss")] == [
        False,
        False,
        True,
        True,
    ]
    page = (tmp_path / "run.html").read_text()
    assert "2 values of loss NaN or infinite, left out (step 3, 4)" in page


def test_a_rank_other_than_zero_writes_nothing(tmp_path, monkeypatch):
    made = trainer(tmp_path)
    monkeypatch.setattr(made, "is_world_process_zero", lambda: False)
    made.train()
    assert files(tmp_path) == []
