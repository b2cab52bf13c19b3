"""A plain Trainer whose loss calls the model on a packed row without the row's boundaries.

`enable_packing` is told of no row: it must find them by what is in the call, or refuse the call.
"""

import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from by_hand import Keep, assert_same_step, by_hand
from datasets import Dataset
from test_plain_trainer import COLLATORS, DOCUMENTS, documents_of_rows, packed
from tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq, Trainer, TrainingArguments

from trl_packing import PackedCollator, enable_packing, other_rows, plain_trainer
from trl_packing.known_documents import documents_in


def ids_only(model, inputs):
    return model(input_ids=inputs["input_ids"]).logits


def a_copy(model, inputs):
    return model(input_ids=inputs["input_ids"].clone()).logits


def mask_of_ones(model, inputs):
    ids = inputs["input_ids"]
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def counted_positions(model, inputs):
    ids = inputs["input_ids"]
    return model(input_ids=ids, position_ids=torch.arange(ids.shape[1])[None]).logits


def backbone(model, inputs):
    return model.lm_head(model.model(inputs["input_ids"]).last_hidden_state)


def without_the_last_token(model, inputs):
    return F.pad(model(input_ids=inputs["input_ids"][:, :-1]).logits, (0, 0, 0, 1))


def with_labels(model, inputs):
    output = model(input_ids=inputs["input_ids"], labels=inputs["labels"])
    return output.logits


CALLS = [
    ids_only,
    a_copy,
    mask_of_ones,
    counted_positions,
    backbone,
    without_the_last_token,
    with_labels,
]
COLLATED = {
    "PackedDataset": {},
    "PackedDataset, padded": {"collator": COLLATORS["seq2seq, padded"]},
    "PackedDataset, workers": {"dataloader_num_workers": 1},
    "PackedDataset and PackedCollator": {"collator": PackedCollator()},
    "PackedCollator": {"collator": PackedCollator(), "rows": DOCUMENTS},
}


def trainer_with(call, folder, model=None, collator=None, rows=None, **options):
    """Return a plain Trainer whose loss is the mean over trained tokens of what `call` says."""

    class Subclass(Trainer):
        def compute_loss(self, model, inputs, return_outputs=False, num_items_in_batch=None):
            logits, labels = call(model, inputs), inputs["labels"]
            total = F.cross_entropy(logits[0, :-1], labels[0, 1:], reduction="sum")
            loss = total / (num_items_in_batch or (labels[:, 1:] != -100).sum())
            return (loss, {"logits": logits}) if return_outputs else loss

        def prediction_step(self, model, inputs, prediction_loss_only, ignore_keys=None):
            with torch.no_grad():
                return self.compute_loss(model, inputs).detach(), None, None

    kept = Keep()
    dataset = packed() if rows is None else Dataset.from_list(rows)
    settings = {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": len(dataset),
        "gradient_accumulation_steps": 2,
        "max_steps": 1,
        "learning_rate": 0.0,
        "max_grad_norm": 0.0,
        "logging_steps": 1,
        "train_sampling_strategy": "sequential",
        "use_cpu": True,
        "save_strategy": "no",
        "report_to": "none",
        "disable_tqdm": True,
    }
    trainer = Subclass(
        tiny_model("llama") if model is None else model,
        TrainingArguments(**settings | options),
        data_collator=collator,
        train_dataset=dataset,
        eval_dataset=dataset,
        processing_class=tiny_tokenizer() if collator is None else None,
        callbacks=[kept],
    )
    return trainer, kept


def step_of(call, folder, **options):
    model = tiny_model("llama")
    enable_packing(model)
    trainer, kept = trainer_with(call, folder, model, **options)
    trainer.train()
    return trainer, (trainer.state.log_history[0]["loss"], kept.gradients)


@pytest.mark.parametrize("options", COLLATED.values(), ids=list(COLLATED))
@pytest.mark.parametrize("call", CALLS, ids=lambda call: call.__name__)
def test_documents_are_trained_apart(call, options, tmp_path):
    trainer, found = step_of(call, tmp_path, **options)
    is_packed = "rows" not in options
    documents = documents_of_rows(trainer.train_dataset, range(4)) if is_packed else DOCUMENTS[:4]
    assert_same_step(found, by_hand(tiny_model("llama"), documents))
    expected = by_hand(tiny_model("llama"), DOCUMENTS)[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["PackedDataset", "PackedCollator"])
