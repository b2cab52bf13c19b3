"""Whole models: a packed row has the logits and gradients of its documents alone."""

import logging
import warnings

import pytest
import torch
from helpers import varlen_double
from helpers.dense import TOLERANCE
from helpers.packed_models import alone, packed_batch, packed_model
from helpers.tiny import tiny_model
from torch import nn
from torch._dynamo.testing import CompileCounter

from trl_packing.attention import document_sdpa
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention


def test_compiled_models_compute_the_same_and_settle_on_their_graphs():
    model, counter = packed_model("llama"), CompileCounter()
    compiled = torch.compile(model, backend=counter, fullgraph=True)
    for lengths in ((5, 9, 3), (4, 4), (7, 2, 2, 6), (11, 1)):
        batch = packed_batch(lengths)
        found, expected = compiled(**batch).logits, model(**batch).logits
        torch.testing.assert_close(found, expected, rtol=0, atol=TOLERANCE)
    assert counter.frame_count <= 2, "the second batch made lengths dynamic; later ones reuse it"


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
