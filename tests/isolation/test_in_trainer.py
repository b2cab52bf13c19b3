"""`PackedSFTTrainer` checks isolation on its own documents before the first step."""

import json
import logging
from contextlib import nullcontext

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.leaks import AddRowMean, longrope, packed_model, with_layer
from helpers.tiny import documents_of_lengths

from trl_packing.isolation.check import brief


def trainer(model, folder, lengths=(5, 9, 30, 12, 7, 20, 3, 16), **options):
    settings = {"max_length": 256, "max_steps": 1, "logging_steps": 1, "attention": "documents"}
    rows = Dataset.from_list(documents_of_lengths(lengths))
    return make_trainer(folder, rows, model, **settings | options)


def test_the_report_has_the_numbers_of_the_check(tmp_path, capsys):
    run = trainer(packed_model("llama"), tmp_path)

    def line():
        return dict(line for line in run.packing_report.lines() if line[0])["checked"]

    assert line() == "nothing (train() checks before its first step)"
    run.train()
    before, _, after = capsys.readouterr().out.partition("checking that no document of a packed")
    assert line() not in " ".join(before.split())
    assert line() in " ".join(after.split()), "printed after the check"
    evidence = run.packing_report.checked.evidence
    assert (evidence.mode, evidence.verdict) == ("training", "isolated")
    assert evidence.leak > 100 * evidence.difference
    assert f"differs by {brief(evidence.difference)}" in line()
    assert json.loads(run.packing_report.to_json())["checked"]["evidence"]["leak"] == evidence.leak


def test_rows_that_came_packed_are_probed_by_their_documents(tmp_path):
    """The rows pass the threshold; only a document that does may leak."""
    for lengths, leaks in (((40, 40), False), ((10, 100), True)):
        first, second = documents_of_lengths(lengths)
        row = {key: first[key] + second[key] for key in ("input_ids", "labels")}
        run = trainer(longrope(), tmp_path)
        run.train_dataset = Dataset.from_list([row | {"seq_lengths": list(lengths)}] * 2)
        with pytest.raises(RuntimeError, match="after 100 tokens") if leaks else nullcontext():
            run.train()


def test_a_stream_is_probed_to_where_max_length_lets_it_reach(tmp_path):
    stream = Dataset.from_list(documents_of_lengths([20] * 8)).to_iterable_dataset()
    for max_length, leaks in ((60, False), (256, True)):
        run = trainer(longrope(), tmp_path, max_length=max_length)
        run.train_dataset = stream
        with pytest.raises(RuntimeError, match="after 65 tokens") if leaks else nullcontext():
            run.train()


def test_a_warning_lets_training_go_on(tmp_path, caplog):
    run = trainer(with_layer(AddRowMean), tmp_path, isolation_check="warn")
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        run.train()
    assert run.state.global_step == 1
    (said,) = [r.getMessage() for r in caplog.records if "LEAK" in r.getMessage()]
    assert "LlamaForCausalLM" in said
