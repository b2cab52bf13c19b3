"""PyTorch's varlen attention gets the right arguments; doubles stand in for its kernels."""

import inspect

import pytest
import torch
import torch.nn.attention.varlen
from helpers import varlen_double
from helpers.dense import (
    TOLERANCE,
    assert_equals_dense,
    boundaries,
    dense_attention,
    inputs,
    with_keywords,
)
from helpers.packed_models import alone, packed_batch
from helpers.tiny import WINDOW, tiny_model

from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention

varlen_attention = with_keywords(torch_varlen.varlen_attention)


@pytest.fixture
def varlen_calls(monkeypatch):
    """Make `varlen_attn` compute from its arguments, and keep them."""
    calls = []

    def varlen_attn(
        query, key, value, cu_seq_q, cu_seq_k, max_q, max_k, *, scale, window_size, enable_gqa
    ):
        calls.append(
            {
                "cu_seqlens": (cu_seq_q, cu_seq_k),
                "longest": (max_q, max_k),
                "scale": scale,
                "window": window_size,
            }
        )
        assert enable_gqa or query.shape[1] == key.shape[1], "as torch 2.12 asks for"
        assert all(x.is_contiguous() for x in (query, key, value))
        left, right = window_size
        assert right == 0, "causal"
        return dense_attention(
            query, key, value, cu_seq_q, scale=scale, window=left + 1 if left >= 0 else None
        )

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    return calls


@pytest.fixture
def flash_calls(monkeypatch):
    return varlen_double.install(monkeypatch)


VARLEN_OPTIONS = [{}, {"window": 1}, {"window": 4}, {"window": 64}]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, varlen_calls):
    assert_equals_dense(varlen_attention, inputs(kv_heads=kv_heads), **options)
    (call,) = varlen_calls
    assert call["window"] == (options.get("window", 0) - 1, 0)
    assert call["scale"] == 0.4
    assert call["longest"] == (30, 30)
    assert all(torch.equal(x, boundaries()) for x in call["cu_seqlens"])


@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_with_sinks_equals_dense_attention(options, flash_calls):
    assert_equals_dense(varlen_attention, inputs(), sinks=True, **options)
    left = options.get("window", 0) - 1
    b = boundaries().tolist()
    assert flash_calls == [(b, b, 30, 30, left, left < 0)]


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"dropout": 0.1}], ids=str)
def test_varlen_attention_refuses_what_the_kernel_lacks(options):
    with pytest.raises(NotImplementedError, match=r"no soft-cap and no dropout.*'documents'"):
        varlen_attention(*inputs(), boundaries(), scale=0.4, **options)


def test_torch_2_11_is_not_asked_for_enable_gqa(monkeypatch):
    def varlen_attn(query, key, value, cu_q, cu_k, max_q, max_k, *, scale, window_size):
        return dense_attention(query, key, value, cu_q, scale=scale)

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", varlen_attn)
    assert_equals_dense(varlen_attention, inputs())


def test_torch_s_varlen_attention_takes_the_arguments_we_give():
    """The doubles above have the signature of the installed torch."""
    parameters = inspect.signature(torch.nn.attention.varlen.varlen_attn).parameters
    positional = list(parameters)[:7]
    assert positional == ["query", "key", "value", "cu_seq_q", "cu_seq_k", "max_q", "max_k"]
    assert {"scale", "window_size"} <= parameters.keys()
    for op, names in (
        (torch.ops.aten._flash_attention_forward, "max_q max_k dropout_p is_causal"),
        (torch.ops.aten._flash_attention_backward, "out logsumexp cum_seq_q cum_seq_k max_q max_k"),
    ):
        schema = [argument.name for argument in op.default._schema.arguments]
        assert " ".join(schema).count(names) == 1
        assert {"scale", "window_size_left", "window_size_right"} <= set(schema)


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_models_on_torch_varlen_equal_their_documents_alone(name, varlen_calls, flash_calls):
    model, reference = tiny_model(name), tiny_model(name)
    fallback = "_over_eager" if name == "gpt_oss" else ""
    install_attention(model, AttentionChoice("varlen", torch_varlen.NAME + fallback, "a test"))
    batch = packed_batch([3, 20, 1, 9])
    logits, expected = model(**batch).logits, alone(reference, batch)
    torch.testing.assert_close(logits, expected, rtol=0, atol=10 * TOLERANCE)
    for output in (logits, expected):
        output.square().mean().backward()
    for (parameter, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=10 * TOLERANCE, msg=parameter)
    if name == "gpt_oss":
        assert [call[4] for call in flash_calls] == [WINDOW - 1, -1], "a window, then none"
        assert not varlen_calls
    else:
        lefts = {"llama": [-1, -1], "mistral": [WINDOW - 1] * 2, "gemma3_text": [WINDOW - 1, -1]}
        assert [call["window"] for call in varlen_calls] == [(left, 0) for left in lefts[name]]
        assert {call["longest"] for call in varlen_calls} == {(20, 20)}
        for call in varlen_calls:
            assert call["cu_seqlens"][0].tolist() == [0, 3, 23, 24, 33]
            assert call["cu_seqlens"][0].dtype == torch.int32
