"""PyTorch's varlen attention gets the right arguments; doubles stand in for its kernels."""

import pytest
import torch
import torch.nn.attention.varlen
import torch.nn.functional as F
from helpers import flash_attn_double, varlen_double
from helpers.dense import assert_equals_dense, boundaries, inputs, with_keywords
from helpers.vision import noise, tiny_processor, tiny_vision_model

from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention, use_attention

varlen_attention = with_keywords(torch_varlen.varlen_attention)


@pytest.fixture
def flash_calls(monkeypatch):
    return varlen_double.install(monkeypatch)


VARLEN_OPTIONS = [{}, {"window": 1}, {"window": 4}, {"window": 64}, {"window": 4, "sinks": True}]


@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", VARLEN_OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, flash_calls):
    assert_equals_dense(varlen_attention, inputs(kv_heads=kv_heads), **options)
    left = options.get("window", 0) - 1
    b = boundaries().tolist()
    assert flash_calls == [(b, b, 30, 30, left, left < 0)]


@pytest.mark.parametrize("options", [{"softcap": 2.0}, {"dropout": 0.1}], ids=str)
def test_varlen_attention_refuses_what_the_kernel_lacks(options):
    with pytest.raises(NotImplementedError, match=r"no soft-cap and no dropout.*'documents'"):
        varlen_attention(*inputs(), boundaries(), scale=0.4, **options)


# --- the vision tower -----------------------------------------------------------------------------


@pytest.mark.parametrize("size", [8, 10], ids=["", "no multiple of 8"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_tower_attends_in_both_directions_within_each_window(size, dtype, flash_calls):
    windows = (5, 1, 30, 4)
    q, k, v = (torch.randn(1, 2, 40, size).to(dtype).requires_grad_() for _ in range(3))
    spans = {"cu_seq_lens_q": boundaries(windows), "max_length_q": 30}
    found, _ = torch_varlen.tower_attention(None, q, k, v, scaling=0.4, **spans)
    leaves = [x.detach().double().requires_grad_() for x in (q, k, v)]
    parts = zip(*(x.split(windows, 2) for x in leaves), strict=True)
    expected = [F.scaled_dot_product_attention(*part, scale=0.4) for part in parts]
    expected = torch.cat(expected, 2).transpose(1, 2)
    upstream = torch.randn(expected.shape)
    gradients = torch.autograd.grad(found, (q, k, v), upstream.to(dtype))
    wanted = torch.autograd.grad(expected, leaves, upstream.double())
    for got, reference in zip((found, *gradients), (expected, *wanted), strict=True):
        bound = 32 * torch.finfo(dtype).eps * (1 + reference.abs().max().item())
        torch.testing.assert_close(got.double(), reference, rtol=0, atol=bound)
    assert len(flash_calls) == (dtype == torch.bfloat16)


@pytest.mark.parametrize("backend", ["varlen", "flash_attention_2"])
def test_the_tower_of_qwen2_5_vl_makes_one_call_a_layer(backend, flash_calls, monkeypatch):
    """With SDPA it makes one for each window of an image."""
    double = flash_attn_double.install(monkeypatch)
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor).to(torch.bfloat16)
    model.set_attn_implementation("sdpa")
    tower, image = model.model.visual, processor.image_processor(noise(112, 112, 0))
    patches = torch.as_tensor(image["pixel_values"]).to(torch.bfloat16)
    grid = torch.as_tensor(image["image_grid_thw"])
    native = tower(patches, grid_thw=grid).pooler_output
    implementation = "packed_varlen" if backend == "varlen" else backend
    choice = AttentionChoice(backend, implementation, "a test")
    with use_attention(model, choice):
        install_attention(model, choice)
        found = tower(patches, grid_thw=grid).pooler_output
    calls = flash_calls if backend == "varlen" else double.calls
    assert len(calls) == len(tower.blocks)
    assert tower.config._attn_implementation == "sdpa", "as before, behind the run"
    noise_of_bf16 = 32 * torch.finfo(torch.bfloat16).eps * native.abs().max().item()
    torch.testing.assert_close(found.float(), native.float(), rtol=0, atol=noise_of_bf16)
