"""The choice of a backend: what each machine and model gets, and why others are refused."""

import pytest
import torch
import torch.nn.attention.varlen
from architectures.tiny_models import tiny_model as any_model
from helpers.tiny import tiny_model
from torch import nn
from transformers import LlamaPreTrainedModel

from trl_packing import resolve_attention
from trl_packing.attention import flash_attn
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention


@pytest.mark.parametrize("name", ["Linear", "GPTJForCausalLM", "chunked"])
def test_models_outside_the_interface_keep_their_own_attention(name):
    models = {"Linear": lambda: nn.Linear(2, 2), "GPTJForCausalLM": lambda: any_model("gptj")}
    model = models.get(name, tiny_model)()
    reason = f"{name} is outside transformers' attention interface"
    if name == "chunked":
        model.config.attention_chunk_size = 16
        reason = "attention_chunk_size=16 lives in the mask"
    choice = resolve_attention(model)
    assert choice == AttentionChoice("model", None, reason)
    install_attention(model, choice)  # changes nothing
    with pytest.raises(ValueError, match=r"attention='documents' cannot be exact on .*auto"):
        resolve_attention(model, "documents")


def test_named_attention_is_taken_or_refused():
    model = tiny_model("llama")
    documents = AttentionChoice("documents", "packed_documents", "attention='documents'")
    assert resolve_attention(model, "documents") == documents
    assert resolve_attention(model, "model") == AttentionChoice("model", None, "attention='model'")
    for name, reason in [
        ("varlen", "no CUDA device|older than sm80|the device is cpu"),
        ("flash_attention_2", "the device is cpu"),
        ("flash_attention_3", "the device is cpu"),
    ]:
        with pytest.raises(ValueError, match=f"attention='{name}' cannot be exact.*({reason})"):
            resolve_attention(model, name)
    with pytest.raises(ValueError, match=r"'flash' is not known; choose one of auto, .*documents"):
        resolve_attention(model, "flash")


@pytest.fixture
def cuda(monkeypatch):
    """A machine with a GPU as `resolve_attention` sees it: its kernels, and what is installed."""

    def pretend(flash=None, capability=(9, 0), device=True):
        found = [flash] if isinstance(flash, str) else list(flash or ())
        monkeypatch.setattr(flash_attn, "installed", lambda: found)
        monkeypatch.setattr(torch.cuda, "is_available", lambda: device)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Testla T4")

        def choose(name="llama", attention="auto", dtype=torch.bfloat16, **overrides):
            model = tiny_model(name, **overrides)
            return resolve_attention(model, attention, device="cuda", dtype=dtype)

        return choose

    return pretend


def test_on_cuda_flash_attn_comes_first_then_torch_varlen_then_documents(cuda):
    assert cuda(flash="flash_attention_2")() == AttentionChoice(
        "flash_attention_2", "flash_attention_2", "installed"
    )
    assert cuda(flash="flash_attention_3")().backend == "flash_attention_3"
    varlen = AttentionChoice("varlen", "packed_varlen", "no flash-attn package needed")
    assert cuda()() == varlen
    assert cuda()(dtype=torch.float16) == varlen
    assert cuda()("gpt_oss").implementation == "packed_varlen_over_eager"
    documents = AttentionChoice("documents", "packed_documents", "cuda, bfloat16")
    assert cuda(capability=(7, 5))() == documents
    half = cuda(capability=(7, 5), flash="flash_attention_2")(dtype=torch.float16)
    assert half == AttentionChoice("documents", "packed_documents", "cuda, float16")


REFUSALS = [
    # model, changes to it, dtype, why flash-attn is not taken, why torch varlen is not
    ("llama", {}, torch.float32, "the dtype is torch.float32", "the dtype is torch.float32"),
    ("llama", {"attention_dropout": 0.1}, None, None, "no dropout and the model sets 0.1"),
    ("gpt2_dropout", {}, None, None, "no dropout and the model sets 0.1"),
    ("gemma2", {}, None, None, "no soft-cap"),
    ("gpt_oss", {}, None, "flash_attention_2 has no attention sinks", None),
    # a trial finds these
    ("llama", {"head_dim": 264}, None, None, None),
    ("deepseek_v3", {"v_head_dim": 4}, None, None, None),
]


@pytest.mark.parametrize(("name", "overrides", "dtype", "no_flash", "no_varlen"), REFUSALS)
def test_a_kernel_that_would_not_be_exact_is_passed_over_and_refused_by_name(
    name, overrides, dtype, no_flash, no_varlen, cuda
):
    choose = cuda(flash="flash_attention_2")
    options = {"dtype": dtype or torch.bfloat16, **overrides}
    for refusal, attention in ((no_flash, "flash_attention_2"), (no_varlen, "varlen")):
        if refusal is None:
            assert choose(name, attention, **options).backend == attention
        else:
            with pytest.raises(ValueError, match=f"attention='{attention}' cannot be.*{refusal}"):
                choose(name, attention, **options)
    expected = (
        "documents" if no_flash and no_varlen else "varlen" if no_flash else "flash_attention_2"
    )
    assert choose(name, **options).backend == expected
    without_flash = "documents" if no_varlen else "varlen"
    assert cuda()(name, **options).backend == without_flash


@pytest.mark.parametrize("loaded", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_2_is_refused_where_it_would_drop_sinks(loaded):
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = loaded
    with pytest.raises(
        ValueError, match=r"drops this model's attention sinks.*attention='documents'"
    ):
        resolve_attention(model)
    model = tiny_model("llama")
    model.config._attn_implementation = loaded
    assert resolve_attention(model) == AttentionChoice(loaded, None, "the model was loaded with it")


def test_a_model_that_transformers_keeps_from_flash_attention_gets_varlen(cuda, monkeypatch):
    """Setting it would stop the run, or load another kernel from the hub instead."""
    choose = cuda(flash="flash_attention_2")
    assert choose().backend == "flash_attention_2"
    monkeypatch.setattr(LlamaPreTrainedModel, "_supports_flash_attn", False)
    assert choose().backend == "varlen"
    with pytest.raises(ValueError, match="does not support FlashAttention in transformers"):
        choose(attention="flash_attention_2")
