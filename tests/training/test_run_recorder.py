"""A run writes its record and its page while it trains; nothing that it trains depends on them."""

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.distributed.train import Scenario, run
from helpers.padded import Padded
from helpers.tiny import documents_of_lengths, tiny_model
from peft import LoraConfig, get_peft_model
from transformers import TrainerCallback
from trl import SFTConfig

from trl_packing import PackedSFTConfig
from trl_packing.pages.record import (
    FILE,
    NOTHING,
    UNKNOWN,
    RunRecord,
    Totals,
    all_settings,
    changed_settings,
    facts_of_data,
)
from trl_packing.training.run_recorder import RunRecorder

LENGTHS = [9, 30, 5, 17, 23, 3, 28, 12, 20, 31, 8]
EVALUATED = {"eval_lengths": [7, 9, 4, 12, 8, 6], "columns": {"source": ["math", "code"] * 3}}


def scenario(folder, **changes):
    return Scenario(str(folder), LENGTHS, counted_clock=True, **changes)


def test_the_record_holds_report_versions_and_losses_of_sources(tmp_path):
    options = {"eval_strategy": "steps", "eval_steps": 2, "source_column": "source"}
    run(scenario(tmp_path, packing=False, options=options, **EVALUATED))
    record = RunRecord.load(tmp_path / FILE)
    assert (record.status, record.verdict) == ("finished", "not checked")
    assert (record.path, record.report[0][0]) == ("padding-free", "documents")
    assert "eval_loss_code" in (tmp_path / "run.html").read_text()
    assert {"python", "torch", "trl"} <= record.versions.keys()


def test_the_record_holds_the_adapter_and_the_data(tmp_path):
    lora = LoraConfig(r=4, target_modules=["v_proj", "q_proj"], use_rslora=True)
    rows = documents_of_lengths(LENGTHS)
    model = get_peft_model(tiny_model("llama"), lora)
    made = make_trainer(tmp_path, rows, model=model, max_steps=1, max_length=40)
    made.train()
    record = RunRecord.load(tmp_path / FILE)
    assert (record.settings["peft.r"], record.settings["peft.lora_dropout"]) == (4, 0.0)
    assert record.settings["peft.target_modules"] == ["q_proj", "v_proj"]
    changed = {name for name in record.changed if name.startswith("peft.")}
    assert changed == {"peft.r", "peft.target_modules", "peft.use_rslora"}
    assert record.facts["rows"] == "11"
    other = Dataset.from_list([{"text": "So."}])
    same = Dataset.from_list([{"text": "So."}])
    facts = facts_of_data({"a": other, "b": same, "c": Dataset.from_list([{"text": "No."}])})
    a, b, c = (facts[f"fingerprint of {name}"] for name in "abc")
    assert a == b != c


def test_a_resumed_run_continues_the_record(tmp_path):
    """The checkpoint lies between two logs, and was evaluated at neither."""
    common = {"epochs": 3, "options": {"logging_steps": 2}}
    run(scenario(tmp_path / "whole", save_steps=3, **common))
    expected = RunRecord.load(tmp_path / "whole" / FILE)
    checkpoint = tmp_path / "whole" / "checkpoint-3"
    resumed = run(scenario(tmp_path / "again", resume=str(checkpoint), **common))
    found = RunRecord.load(tmp_path / "again" / FILE)
    assert found.log == resumed["history"]
    # transformers logs the loss of step 4 without the step before the checkpoint.
    points, others = ([p for p in each.series["loss"] if p.step != 4] for each in (found, expected))
    assert points == others
    assert found.total == expected.total
    assert (found.resumed, found.notes) == ([3], [])
    assert "resumed at step 3" in (tmp_path / "again" / "run.html").read_text()


def test_a_run_resumed_without_a_record_shows_what_it_knows(tmp_path):
    common = {"epochs": 2, "options": {"logging_steps": 1}}
    run(scenario(tmp_path, save_steps=3, **common))
    checkpoint = tmp_path / "checkpoint-3"
    (checkpoint / FILE).write_text('{"format": 1}')
    run(scenario(tmp_path, resume=str(checkpoint), **common))
    found = RunRecord.load(tmp_path / FILE)
    assert [point.step for point in found.series["loss"]] == list(range(1, found.step + 1))
    assert {point[1:4] for point in found.series["loss"]} == {(None, None, None)}
    assert found.total == UNKNOWN
    assert any("shown over steps alone" in note for note in found.notes)


