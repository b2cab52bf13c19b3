"""A plain Trainer whose loss calls the model on a packed row without the row's boundaries.

`enable_packing` is told of no row: it must find them by what is in the call, or refuse the call.
"""

import functools
import itertools

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers.by_hand import assert_same_step, by_hand
from helpers.combinations import combined
from helpers.one_step import PLAIN_ONE_STEP, Keep
from helpers.plain_runs import COLLATORS, DOCUMENTS, documents_of_rows, packed
from helpers.tiny import documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import (
    DataCollatorForSeq2Seq,
    DynamicCache,
    LlamaForCausalLM,
    Trainer,
    TrainerCallback,
    TrainingArguments,
)
from transformers import DataCollatorWithFlattening as TheirFlattening

from trl_packing import PackedCollator, enable_packing, other_rows
from trl_packing.plain_trainer import forward
from trl_packing.recognition import rows_by_content
from trl_packing.recognition.known_documents import find_documents


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


def embedded(model, inputs):
    return model(inputs_embeds=model.get_input_embeddings()(inputs["input_ids"])).logits


def embedded_and_ones(model, inputs):
    ids = inputs["input_ids"]
    embeddings = model.get_input_embeddings()(ids)
    return model(inputs_embeds=embeddings, attention_mask=torch.ones_like(ids)).logits


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
    embedded,
    embedded_and_ones,
    with_labels,
]
COLLATED = {
    "PackedDataset": {},
    "PackedDataset, padded": {"collator": COLLATORS["seq2seq, padded"]},
    "PackedDataset, workers": {"dataloader_num_workers": 1},
    "PackedDataset and PackedCollator": {"collator": PackedCollator()},
    "PackedCollator": {"collator": PackedCollator(), "rows": DOCUMENTS},
    "flattened by transformers": {"collator": TheirFlattening(), "rows": DOCUMENTS},
    "flattened by transformers, workers": {
        "collator": TheirFlattening(return_flash_attn_kwargs=True, return_seq_idx=True),
        "rows": DOCUMENTS,
        "dataloader_num_workers": 1,
    },
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
                return self.compute_loss(model, inputs).detach(), torch.zeros(1), torch.zeros(1)

    kept = Keep()
    dataset = packed() if rows is None else Dataset.from_list(rows)
    settings = PLAIN_ONE_STEP | {
        "output_dir": str(folder),
        "per_device_train_batch_size": 2,
        "per_device_eval_batch_size": len(dataset),
        "gradient_accumulation_steps": 2,
        "train_sampling_strategy": "sequential",
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


@pytest.mark.parametrize(
    ("call", "name"), combined(CALLS, COLLATED), ids=lambda value: getattr(value, "__name__", value)
)
def test_documents_are_trained_apart(call, name, tmp_path):
    trainer, found = step_of(call, tmp_path, **COLLATED[name])
    is_packed = "rows" not in COLLATED[name]
    documents = documents_of_rows(trainer.train_dataset, range(4)) if is_packed else DOCUMENTS[:4]
    assert_same_step(found, by_hand(tiny_model("llama"), documents))
    expected = by_hand(tiny_model("llama"), DOCUMENTS)[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


@pytest.mark.parametrize("name", ["PackedDataset", "PackedCollator"])
def test_the_comparison_sees_documents_that_see_each_other(name, tmp_path, monkeypatch):
    monkeypatch.setattr(forward, "complete_call", lambda model, call: call)
    monkeypatch.setattr("trl_packing.recognition.calls.complete_call", lambda model, call: call)
    trainer, found = step_of(ids_only, tmp_path, **COLLATED[name])
    is_packed = name == "PackedDataset"
    documents = documents_of_rows(trainer.train_dataset, range(4)) if is_packed else DOCUMENTS[:4]
    with pytest.raises(AssertionError):
        assert_same_step(found, by_hand(tiny_model("llama"), documents))


@pytest.mark.parametrize("call", [embedded, embedded_and_ones], ids=lambda call: call.__name__)
def test_embedded_rows_are_told_by_the_row_in_flight(call, tmp_path, monkeypatch):
    """The negative control: without it, an evaluation silently mixes documents."""
    expected = by_hand(tiny_model("llama"), DOCUMENTS)[0]
    trainer, _ = step_of(call, tmp_path)
    monkeypatch.setattr(rows_by_content, "row_in_flight", lambda model: None)
    assert trainer.evaluate()["eval_loss"] != pytest.approx(expected, rel=1e-3)


def changed(ids):
    return torch.where(ids % 5 == 0, 7, ids)


def changed_tokens(model, inputs):
    ids = changed(inputs["input_ids"])
    return model(input_ids=ids, attention_mask=torch.ones_like(ids)).logits


def changed_tokens_alone(model, inputs):
    return model(input_ids=changed(inputs["input_ids"])).logits


@pytest.mark.parametrize("options", COLLATED.values(), ids=list(COLLATED))
@pytest.mark.parametrize("call", [changed_tokens, changed_tokens_alone])
def test_rows_with_changed_tokens_are_still_cut_as_they_were(call, options, tmp_path):
    def changed_documents(documents):
        ids = [changed(torch.tensor(d["input_ids"])).tolist() for d in documents]
        return [d | {"input_ids": c} for d, c in zip(documents, ids, strict=True)]

    trainer, found = step_of(call, tmp_path, **options)
    is_packed = "rows" not in options
    documents = documents_of_rows(trainer.train_dataset, range(4)) if is_packed else DOCUMENTS[:4]
    assert_same_step(found, by_hand(tiny_model("llama"), changed_documents(documents)))
    expected = by_hand(tiny_model("llama"), changed_documents(DOCUMENTS))[0]
    assert trainer.evaluate()["eval_loss"] == pytest.approx(expected, rel=1e-4)


def embed(model, ids):
    return model.get_input_embeddings()(ids)


REFUSED = {
    "without the first token": lambda model, ids: {"input_ids": ids[:, 1:].clone()},
    "changed, without the first token": lambda model, ids: {"input_ids": changed(ids)[:, 1:]},
    "changed, without the last one": lambda model, ids: {"input_ids": changed(ids)[:, :-1]},
    "changed, behind another": lambda model, ids: {"input_ids": F.pad(changed(ids), (1, 0))},
    "its end": lambda model, ids: {"input_ids": ids[:, 2:]},
    "behind others": lambda model, ids: {"input_ids": F.pad(ids, (3, 0), value=7)},
    "two copies": lambda model, ids: {"input_ids": ids.repeat(2, 1)},
    "embedded, without the first token": lambda model, ids: {
        "inputs_embeds": embed(model, ids[:, 1:])
    },
    "embedded, behind others": lambda model, ids: {
        "inputs_embeds": F.pad(embed(model, ids), (0, 0, 4, 0))
    },
    "embedded twice": lambda model, ids: {"inputs_embeds": embed(model, ids).repeat(2, 1, 1)},
    "with a cache": lambda model, ids: {
        "input_ids": ids.clone(),
        "past_key_values": DynamicCache(),
    },
}
ROWS = {name: COLLATED[name] for name in ("PackedDataset", "flattened by transformers")}


@pytest.mark.parametrize("is_masked", [True, False], ids=["a mask of ones", "no mask"])
@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("change", REFUSED.values(), ids=list(REFUSED))
def test_rows_that_nobody_can_tell_are_refused(change, options, is_masked, tmp_path):
    def call(model, inputs):
        arguments = change(model, inputs["input_ids"])
        tokens = next(iter(arguments.values()))
        if is_masked:
            arguments["attention_mask"] = torch.ones(tokens.shape[:2], dtype=torch.int64)
        return model(**arguments).logits

    with pytest.raises(ValueError, match="other_rows"):
        step_of(call, tmp_path, **options)
    trainer, _ = step_of(ids_only, tmp_path, **options)
    trainer.compute_loss = lambda model, inputs: call(model, inputs).sum()
    with pytest.raises(ValueError, match="other_rows"):
        trainer.evaluate()


@pytest.mark.parametrize("is_masked", [True, False], ids=["a mask of ones", "no mask"])
@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
def test_tokens_that_are_all_others_are_refused_in_training(options, is_masked, tmp_path):
    def call(model, inputs):
        ids = 96 - inputs["input_ids"]
        mask = {"attention_mask": torch.ones_like(ids)} if is_masked else {}
        return model(input_ids=ids, **mask).logits

    with pytest.raises(ValueError, match="other_rows"):
        step_of(call, tmp_path, **options)


# --- ordinary calls -------------------------------------------------------------------------------


def ordinary_calls():
    """Calls that anybody makes beside a packed row, and in training with a mask."""
    collate = DataCollatorForSeq2Seq(tiny_tokenizer())
    alone = torch.tensor([DOCUMENTS[1]["input_ids"]])
    foreign = prompt()
    longer = torch.cat([alone, foreign.repeat(1, 20)], 1)
    padded = dict(collate([dict(d) for d in DOCUMENTS[:4]]))
    left = {"input_ids": F.pad(alone, (9, 0)), "attention_mask": F.pad(alone, (9, 0)) > 0}
    yield padded
    yield {"input_ids": padded["input_ids"]}
    yield left
    for ids in (alone, alone[:, :-2], foreign, longer, foreign[:, :1], foreign[:, :2]):
        yield {"input_ids": ids, "attention_mask": torch.ones_like(ids)}


def prompt(length=23):
    return torch.randint(6, 90, (1, length), generator=torch.Generator().manual_seed(5))


def assert_calls_are_as_they_were(model, plain):
    for call in (*ordinary_calls(), {"input_ids": prompt()}):
        logits = [m(**call).logits for m in (model, plain)]
        torch.testing.assert_close(*logits)
    begun = [m(input_ids=prompt(), use_cache=True).past_key_values for m in (model, plain)]
    two = [m(inputs_embeds=embed(m, prompt().repeat(2, 1))).logits for m in (model, plain)]
    torch.testing.assert_close(*two)
    logits = [
        m(input_ids=prompt()[:, :4], past_key_values=cache).logits
        for m, cache in zip((model, plain), begun, strict=True)
    ]
    torch.testing.assert_close(*logits)


def assert_writes_the_same(model, plain):
    alone = torch.tensor([DOCUMENTS[1]["input_ids"]])
    foreign = prompt()
    options = {"max_new_tokens": 5, "do_sample": False, "pad_token_id": 0}
    for ids, uses_cache in itertools.product((alone, foreign), (True, False)):
        written = [m.generate(ids, use_cache=uses_cache, **options) for m in (model, plain)]
        assert torch.equal(*written)
    begun = [m.generate(inputs_embeds=embed(m, foreign), **options) for m in (model, plain)]
    assert torch.equal(*begun)


def tiny_llama():
    return tiny_model("llama")


def llama_that_embeds():
    class Embedding(LlamaForCausalLM):
        @functools.wraps(LlamaForCausalLM.forward)
        def forward(self, input_ids=None, inputs_embeds=None, **kwargs):
            if inputs_embeds is None:
                inputs_embeds = embed(self, input_ids)
            return super().forward(inputs_embeds=inputs_embeds, **kwargs)

    model = tiny_llama()
    model.__class__ = Embedding
    return model


@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
@pytest.mark.parametrize("make", [tiny_llama, llama_that_embeds])
def test_other_calls_in_a_step_are_as_they_were(make, options, tmp_path):
    """In `compute_loss` and `prediction_step`, beside the call on the packed row.

    An ordinary call of a model that embeds tokens before it calls its backbone is ordinary there.
    """
    model, plain, modes = make(), make(), []
    enable_packing(model)

    def call(model, inputs):
        modes.append(model.training)
        plain.train(model.training)
        if model.training:
            for ordinary in ordinary_calls():
                torch.testing.assert_close(model(**ordinary).logits, plain(**ordinary).logits)
        else:
            assert_calls_are_as_they_were(model, plain)
            assert_writes_the_same(model, plain)
        return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits

    trainer, _ = trainer_with(call, tmp_path, model, **options)
    trainer.train()
    trainer.evaluate()
    assert set(modes) == {True, False}


class Probe(TrainerCallback):
    """Calls the model between steps, where no row is in flight."""

    def __init__(self, model, plain):
        self.models, self.seen = (model, plain), set()

    def probe(self, event):
        self.seen.add(event)
        modes = [m.training for m in self.models]
        model, plain = (m.eval() for m in self.models)
        with torch.no_grad():
            embeddings = embed(plain, prompt(40))
            logits = [m(inputs_embeds=embeddings).logits for m in (model, plain)]
            torch.testing.assert_close(*logits)
            assert_calls_are_as_they_were(model, plain)
            assert_writes_the_same(model, plain)
        for m, mode in zip(self.models, modes, strict=True):
            m.train(mode)

    def compute_metrics(self, predictions):
        self.probe("metrics")
        return {}

    def on_step_begin(self, *args, **kwargs):
        self.probe("step begin")

    def on_step_end(self, *args, **kwargs):
        self.training_step("step end")

    def training_step(self, event):  # a name of Trainer's
        self.probe(event)

    def on_prediction_step(self, *args, **kwargs):
        self.probe("prediction step")

    def on_evaluate(self, *args, **kwargs):
        self.probe("evaluate")


@pytest.mark.parametrize("options", ROWS.values(), ids=list(ROWS))
def test_a_probe_between_two_steps_is_as_it_was(options, tmp_path):
    model = tiny_model("llama")
    probe = Probe(model, tiny_model("llama"))
    enable_packing(model)
    trainer, _ = trainer_with(ids_only, tmp_path, model, eval_strategy="steps", **options)
    trainer.add_callback(probe)
    trainer.compute_metrics = probe.compute_metrics
    trainer.train()
    probe.probe("afterwards")
    assert probe.seen == {
        "step begin",
        "step end",
        "prediction step",
        "metrics",
        "evaluate",
        "afterwards",
    }


def test_other_calls_of_an_enabled_model_are_as_they_were(tmp_path):
    """Of a model on which nothing was called: documents alone and cut, padded rows, generate."""
    model, plain, dataset = tiny_model("llama"), tiny_model("llama"), packed()
    enable_packing(model)
    collate = DataCollatorForSeq2Seq(tiny_tokenizer())
    alone = torch.tensor([DOCUMENTS[1]["input_ids"]])
    foreign = prompt()
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
        assert find_documents(row).lengths == lengths
        padded = find_documents(np.append(row, [0, 0, 0]))
        assert padded.lengths == [*lengths[:-1], lengths[-1] + 3]
        assert padded.rest == 0
        assert find_documents(np.append(row, [91, 92])).rest == 2


def test_a_row_that_may_be_cut_in_two_ways_is_refused():
    documents = [{"input_ids": ids} for ids in ([5, 6], [5], [6], [7, 8, 9])]
    dataset = packed(documents)
    with pytest.raises(ValueError, match="in two ways"):
        find_documents(np.array([5, 6, 7, 8, 9]))
    assert find_documents(np.array([5, 6])).lengths == [2]  # a document
    assert len(dataset)
