"""Whole models: a packed row has the logits and gradients of its documents alone."""

import logging
import warnings

import pytest
import torch
from helpers import varlen_double
from helpers.dense import TOLERANCE
from helpers.packed_models import MODELS_AND_FALLBACKS, alone, packed_batch, packed_model
from helpers.tiny import tiny_model
from torch import nn

from trl_packing.attention import document_sdpa
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention


def test_compiled_models_compute_the_same_and_settle_on_their_graphs():
    model = packed_model("llama")
    num_graphs = 0

    def count(graph, example_inputs):
        nonlocal num_graphs
        num_graphs += 1
        return graph.forward

    compiled = torch.compile(model, backend=count, fullgraph=True)
    for number, lengths in enumerate([(5, 9, 3), (4, 4), (7, 2, 2, 6), (11, 1)]):
        batch = packed_batch(lengths)
        torch.testing.assert_close(
            compiled(**batch).logits, model(**batch).logits, rtol=0, atol=TOLERANCE
        )
        if number == 1:
            settled = num_graphs
    assert num_graphs == settled <= 2, "the second batch made lengths dynamic; later ones reuse it"


@pytest.mark.parametrize(("name", "fallback"), MODELS_AND_FALLBACKS)
def test_a_packed_row_equals_its_documents_alone(name, fallback):
    model = packed_model(name, fallback)
    batch = packed_batch([3, 20, 1, 9, 12])
    torch.testing.assert_close(
        model(**batch).logits, alone(model, batch), rtol=0, atol=10 * TOLERANCE
    )


@pytest.mark.parametrize("attention", ["documents", "varlen", "model", "mask", "padded"])
def test_boundaries_that_end_before_the_row_are_refused(attention, monkeypatch):
    """nn.DataParallel hands each GPU half of the boundaries; kernels compute no tokens behind."""
    varlen_double.install(monkeypatch)
    model = tiny_model("llama")
    implementation = {"documents": "packed_documents", "varlen": "packed_varlen"}.get(attention)
    install_attention(model, AttentionChoice(attention, implementation, "a test"))
    batch = packed_batch([3, 20, 9, 12])
    model(**batch)
    for name in ("cu_seq_lens_q", "cu_seq_lens_k"):
        batch[name] = batch[name].chunk(2)[0]
    with pytest.raises(ValueError, match=r"ends at 23, and the row has 44.*DataParallel"):
        model(**batch)


def test_scores_are_scaled_as_the_model_says():
    """gemma2 divides by the root of query_pre_attn_scalar, which is not its head_dim here."""
    model = packed_model("gemma2", query_pre_attn_scalar=2)
    batch = packed_batch([3, 20, 9])
    expected = alone(tiny_model("gemma2", query_pre_attn_scalar=2), batch)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=10 * TOLERANCE)
    by_head_dim = alone(tiny_model("gemma2", query_pre_attn_scalar=8), batch)
    assert (by_head_dim - expected).abs().max() > 0.1


BF16_LOGITS = {"rtol": 0, "atol": 8 * 2**-8 * 4}  # a few roundings of 8 bits of logits below 4


def test_autocast_reaches_packed_attention_as_it_reaches_sdpa():
    """Rotary embeddings return float32 under autocast, beside values in bf16."""
    model = packed_model("qwen3")
    batch = packed_batch([3, 20, 9])
    with torch.autocast("cpu", torch.bfloat16):
        logits, expected = model(**batch).logits, alone(model, batch)
    assert logits.dtype == torch.bfloat16
    torch.testing.assert_close(logits, expected, **BF16_LOGITS)


def test_norms_may_be_kept_in_float32():
    """As peft does; queries and keys are then wider than values."""
    model, reference = (make("qwen3", dtype=torch.bfloat16) for make in (packed_model, tiny_model))
    for layer in model.model.layers:
        layer.self_attn.q_norm.float()
        layer.self_attn.k_norm.float()
    batch = packed_batch([3, 20, 9])
    torch.testing.assert_close(model(**batch).logits, alone(reference, batch), **BF16_LOGITS)


@pytest.mark.parametrize("name", ["llama", "gpt_oss"])
def test_gradient_checkpointing_keeps_the_gradients(name):
    """Layers run again in the backward, outside the call that announced itself as packed."""
    gradients = []
    for checkpointing in (False, True):
        model = packed_model(name).train()
        if checkpointing:
            model.gradient_checkpointing_enable({"use_reentrant": False})
        model(**packed_batch([3, 20, 9])).logits.square().mean().backward()
        gradients.append({n: p.grad for n, p in model.named_parameters()})
    for parameter, expected in gradients[0].items():
        torch.testing.assert_close(gradients[1][parameter], expected, rtol=0, atol=TOLERANCE)


@pytest.fixture
def messages(caplog):
    """Messages of transformers: its logger does not propagate to pytest's handler by itself."""
    logger = logging.getLogger("transformers")
    before, logger.propagate = logger.propagate, True
    yield caplog
    logger.propagate = before


@pytest.mark.parametrize("implementation", ["sdpa", "eager"])
def test_attention_mask_or_cache_breaks_isolation(implementation, messages):
    """On untouched transformers: why a packed batch has no mask, and `use_cache=False` in it."""
    model = tiny_model("llama", attn_implementation=implementation)
    batch = packed_batch([3, 20, 9])
    expected = alone(model, batch)
    torch.testing.assert_close(model(**batch).logits, expected, rtol=0, atol=10 * TOLERANCE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        with_mask = model(**batch, attention_mask=torch.ones_like(batch["input_ids"])).logits
        with_cache = model(**{**batch, "use_cache": True}).logits
        by_default = model(**{k: v for k, v in batch.items() if k != "use_cache"}).logits
    for leaking in (with_mask, with_cache, by_default):
        torch.testing.assert_close(leaking[:, :3], expected[:, :3], rtol=0, atol=10 * TOLERANCE)
        assert (leaking - expected)[:, 3:].abs().max() > 0.1
    assert not messages.records, "and nobody says a word"


@pytest.mark.parametrize("argument", ["position_bias", "attention_bias", "alibi", "head_mask"])
def test_what_packed_kernels_do_not_compute_is_refused(argument):
    from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

    attention = ALL_ATTENTION_FUNCTIONS[document_sdpa.NAME]
    q = torch.randn(1, 2, 5, 4)
    given = {argument: torch.zeros(5, 5), "cu_seq_lens_q": torch.tensor([0, 5])}
    with pytest.raises(NotImplementedError, match=f"{argument}.*attention='model'"):
        attention(nn.Module(), q, q, q, None, **given)
    with pytest.raises(ValueError, match="one flat row, got 2 rows"):
        attention(
            nn.Module(), *[q.repeat(2, 1, 1, 1)] * 3, None, cu_seq_lens_q=torch.tensor([0, 5])
        )
