"""`PackedSFTTrainer` checks isolation on its own documents before the first step."""

import json
import re
from contextlib import nullcontext

import pytest
from datasets import Dataset
from harness import make_trainer
from helpers.leaks import AddRowMean, longrope, packed_model, with_layer
from helpers.tiny import documents_of_lengths


def trainer(model, folder, lengths=(5, 9, 30, 12, 7, 20, 3, 16), **options):
    settings = {"max_length": 256, "max_steps": 1, "logging_steps": 1, "attention": "documents"}
    rows = Dataset.from_list(documents_of_lengths(lengths))
    return make_trainer(folder, rows, model, **settings | options)


def test_the_report_has_the_numbers_of_the_check(tmp_path, capsys):
    run = trainer(packed_model("llama"), tmp_path)

    def line():
        return next(line.text for line in run.packing_report.lines() if line.label == "checked")

    run.train()
    before, _, after = capsys.readouterr().out.partition("checking that no document of a packed")
    assert line() not in " ".join(before.split())
    assert line() in " ".join(after.split()), "printed after the check"
    evidence = run.packing_report.checked.evidence
    assert (evidence.mode, evidence.verdict) == ("training", "isolated")
    assert evidence.leak > 100 * evidence.difference
    shown = re.search(r"differs by ([\d.e-]+)", line())
    assert float(shown[1]) == pytest.approx(evidence.difference, rel=0.06)  # of one digit
    assert json.loads(run.packing_report.to_json())["checked"]["evidence"]["leak"] == evidence.leak


def packed_rows(lengths):
    first, second = documents_of_lengths(lengths)
    row = {key: first[key] + second[key] for key in ("input_ids", "labels")}
    return Dataset.from_list([row | {"seq_lengths": lengths}] * 2)


STREAM = Dataset.from_list(documents_of_lengths([20] * 8)).to_iterable_dataset()
# Rows that came packed are probed by their documents, and a stream to where it may reach.
REACH = {
    "rows beyond the threshold": (packed_rows([40, 40]), 256, None),
    "a document beyond it": (packed_rows([10, 100]), 256, "after 100 tokens"),
    "a stream of less": (STREAM, 60, None),
    "a stream of more": (STREAM, 256, "after 65 tokens"),
}


@pytest.mark.parametrize("name", REACH)
def test_probes_reach_as_far_as_documents_may(name, tmp_path):
    rows, max_length, says = REACH[name]
    run = trainer(longrope(), tmp_path, max_length=max_length)
    run.train_dataset = rows
    with pytest.raises(RuntimeError, match=says) if says else nullcontext():
        run.train()


def test_a_warning_lets_training_go_on(tmp_path, caplog):
    run = trainer(with_layer(AddRowMean), tmp_path, isolation_check="warn")
    run.train()
    assert run.state.global_step == 1
    (said,) = [r.getMessage() for r in caplog.records if "LEAK" in r.getMessage()]
    assert "LlamaForCausalLM" in said
