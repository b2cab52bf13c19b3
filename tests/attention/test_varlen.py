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
    inputs,
    with_keywords,
)
from helpers.packed_models import alone, packed_batch
from helpers.tiny import WINDOW, tiny_model

from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention
from trl_packing.attention.interface import KernelOptions

varlen_attention = with_keywords(torch_varlen.varlen_attention)


@pytest.fixture
def flash_calls(monkeypatch):
    return varlen_double.install(monkeypatch)


VARLEN_OPTIONS = [{}, {"window": 1}, {"window": 4}, {"window": 64}]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, flash_calls):
    assert_equals_dense(varlen_attention, inputs(kv_heads=kv_heads), **options)
    left = options.get("window", 0) - 1
    b = boundaries().tolist()
    assert flash_calls == [(b, b, 30, 30, left, left < 0)]


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


_QUERY_TO_WINDOW = (
    "Tensor query, Tensor key, Tensor value, Tensor? cum_seq_q, Tensor? cum_seq_k, SymInt max_q, "
    "SymInt max_k, float dropout_p, bool is_causal, bool return_debug_mask, *, float? scale=None, "
    "SymInt? window_size_left=None, SymInt? window_size_right=None, Tensor? seqused_k=None"
)
# Releases differ in optional arguments behind the window; the last one is torch's main branch.
SCHEMAS = {
    "2.10 and 2.11": _QUERY_TO_WINDOW + ", Tensor? alibi_slopes=None",
    "2.12 to 2.14": _QUERY_TO_WINDOW
    + ", Tensor? alibi_slopes=None, Tensor? block_table=None, int? num_splits=None",
    "2.15 and later": _QUERY_TO_WINDOW
    + ", Tensor? alibi_slopes=None, Tensor? k_cache=None, Tensor? v_cache=None, "
    "Tensor? cache_seqlens=None, Tensor? cache_batch_idx=None, Tensor? page_table=None, "
    "Tensor? block_table=None, int? num_splits=None",
}


@pytest.mark.parametrize("torch_version", SCHEMAS)
def test_every_torch_takes_the_arguments_that_the_kernel_is_called_with(torch_version, flash_calls):
    schema = torch._C.parse_schema(
        f"aten::_flash_attention_forward({SCHEMAS[torch_version]}) -> (Tensor, Tensor, Tensor, "
        "Tensor, Tensor)"
    )
    double, calls = torch.ops.aten._flash_attention_forward, []

    def forward(*given, **named):
        arguments = {argument.name: argument for argument in schema.arguments}
        positional = [name for name, argument in arguments.items() if not argument.kwarg_only]
        assert len(given) == len(positional)
        assert all(arguments[name].kwarg_only for name in named)
        calls.append(dict(zip(positional, given, strict=True)) | named)
        return double(*given, **named)

    torch.ops.aten._flash_attention_forward = forward  # `flash_calls` puts the op back
    assert_equals_dense(varlen_attention, inputs(), window=4)
    (call,) = calls
    assert (call["max_q"], call["max_k"]) == (30, 30)
    assert (call["dropout_p"], call["is_causal"], call["return_debug_mask"]) == (0.0, False, False)
    named = (call["scale"], call["window_size_left"], call["window_size_right"])
    assert named == (0.4, 3, 0)


def test_the_installed_torch_has_one_of_these_schemas():
    installed = str(torch.ops.aten._flash_attention_forward.default._schema)
    assert _QUERY_TO_WINDOW in installed
    backward = [a.name for a in torch.ops.aten._flash_attention_backward.default._schema.arguments]
    assert " ".join(backward).startswith(
        "grad_out query key value out logsumexp cum_seq_q cum_seq_k max_q max_k dropout_p is_causal"
    )


def test_a_call_asks_the_aten_op_alone(flash_calls, monkeypatch):
    """Torch 2.10 knows no scale in `varlen_attn`, and 2.15 would take cuDNN: neither is asked."""

    def refuse(*_args, **_kwargs):
        raise AssertionError("a signature is inspected, or the Python custom op called")

    monkeypatch.setattr(torch.nn.attention.varlen, "varlen_attn", refuse)
    monkeypatch.setattr(inspect, "signature", refuse)
    query, key, value = inputs()
    options = KernelOptions(0.4)
    torch_varlen.varlen_attention(query, key, value, boundaries(), options, 30).sum().backward()
    assert len(flash_calls) == 1


@pytest.mark.parametrize("name", ["llama", "mistral", "gemma3_text", "gpt_oss"])
def test_models_on_torch_varlen_equal_their_documents_alone(name, flash_calls):
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
    lefts = {
        "llama": [-1, -1],
        "mistral": [WINDOW - 1] * 2,
        "gemma3_text": [WINDOW - 1, -1],
        "gpt_oss": [WINDOW - 1, -1],
    }
    b = [0, 3, 23, 24, 33]
    assert flash_calls == [(b, b, 20, 20, left, left < 0) for left in lefts[name]]
