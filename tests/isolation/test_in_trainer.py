"""`PackedSFTTrainer` checks isolation on its own documents before the first step."""

import copy
import logging
from contextlib import nullcontext

import pytest
import torch
from datasets import Dataset
from harness import make_trainer
from helpers.leaks import AddRowMean, OneDocument, longrope, packed_model, with_layer
from helpers.tiny import documents_of_lengths


def trainer(model, folder, lengths=(5, 9, 30, 12, 7, 20, 3, 16), collator=None, **options):
    settings = {"max_length": 256, "max_steps": 1, "logging_steps": 1, "attention": "documents"}
    rows = Dataset.from_list(documents_of_lengths(lengths))
    return make_trainer(folder, rows, model, collator=collator, **settings | options)


LEAKING = {
    "row mean": (lambda: with_layer(AddRowMean), {}),
    "in training only": (lambda: with_layer(AddRowMean, only_in_training=True), {}),
    "longrope": (longrope, {"lengths": (10, 12, 80, 100)}),
    "boundaries lost": (lambda: packed_model("llama"), {"collator": OneDocument()}),
}


@pytest.mark.parametrize(("build", "options"), LEAKING.values(), ids=LEAKING)
def test_training_stops_before_the_first_step(build, options, tmp_path):
    model = build()
    way = r"document-wise SDPA \(attention='documents'\)"
    expected = rf"LEAK.*{type(model).__name__}, {way}, training mode"
    run = trainer(model, tmp_path, **options)
    before = copy.deepcopy(run.model.state_dict())
    with pytest.raises(RuntimeError, match=expected):
        run.train()
    for name, value in run.model.state_dict().items():
        assert torch.equal(value, before[name])


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


def test_evaluation_is_checked_on_its_own_documents(tmp_path):
    run = trainer(longrope(), tmp_path)
    run.evaluate(run.train_dataset)
    with pytest.raises(RuntimeError, match="evaluation mode, after 100 tokens"):
        run.evaluate(Dataset.from_list(documents_of_lengths([20, 30, 100])))


def test_a_warning_lets_training_go_on(tmp_path, caplog):
    run = trainer(with_layer(AddRowMean), tmp_path, isolation_check="warn")
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        run.train()
    assert run.state.global_step == 1
    (said,) = [r.getMessage() for r in caplog.records if "LEAK" in r.getMessage()]
    assert "LlamaForCausalLM" in said
