"""Plain `transformers.Trainer` on packed rows: a step equals one document at a time."""

import copy
import pickle

import pytest
import torch
from architectures.tiny_models import tiny_model as any_model
from harness import alone, assert_exact
from helpers.plain_runs import documents_of_rows, first_step, leak_in_long_rows, packed
from helpers.tiny import tiny_model, tiny_tokenizer
from peft import LoraConfig, PrefixTuningConfig, PromptTuningConfig, TaskType, get_peft_model
from transformers import (
    DataCollatorForLanguageModeling,
    DataCollatorForSeq2Seq,
    DefaultDataCollator,
)

from trl_packing import PackedCollator, enable_packing
from trl_packing.plain_trainer.dataset import enabled_models

COLLATORS = {
    "default": DefaultDataCollator(),
    "seq2seq, padded": DataCollatorForSeq2Seq(tiny_tokenizer(), pad_to_multiple_of=16),
    "ours": PackedCollator(),
}


def first_rows(model, dataset):
    return alone(model, documents_of_rows(dataset, range(4)))


# --- exact ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["llama", "gemma3_text", "gpt_oss", "falcon_mamba"])
def test_a_step_equals_one_document_at_a_time(name, tmp_path):
    model = tiny_model(name)
    dataset = packed()
    expected = first_rows(model, dataset)
    assert enable_packing(model).backend == "documents"
    assert_exact(first_step(model, dataset, tmp_path), expected)


@pytest.mark.parametrize("name", COLLATORS)
def test_any_collator_that_keeps_the_columns_will_do(name, tmp_path):
    model = tiny_model("gpt_oss")
    dataset = packed()
    expected = first_rows(model, dataset)
    enable_packing(model, dataset)
    options = {"collator": COLLATORS[name], "remove_unused_columns": name == "default"}
    assert_exact(first_step(model, dataset, tmp_path, **options), expected)


@pytest.mark.parametrize("before", [True, False], ids=["then peft", "after peft"])
def test_lora(before, tmp_path):
    config = LoraConfig(r=4, target_modules="all-linear", init_lora_weights=False)
    base = tiny_model("gemma2")
    dataset = packed()
    plain = get_peft_model(copy.deepcopy(base), config)
    if before:
        enable_packing(base)
    model = get_peft_model(base, config)
    model.load_state_dict(plain.state_dict())
    if not before:
        enable_packing(model)
    assert_exact(first_step(model, dataset, tmp_path), first_rows(plain, dataset))


def test_workers_that_are_spawned_give_rows_out_where_a_model_is_enabled():
    """They are sent the data set, and have no model."""
    enabled_models.clear()
    sent = pickle.loads(pickle.dumps(packed()))
    with pytest.raises(RuntimeError, match="call enable_packing"):
        sent.__getitems__([0])
    model = tiny_model("llama")
    enable_packing(model)
    sent = pickle.loads(pickle.dumps(packed()))
    enabled_models.clear()
    assert len(sent.__getitems__([0, 1])) == 1


@pytest.mark.parametrize("name", ["llama", "falcon_mamba"])
def test_a_model_that_is_not_enabled_fails_the_comparison(name, tmp_path):
    other = tiny_model("llama")
    model = tiny_model(name)
    dataset = packed()
    enable_packing(other)  # so that rows are given out
    found = first_step(model, dataset, tmp_path)
    with pytest.raises(AssertionError):
        assert_exact(found, first_rows(model, dataset))


# --- what it refuses ------------------------------------------------------------------------------


def adapted(config):
    return get_peft_model(tiny_model("llama"), config)


VIRTUAL = {"task_type": TaskType.CAUSAL_LM, "num_virtual_tokens": 4}
WARNED = {"attention": "mask", "isolation_check": "warn"}
ACTIVATED = LoraConfig(task_type=TaskType.CAUSAL_LM, alora_invocation_tokens=[5])


REFUSED = [
    (lambda: "llama", {}, "takes a transformers model, got str"),
    (lambda: tiny_model("qwen3_moe", output_router_logits=True), {}, "output_router_logits"),
    (lambda: tiny_model("llama"), {"isolation_check": "no"}, "isolation_check='no'"),
    (lambda: adapted(PrefixTuningConfig(**VIRTUAL)), {}, "virtual tokens"),
    (lambda: adapted(ACTIVATED), {}, "alora_invocation_tokens activate .* PackedSFTTrainer"),
    (
        lambda: leak_in_long_rows(tiny_model("llama")),
        {"attention": "documents"},
        "documents LEAK into each other",
    ),
    # A warning would only come before the same error in the first step.
    (lambda: any_model("bloom"), WARNED, "BloomForCausalLM cannot run packed documents"),
]


@pytest.mark.parametrize(("make", "options", "says"), REFUSED)
def test_a_model_that_cannot_be_enabled_is_refused(make, options, says):
    with pytest.raises((TypeError, ValueError, RuntimeError), match=says):
        enable_packing(make(), **options)


class AllOnes(DefaultDataCollator):
    def __call__(self, features, return_tensors=None):
        batch = super().__call__(features, return_tensors)
        return batch | {"attention_mask": torch.ones_like(batch["input_ids"])}


LABELS = DataCollatorForLanguageModeling(tiny_tokenizer(), mlm=False)
LOST = [(AllOnes(), "without the boundaries of documents"), (LABELS, "first token .* has a label")]


@pytest.mark.parametrize(("collator", "says"), LOST)
def test_a_collator_that_loses_what_rows_say_is_refused(collator, says, tmp_path):
    model = tiny_model("llama")
    enable_packing(model)
    with pytest.raises(ValueError, match=says):
        first_step(model, packed(), tmp_path, collator=collator)


def test_virtual_tokens_are_refused_also_if_they_come_later(tmp_path):
    model = tiny_model("llama")
    enable_packing(model)
    with pytest.raises(ValueError, match="virtual tokens"):
        first_step(get_peft_model(model, PromptTuningConfig(**VIRTUAL)), packed(), tmp_path)


def test_numbered_documents_in_several_rows_are_refused():
    model = tiny_model("llama")
    dataset = packed()
    enable_packing(model)
    two = DataCollatorForSeq2Seq(tiny_tokenizer())([dataset[0], dataset[1]])
    with pytest.raises(ValueError, match="a packed batch is one row, got 2"):
        model(**two)
