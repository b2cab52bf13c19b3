"""Whole models on packed rows: compiled, in little memory, and refusals of what kernels lack."""

import pytest
import torch
from helpers import varlen_double
from helpers.dense import TOLERANCE
from helpers.memory import largest_allocation
from helpers.packed_models import install, packed_batch, packed_model
from helpers.tiny import tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounter
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


def test_compiled_models_compute_the_same_and_settle_on_their_graphs():
    model = packed_model("llama")
    counter = CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ((5, 9, 3), (4, 4), (7, 2, 2, 6), (11, 1)):
        batch = packed_batch(lengths)
        found, expected = compiled(**batch).logits, model(**batch).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert counter.frame_count <= 2, "the second batch made lengths dynamic; later ones reuse it"


@pytest.mark.parametrize("name", ["mistral", "gemma2", "gpt_oss"])
def test_no_mask_of_the_whole_row_is_allocated(name):
    """At T = 2,048 a mask has 2**22 entries, of a byte at least; the logits have 2.6 million."""
    batch = packed_batch([64] * 30 + [100, 28])
    own = {"max_position_embeddings": 2048}

    def largest_in(model):
        return largest_allocation(lambda: model(**batch).logits.square().mean().backward())

    assert largest_in(tiny_model(name, **own)) >= 2048**2, "the model's own mask is there"
    assert largest_in(packed_model(name, **own)) < 2048**2


@pytest.mark.parametrize("name", ["gpt2", "llama"])
def test_positions_that_are_left_out_restart_in_every_document(name):
    model = packed_model(name)
    batch = packed_batch((5, 9, 3))
    expected = model(**batch).logits
    del batch["position_ids"]
    assert torch.equal(model(**batch).logits, expected)


@pytest.mark.parametrize("attention", ["mask", "padded"])
def test_a_model_that_calls_past_its_backbone_keeps_documents_apart(attention):
    model = tiny_model("opt")
    batch = packed_batch((5, 9, 3))
    alone = [model(input_ids=ids).logits for ids in batch["input_ids"].split((5, 9, 3), 1)]
    install(model, attention)
    torch.testing.assert_close(model(**batch).logits, torch.cat(alone, 1), rtol=0, atol=TOLERANCE)


@pytest.mark.parametrize("attention", ["documents", "varlen", "model", "mask", "padded"])
def test_boundaries_that_end_before_the_row_are_refused(attention, monkeypatch):
    """nn.DataParallel hands each GPU half of the boundaries; kernels compute no tokens behind."""
    varlen_double.install(monkeypatch)
    model = install(
        tiny_model("llama"), attention, gpu=monkeypatch if attention == "varlen" else None
    )
    batch = packed_batch([3, 20, 9, 12])
    model(**batch)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = batch[name].chunk(2)[0]
    with pytest.raises(ValueError, match=r"ends at 23, and the row has 44.*DataParallel"):
        model(**batch)


def test_what_packed_kernels_do_not_compute_is_refused():
    attention = ALL_ATTENTION_FUNCTIONS["packed_documents"]
    q = torch.randn(1, 2, 5, 4)
    ends = {"cu_seq_lens_q": torch.tensor([0, 5])}
    for argument in ("position_bias", "attention_bias", "alibi", "head_mask", "dropout"):
        value = 0.1 if argument == "dropout" else torch.zeros(5, 5)
        with pytest.raises(NotImplementedError, match=f"{argument}.*attention='model'"):
            attention(nn.Module(), q, q, q, None, **{argument: value}, **ends)
    with pytest.raises(ValueError, match="one flat row, got 2 rows"):
        attention(nn.Module(), *[q.repeat(2, 1, 1, 1)] * 3, None, **ends)