def test_the_comparison_sees_documents_that_see_each_other(name, tmp_path, monkeypatch):
    monkeypatch.setattr(plain_trainer, "completed_call", lambda model, call: call)
    monkeypatch.setattr("trl_packing.attention.interface.completed_call", lambda model, call: call)
    trainer, found = step_of(ids_only, tmp_path, **COLLATED[name])
    is_packed = name == "PackedDataset"
    documents = documents_of_rows(trainer.train_dataset, range(4)) if is_packed else DOCUMENTS[:4]
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(tiny_model("llama"), documents))


REFUSED = {
    "embedded": lambda model, ids: {"inputs_embeds": model.get_input_embeddings()(ids)},
    "changed tokens": lambda model, ids: {"input_ids": ids.clone().fill_(7)},
    "without the first token": lambda model, ids: {"input_ids": ids[:, 1:].clone()},
    "two copies": lambda model, ids: {"input_ids": ids.repeat(2, 1)},
}


@pytest.mark.parametrize("change", REFUSED.values(), ids=list(REFUSED))
def test_rows_that_nobody_can_tell_are_refused_in_training(change, tmp_path):
    def call(model, inputs):
        return model(**change(model, inputs["input_ids"])).logits

    with pytest.raises(ValueError, match="other_rows"):
        step_of(call, tmp_path)


def test_other_calls_of_an_enabled_model_are_as_they_were(tmp_path):
    """Of a model on which nothing was called: documents alone and cut, padded rows, generate."""
    model, plain, dataset = tiny_model("llama"), tiny_model("llama"), packed()
    enable_packing(model)
    collate = DataCollatorForSeq2Seq(tiny_tokenizer())
    alone = torch.tensor([DOCUMENTS[1]["input_ids"]])
    foreign = torch.randint(6, 90, (1, 23), generator=torch.Generator().manual_seed(5))
    longer = torch.cat([alone, foreign], 1)
    padded = collate([dict(d) for d in DOCUMENTS[:3]])
    for mode in (True, False):
        model.train(mode)
        for call in (
            {"input_ids": alone},
            {"input_ids": alone[:, :-2]},
            {"input_ids": alone, "attention_mask": torch.ones_like(alone)},
            {"input_ids": foreign, "attention_mask": torch.ones_like(foreign)},
            {"input_ids": longer, "attention_mask": torch.ones_like(longer)},
            dict(padded),
        ):
            found, expected = model(**call), plain(**call)
            torch.testing.assert_close(found.logits, expected.logits)
            assert (found.loss is None) == (expected.loss is None)
    torch.testing.assert_close(model(input_ids=foreign).logits, plain(input_ids=foreign).logits)
    model.train()
    with other_rows():
        found = model(input_ids=foreign).logits
    torch.testing.assert_close(found, plain(input_ids=foreign).logits)
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for ids, uses_cache in itertools.product((alone, foreign), (True, False)):
        written = [m.eval().generate(ids, use_cache=uses_cache, **options) for m in (model, plain)]
        assert torch.equal(*written)
    assert len(dataset)


def test_a_row_is_cut_into_its_documents():
    generator = np.random.default_rng(0)
    documents = documents_of_lengths([5, 9, 1, 30, 2, 14, 7, 21])
    dataset = packed(documents)
    assert len(dataset.lengths) == 8
    ids = [np.array(d["input_ids"]) for d in documents]
    for _ in range(50):
        chosen = generator.permutation(8)[: generator.integers(2, 8)]
        row = np.concatenate([ids[i] for i in chosen])
        lengths = [len(ids[i]) for i in chosen]
        assert documents_in(row).lengths == lengths
        padded = documents_in(np.append(row, [0, 0, 0]))
        assert padded.lengths == [*lengths[:-1], lengths[-1] + 3]
        assert padded.rest == 0
        assert documents_in(np.append(row, [91, 92])).rest == 2


def test_a_row_that_may_be_cut_in_two_ways_is_refused():
    documents = [{"input_ids": ids} for ids in ([5, 6], [5], [6], [7, 8, 9])]
    dataset = packed(documents)
    with pytest.raises(ValueError, match="in two ways"):
        documents_in(np.array([5, 6, 7, 8, 9]))
    assert documents_in(np.array([5, 6])).lengths == [2]  # a document
    assert len(dataset)