# --- one trainer ------------------------------------------------------------------------------


def trainer(folder, **changes):
    arguments = {"max_steps": 4, "logging_steps": 1, "per_device_train_batch_size": 1}
    return make_trainer(
        folder, documents_of_lengths(LENGTHS), **{"max_length": 32} | arguments | changes
    )


@pytest.mark.parametrize("run_page", [True, False])
def test_files_are_written_where_trl_writes(tmp_path, run_page):
    trainer(tmp_path, run_page=run_page).train()
    written = {path.name for path in tmp_path.glob("run.*")}
    assert written == ({"run.html", "run.json"} if run_page else set())


def test_no_fault_of_the_page_stops_a_run(tmp_path, monkeypatch, caplog):
    def fails(*args, **kwargs):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr("trl_packing.training.run_recorder.replace_file", fails)
    monkeypatch.setattr(RunRecorder, "least_seconds", 0.0)
    made = trainer(tmp_path, save_strategy="steps", save_steps=2)
    made.train()
    (said,) = [r.message for r in caplog.records if "cannot be written" in r.message]
    assert "No space left" in said
    assert (tmp_path / "checkpoint-4" / "model.safetensors").exists()


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
    assert [point.step for point in record.series["loss"]] == [1, 2]


def test_a_second_run_begins_at_zero_and_a_later_evaluation_is_added(tmp_path):
    made = trainer(tmp_path)
    made.train()
    first = RunRecord.load(tmp_path / FILE)
    made.train()
    second = RunRecord.load(tmp_path / FILE)
    assert second.totals[0] == NOTHING
    assert second.total.documents == first.total.documents
    assert second.log == made.state.log_history
    found = made.evaluate(made.train_dataset)
    record = RunRecord.load(tmp_path / FILE)
    (point,) = record.series["eval_loss"]
    assert point.value == found["eval_loss"]
    assert point.documents == record.total.documents > 0
    assert record.status == "finished"


def test_on_trls_path_tokens_and_hours_are_known(tmp_path):
    made = trainer(tmp_path, collator=Padded(), packing=False, per_device_train_batch_size=2)
    made.train()
    record = RunRecord.load(tmp_path / FILE)
    assert record.path == "TRL's path"
    assert record.log == made.state.log_history
    counted = [entry for entry in record.log if "num_tokens" in entry]
    assert counted
    for entry in counted:
        found = record.totals[entry["step"]]
        assert found == Totals(tokens=entry["num_tokens"], seconds=found.seconds)
        assert found.seconds > 0
    made.train()  # TRL goes on counting
    assert RunRecord.load(tmp_path / FILE).total.tokens == record.total.tokens > 0


# --- settings and versions ------------------------------------------------------------------------

MACHINE = {"use_cpu": True, "bf16": False}


@pytest.mark.parametrize("config", [PackedSFTConfig, SFTConfig])
def test_changed_settings_are_those_of_the_user(config, tmp_path):
    args = config(str(tmp_path), packing=False, lr_scheduler_type="cosine", **MACHINE)
    own = {"packing"} if config is PackedSFTConfig else set()  # TRL's default
    assert {*changed_settings(args)} == MACHINE.keys() | {"lr_scheduler_type"} | own


def test_secrets_are_left_out_and_tokens_of_text_are_not(tmp_path):
    secret = "hf_" + "a" * 30
    args = PackedSFTConfig(
        output_dir=str(tmp_path),
        hub_token=secret,
        eos_token="<eos>",
        model_init_kwargs={"token": "mine", "deep": [{"api_key": "k"}], "dtype": "float32"},
        run_name=f"with {secret}",
        **MACHINE,
    )
    found = all_settings(args)
    assert secret not in str(found)
    hidden = {"token": "…", "deep": [{"api_key": "…"}], "dtype": "float32"}
    assert found["model_init_kwargs"] == hidden
    assert found["eos_token"] == "<eos>"
    assert args.hub_token == secret, "the config is as it was"
