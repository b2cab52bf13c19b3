"""The report shows the verdict on the backend in use with its numbers, or why there is none."""

import json
from dataclasses import replace

import pytest
from architectures.tiny_models import tiny_model
from architectures.tiny_step import tiny_documents
from datasets import Dataset
from helpers.leaks import hopeless
from helpers.tiny import tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.isolation.check import IsolationReport
from trl_packing.isolation.guard import Checked, Refusal, brief

MEASURED = IsolationReport(
    "isolated", 0.0, 6.8e-4, 20.3, "short documents", "LlamaForCausalLM", "documents", "training"
)


def trainer_for(model, folder, **options):
    settings = {
        "max_length": 120,
        "max_steps": 1,
        "bf16": False,
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    rows = Dataset.from_list(tiny_documents())
    args = PackedSFTConfig(str(folder), **settings | options)
    return PackedSFTTrainer(
        model, args, train_dataset=rows, eval_dataset=rows, processing_class=tiny_tokenizer()
    )


def checked_line(trainer) -> str:
    return dict(line for line in trainer.packing_report.lines() if line[0])["checked"]


def test_the_numbers_are_those_of_the_check(tmp_path, capsys):
    trainer = trainer_for(tiny_model("llama"), tmp_path)
    assert checked_line(trainer) == "nothing (train() checks before its first step)"
    trainer.train()
    line = checked_line(trainer)
    before, _, after = capsys.readouterr().out.partition("checking that no document of a packed")
    assert line not in " ".join(before.split())
    assert line in " ".join(after.split()), "printed after the check"
    evidence = trainer.packing_report.checked.evidence
    assert evidence.mode == "training"
    assert evidence.leak > 100 * evidence.difference
    assert line == (
        f"isolated: differs by {brief(evidence.difference)}, "
        f"rounding allows {brief(4 * evidence.noise)}, a leak would be {brief(evidence.leak)}"
    )
    written = json.loads(trainer.packing_report.to_json())["checked"]
    assert written["verdict"] == "isolated"
    assert written["evidence"]["leak"] == evidence.leak


def test_a_leak_that_is_trained_all_the_same_is_said(tmp_path):
    trainer = trainer_for(hopeless(), tmp_path, isolation_check="warn")
    trainer.train()
    line = checked_line(trainer)
    assert line.startswith("documents LEAK into each other: differs by ")
    assert line.endswith("; isolation_check='warn' trains all the same")


def test_padded_rows_after_a_leak_are_said(tmp_path):
    trainer = trainer_for(hopeless(), tmp_path, packing=False, per_device_train_batch_size=4)
    trainer.train()
    assert trainer.attention.backend == "padded"
    assert checked_line(trainer).startswith("rows are padded, as in TRL, for documents would LEAK")


@pytest.mark.parametrize(
    ("result", "pads", "words"),
    [
        (MEASURED, False, "isolated: differs by 0, rounding allows 3e-3, a leak would "),
        (replace(MEASURED, verdict="inconclusive"), False, "isolation could not be shown: differs"),
        (replace(MEASURED, verdict="leaks"), False, "documents LEAK into each other"),
        (replace(MEASURED, verdict="leaks"), True, "rows are padded, as in TRL, for documents "),
        (Refusal("KeyError: x"), True, "rows are padded, as in TRL: the model refuses packed ones"),
        (None, False, "nothing (train() checks before its first step)"),
    ],
)
def test_every_result_has_its_words(result, pads, words):
    checked = Checked.from_result(result, isolation_check="error", pads=pads)
    assert str(checked).startswith(words)
    assert (checked.verdict == "isolated") == bool(result)
