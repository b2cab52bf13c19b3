"""Calls that are not packed stay as they were: generation, padded batches, copies, saved files."""

import pytest
import torch
from harness import TWO_RUNS
from helpers.dense import TOLERANCE
from helpers.packed_models import alone, packed_batch
from helpers.tiny import documents_of_lengths, tiny_model
from helpers.vision import tiny_vlm
from transformers import AttentionMaskInterface

from trl_packing import resolve_attention
from trl_packing.attention import document_sdpa
from trl_packing.attention.install import install_attention


def padded(lengths, side):
    rows = [d["input_ids"] for d in documents_of_lengths(lengths, seed=4)]
    fill = [[0] * (max(lengths) - len(row)) for row in rows]
    made = [(p + r, p + [1] * len(r)) for p, r in zip(fill, rows, strict=True)]
    if side == "right":
        made = [(r + p, [1] * len(r) + p) for p, r in zip(fill, rows, strict=True)]
    ids, mask = zip(*made, strict=True)
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def everyday_calls(model):
    """Ordinary uses of a model besides packed training; every result compares bit by bit."""
    model.eval()
    left, right = padded([12, 3, 7], "left"), padded([12, 3, 7], "right")
    results = {
        "one document": model(input_ids=left["input_ids"][:1]).logits,
        "left-padded": model(**left).logits[left["attention_mask"].bool()],
        "right-padded": model(**right).logits[right["attention_mask"].bool()],
        "generated": model.generate(**left, do_sample=False, max_new_tokens=6, pad_token_id=0),
    }
    # The second half of the row does not see the first.
    at = torch.arange(12)
    seen = (at[:, None] >= at[None]) & ((at[:, None] < 5) == (at[None] < 5))
    additive = torch.zeros(1, 1, 12, 12).masked_fill(~seen, torch.finfo(torch.float32).min)
    results["4-D mask"] = model(input_ids=left["input_ids"][:1], attention_mask=additive).logits
    model.train()
    logits = model(**right).logits[right["attention_mask"].bool()]
    weight = model.get_input_embeddings().weight
    results["gradient"] = torch.autograd.grad(logits.square().mean(), weight)[0]
    return results


WAYS = [("llama", way) for way in ("documents", "model", "mask", "padded", "equal_lengths")]


@pytest.mark.parametrize(
    ("name", "way"), [*WAYS, *((name, "auto") for name in ("gemma2", "gpt_oss", "gpt2"))]
)
def test_calls_that_are_not_packed_stay_as_they_were(name, way):
    model = tiny_model(name)
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model, way))
    model(**packed_batch([3, 5]))
    for call, result in everyday_calls(model).items():
        torch.testing.assert_close(result, before[call], rtol=0, atol=TWO_RUNS, msg=call)


def test_without_a_mask_function_padded_batches_would_change(monkeypatch):
    """The negative control of the test above, and why a mask function is registered too."""
    model = tiny_model("llama")
    before = everyday_calls(model)
    install_attention(model, resolve_attention(model))
    monkeypatch.delitem(AttentionMaskInterface._global_mapping, document_sdpa.NAME)
    after = everyday_calls(model)
    assert (after["left-padded"] - before["left-padded"]).abs().max() > 0.1
    assert not torch.equal(after["generated"], before["generated"])


def test_only_the_text_model_of_a_composite_one_changes(tmp_path):
    pytest.importorskip("PIL")
    model, _ = tiny_vlm("llava")
    batch = padded([12, 3, 7], "left")
    before = model(**batch).logits
    vision = model.config.vision_config._attn_implementation
    install_attention(model, resolve_attention(model))
    assert model.config.text_config._attn_implementation == document_sdpa.NAME
    assert model.config.vision_config._attn_implementation == vision
    assert torch.equal(model(**batch).logits, before)
    row = packed_batch([3, 20, 9])
    torch.testing.assert_close(model(**row).logits, alone(model, row), rtol=0, atol=10 * TOLERANCE)
    model.save_pretrained(tmp_path)
    assert "packed" not in (tmp_path / "config.json").read_text()
