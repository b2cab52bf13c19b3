"""Packed calls check what no earlier call has, and a refused model stays refused."""

import contextlib

import pytest
from helpers.plain_runs import leak_in_long_rows, packing_of
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing import PackedCollator, enable_packing


def test_a_document_beyond_a_length_constant_is_checked_when_it_comes(monkeypatch):
    monkeypatch.setattr("trl_packing.plain_trainer.enable.REACH", 30)
    model = tiny_model("mistral", sliding_window=40)
    enable_packing(model)
    assert packing_of(model).reach == 30
    model.train()(**PackedCollator()(documents_of_lengths([35, 9])))
    assert packing_of(model).reach == 30
    batch = dict(PackedCollator()(documents_of_lengths([60, 9])))
    batch["inputs_embeds"] = model.get_input_embeddings()(batch.pop("input_ids"))
    model(**batch)
    assert packing_of(model).reach == 60


def flattened(lengths=(9, 20, 12)):
    return PackedCollator()(documents_of_lengths(lengths))


def test_another_loss_is_refused_before_anything_is_put_on_the_model():
    """A model that is left half enabled would train on our loss instead of its own."""
    model = tiny_model("llama")
    model.loss_function = lambda logits, labels, **_: logits.float().mean() * 0 + 1.0
    expected = model(**flattened()).loss.item()
    before = dict(vars(model))
    for _ in range(2):
        with pytest.raises(ValueError, match="another loss"):
            enable_packing(model)
        assert vars(model) == before
        assert model(**flattened()).loss.item() == expected == 1.0
    enable_packing(model, isolation_check="off")
    assert model(**flattened()).loss.item() > 2, "the control: enabled, the loss is ours"


@pytest.mark.parametrize("leaks", [False, True])
def test_a_sharded_model_relies_on_a_check_that_passed_only(leaks, monkeypatch):
    """Inside a forward of a sharded model nothing can be checked."""
    model = tiny_model("llama")
    expected = contextlib.nullcontext()
    if leaks:
        leak_in_long_rows(model)
        expected = pytest.raises(RuntimeError, match="no check of this model has passed")
    with contextlib.suppress(RuntimeError):
        enable_packing(model, attention="documents")
    monkeypatch.setattr("trl_packing.plain_trainer.enable.is_sharded", lambda model: True)
    for _ in range(2):
        with expected:
            model.eval()(**flattened())
