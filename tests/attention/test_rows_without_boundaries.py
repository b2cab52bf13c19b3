"""An enabled model in a plain Trainer takes boundaries, or runs in `other_rows`, or refuses."""

import copy

import pytest
import torch
from datasets import Dataset
from harness import alone, assert_exact
from helpers.model_calls import (
    a_copy,
    backbone,
    embedded,
    ids_only,
    mask_of_ones,
)
from helpers.plain_runs import DOCUMENTS, documents_of_rows, first_step, packed
from helpers.tiny import tiny_model, tiny_tokenizer
from transformers import DataCollatorForSeq2Seq
from transformers import DataCollatorWithFlattening as TheirFlattening

from trl_packing import PackedCollator, enable_packing, other_rows


def whole(trainer, model, inputs):
    return model(**{k: v for k, v in inputs.items() if k != "labels"}).logits


COLLATORS = {
    "PackedDataset": None,
    "PackedCollator": PackedCollator(),
    "flattened by transformers": TheirFlattening(),
}
IN_MEMORY = [ids_only, mask_of_ones, backbone]
# Only our collator keeps its rows in memory, so that their tokens are known.
EXACT = [(name, whole) for name in COLLATORS] + [("PackedCollator", call) for call in IN_MEMORY]
REFUSED = [("PackedCollator", a_copy), ("flattened by transformers", embedded)]
REFUSED += [("PackedDataset", call) for call in (ids_only, mask_of_ones)]


def assert_step_is_exact(name, call, folder):
    """Train one step in a plain Trainer, whose loss is the mean of what `call` says of a row."""
    # gpt_oss needs us: transformers makes its mask without looking at position_ids.
    model = tiny_model("gpt_oss" if "transformers" in name else "llama")
    expected = copy.deepcopy(model)
    collator = COLLATORS[name]
    dataset = Dataset.from_list(DOCUMENTS) if collator else packed()
    enable_packing(model)
    found = first_step(model, dataset, folder, call, collator=collator)
    documents = DOCUMENTS[:4] if collator else documents_of_rows(dataset, range(4))
    assert_exact(found, alone(expected, documents))


@pytest.mark.parametrize(("name", "call"), EXACT)
def test_documents_are_known_by_boundaries_or_by_tokens_in_memory(name, call, tmp_path):
    assert_step_is_exact(name, call, tmp_path)


def test_the_comparison_sees_documents_that_see_each_other(tmp_path, monkeypatch):
    monkeypatch.setattr("trl_packing.attention.calls.complete_call", lambda model, call: call)
    monkeypatch.setattr("trl_packing.plain_trainer.enable.complete_call", lambda model, call: call)
    with pytest.raises(AssertionError):
        assert_step_is_exact("PackedCollator", ids_only, tmp_path)


@pytest.mark.parametrize(("name", "call"), REFUSED)
def test_any_other_call_in_training_is_refused(name, call, tmp_path):
    with pytest.raises(ValueError, match=r"boundaries of documents.*other_rows"):
        assert_step_is_exact(name, call, tmp_path)


@pytest.mark.parametrize("name", ["falcon_mamba", "llama"])  # their caches have had two names
def test_other_calls_are_as_they_were(name):
    """In evaluation, in training inside `other_rows`, and of `generate` in both."""
    model, plain = tiny_model(name), tiny_model(name)
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


@pytest.mark.parametrize("name", ["cache", "past_key_values", "cache_params"])
def test_a_cache_is_of_one_document(name):
    model = tiny_model("llama")
    enable_packing(model)
    ids = torch.arange(3, 11)[None]
    numbers = {"attention_mask": torch.tensor([[1] * 5 + [2] * 3])}
    with pytest.raises(ValueError, match=r"a cache .* one document"):
        model.train()(input_ids=ids, **numbers, **{name: object()})
