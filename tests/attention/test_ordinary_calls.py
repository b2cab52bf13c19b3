"""Calls that are not packed stay as they were: generation, padded batches, copies, saved files."""

import pytest
import torch
from harness import TWO_RUNS
from helpers.packed_models import packed_batch
from helpers.tiny import documents_of_lengths, tiny_model
from transformers import AttentionMaskInterface

from trl_packing import resolve_attention
from trl_packing.attention import document_sdpa
from trl_packing.attention.install import install_attention

LENGTHS = torch.tensor([12, 3, 7])


def padded(side):
    rows = [torch.tensor(d["input_ids"]) for d in documents_of_lengths(LENGTHS.tolist(), seed=4)]
    ids = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True, padding_side=side)
    at = torch.arange(12) if side == "right" else torch.arange(11, -1, -1)
    return {"input_ids": ids, "attention_mask": (at < LENGTHS[:, None]).long()}


def everyday_calls(model):
    """Ordinary uses of a model besides packed training; every result compares bit by bit."""
    model.eval()
    left, right = padded("left"), padded("right")
    # The second half of the row does not see the first.
    at = torch.arange(12)
    seen = (at[:, None] >= at[None]) & ((at[:, None] < 5) == (at[None] < 5))
    additive = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    results = {
        "one document": model(input_ids=left["input_ids"][:1]).logits,
        "left-padded": model(**left).logits[left["attention_mask"].bool()],
        "right-padded": model(**right).logits[right["attention_mask"].bool()],
        "generated": model.generate(**left, do_sample=False, max_new_tokens=6, pad_token_id=0),
        "4-D mask": model(input_ids=left["input_ids"][:1], attention_mask=additive).logits,
    }
    logits = model.train()(**right).logits[right["attention_mask"].bool()]
    weight = model.get_input_embeddings().weight
    results["gradient"] = torch.autograd.grad(logits.square().mean(), weight)[0]
    return results


WAYS = [("llama", way) for way in ("documents", "model", "mask", "padded")]
WAYS += [(name, "auto") for name in ("gemma2", "gpt_oss")]


@pytest.mark.parametrize(("name", "way"), WAYS)
def test_calls_that_are_not_packed_stay_as_they_were(name, way):
    model = tiny_model(name)
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model, way))
    model(**packed_batch([3, 5]))
    torch.testing.assert_close(everyday_calls(model), before, rtol=0, atol=TWO_RUNS)


def test_without_a_mask_function_padded_batches_would_change(monkeypatch):
    """The negative control of the test above, and why a mask function is registered too."""
    model = tiny_model("llama")
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model))
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, document_sdpa.NAME)
    after = everyday_calls(model)
    assert (after["left-padded"] - before["left-padded"]).abs().max() > 0.1
    assert not torch.equal(after["generated"], before["generated"])
