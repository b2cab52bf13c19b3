"""An enabled model in a plain Trainer takes boundaries, or runs in `other_rows`, or refuses."""

import pytest
import torch
from datasets import Dataset
from helpers.by_hand import assert_same_step, by_hand
from helpers.model_calls import (
    a_copy,
    backbone,
    calling,
    embedded,
    ids_only,
    mask_of_ones,
    without_the_last_token,
)
from helpers.one_step import Keep
from helpers.plain_runs import DOCUMENTS, documents_of_rows, packed, trainer_of
from helpers.tiny import tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq, Trainer
from transformers import DataCollatorWithFlattening as TheirFlattening

from trl_packing import PackedCollator, enable_packing, other_rows


def whole(trainer, model, inputs):
    return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits


ROWS = {
    "PackedDataset": {},
    "PackedCollator": {"collator": PackedCollator(), "rows": DOCUMENTS},
    "flattened by transformers": {"collator": TheirFlattening(), "rows": DOCUMENTS},
}
IN_MEMORY = [ids_only, mask_of_ones, backbone, without_the_last_token]
UNKNOWN = [a_copy, embedded]


def step_of(call, folder, collator=None, rows=None):
    """Train one step in a plain Trainer, whose loss is the mean of what `call` says of a row."""
    kept, model = Keep(), tiny_model("llama")
    dataset = packed() if rows is None else Dataset.from_list(rows)
    enable_packing(model)
    trainer = trainer_of(model, dataset, folder, collator=collator, callbacks=[kept])
    trainer.__class__ = calling(call, Trainer)
    trainer.train()
    documents = documents_of_rows(dataset, range(4)) if rows is None else DOCUMENTS[:4]
    expected = by_hand(tiny_model("llama"), documents)
    return (trainer.state.log_history[0]["loss"], kept.gradients), expected


@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
def test_a_batch_names_its_documents(options, tmp_path):
    assert_same_step(*step_of(whole, tmp_path, **options))


@pytest.mark.parametrize("call", IN_MEMORY, ids=lambda call: call.__name__)
def test_tokens_of_a_batch_in_memory_are_known(call, tmp_path):
    assert_same_step(*step_of(call, tmp_path, **ROWS["PackedCollator"]))


def test_the_comparison_sees_documents_that_see_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.attention.calls.complete_call", lambda model, call: call)
    monkeypatch.setattr("trl_packing.plain_trainer.enable.complete_call", lambda model, call: call)
    with pytest.raises(AssertionError):
        assert_same_step(*step_of(ids_only, tmp_path, **ROWS["PackedCollator"]))


@pytest.mark.parametrize("call", UNKNOWN, ids=lambda call: call.__name__)
@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
def test_any_other_call_in_training_is_refused(call, options, tmp_path):
    with pytest.raises(ValueError, match=r"boundaries of documents.*other_rows"):
        step_of(call, tmp_path, **options)


@pytest.mark.parametrize("call", IN_MEMORY, ids=lambda call: call.__name__)
def test_tokens_that_are_not_in_memory_are_refused_too(call, tmp_path):
    with pytest.raises(ValueError, match=r"boundaries of documents.*other_rows"):
        step_of(call, tmp_path)


def test_other_calls_are_as_they_were():
    """In evaluation, in training inside `other_rows`, and of `generate` in both."""
    model, plain = tiny_model("llama"), tiny_model("llama")
    enable_packing(model)
    padded = dict(DataCollatorForSeq2Seq(tiny_tokenizer())([dict(d) for d in DOCUMENTS[:3]]))
    ids = torch.tensor([DOCUMENTS[1]["input_ids"]])
    for call in (padded, {"input_ids": ids, "attention_mask": torch.ones_like(ids)}):
        with other_rows():
            found = model.train()(**call)
        torch.testing.assert_close(found.logits, plain.train()(**call).logits)
        torch.testing.assert_close(model.eval()(**call).logits, plain.eval()(**call).logits)
        with pytest.raises(ValueError, match="other_rows"):
            model.train()(**call)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for mode in (True, False):
        written = [m.train(mode).generate(ids[:, :23], **options) for m in (model, plain)]
        assert torch.equal(*written)
