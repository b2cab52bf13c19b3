"""The choice of a backend: what each machine and model gets, and why others are refused."""

import pytest
import torch
import torch.nn.attention.varlen
from architectures.tiny_models import tiny_model as any_model
from helpers.tiny import tiny_model
from transformers import LlamaPreTrainedModel

from trl_packing import resolve_attention
from trl_packing.attention import flash_attn
from trl_packing.attention.backends import AttentionChoice


@pytest.mark.parametrize("name", ["gptj", "llama"])
def test_models_outside_the_interface_keep_their_own_attention(name):
    model, reason = any_model(name), "GPTJForCausalLM is outside transformers' attention interface"
    if name == "llama":
        model.config.attention_chunk_size = 16
        reason = "attention_chunk_size=16 lives in the mask"
    assert resolve_attention(model) == AttentionChoice("model", None, reason)
    with pytest.raises(ValueError, match=r"attention='documents' cannot be exact on .*auto"):
        resolve_attention(model, "documents")


REFUSED = {
    "varlen": "'varlen' cannot be exact.*the device is cpu",
    "flash_attention_2": "'flash_attention_2' cannot be exact.*the device is cpu",
    "flash": "'flash' is not known; choose one of auto, .*documents",
}


def test_named_attention_is_taken_or_refused():
    model = tiny_model("llama")
    for name, implementation in {"documents": "packed_documents", "model": None}.items():
        choice = AttentionChoice(name, implementation, f"attention={name!r}")
        assert resolve_attention(model, name) == choice
    for name, says in REFUSED.items():
        with pytest.raises(ValueError, match=says):
            resolve_attention(model, name)


@pytest.fixture
def cuda(monkeypatch):
    """A machine with a GPU as `resolve_attention` sees it: its kernels, and what is installed."""

    def pretend(*installed, capability=(9, 0)):
        monkeypatch.setattr(flash_attn, "installed", lambda: list(installed))
        monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda: capability)
        monkeypatch.setattr(torch.cuda, "get_device_name", lambda: "Testla T4")

        def choose(name="llama", attention="auto", dtype=torch.bfloat16, **overrides):
            model = tiny_model(name, **overrides)
            return resolve_attention(model, attention, device="cuda", dtype=dtype)

        return choose

    return pretend


def test_on_cuda_flash_attn_comes_first_then_torch_varlen_then_documents(cuda):
    flash, *slower = cuda("flash_attention_2")(), *cuda("flash_attention_2")().slower
    assert flash == AttentionChoice("flash_attention_2", "flash_attention_2", "installed")
    assert [choice.backend for choice in slower] == ["varlen", "documents"]
    varlen = AttentionChoice("varlen", "packed_varlen", "no flash-attn package needed")
    assert cuda()() == cuda()(dtype=torch.float16) == varlen
    assert cuda()("gpt_oss").implementation == "packed_varlen_over_eager"
    documents = AttentionChoice("documents", "packed_documents", "cuda, bfloat16")
    assert cuda("flash_attention_2", capability=(7, 5))() == documents


REFUSALS = [
    # model, changes to it, why flash-attn is not taken, why torch varlen is not
    ("llama", {"dtype": torch.float32}, "the dtype is torch.float32", "the dtype is torch.float32"),
    ("llama", {"attention_dropout": 0.1}, None, "no dropout and the model sets 0.1"),
    ("gemma2", {}, None, "no soft-cap"),
    ("gpt_oss", {}, "flash_attention_2 has no attention sinks", None),
    ("deepseek_v3", {"v_head_dim": 4}, None, None),  # a trial finds it
]


@pytest.mark.parametrize(("name", "options", "no_flash", "no_varlen"), REFUSALS)
def test_a_kernel_that_would_not_be_exact_is_passed_over_and_refused_by_name(
    name, options, no_flash, no_varlen, cuda
):
    choose = cuda("flash_attention_2")
    fits = ["documents"]
    for attention, refusal in (("varlen", no_varlen), ("flash_attention_2", no_flash)):
        if refusal is None:
            assert choose(name, attention, **options).backend == attention
            fits.append(attention)
        else:
            with pytest.raises(ValueError, match=f"attention='{attention}' cannot be.*{refusal}"):
                choose(name, attention, **options)
    assert choose(name, **options).backend == fits[-1]


@pytest.mark.parametrize("loaded", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_2_is_refused_where_it_would_drop_sinks(loaded):
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = loaded
    with pytest.raises(ValueError, match=r"drops .* attention sinks.*attention='documents'"):
        resolve_attention(model)
    model = tiny_model("llama")
    model.config._attn_implementation = loaded
    assert resolve_attention(model) == AttentionChoice(loaded, None, "the model was loaded with it")


def test_a_model_that_transformers_keeps_from_flash_attention_gets_varlen(cuda, monkeypatch):
    """Setting it would stop the run, or load another kernel from the hub instead."""
    monkeypatch.setattr(LlamaPreTrainedModel, "_supports_flash_attn", False)
    choose = cuda("flash_attention_2")
    assert choose().backend == "varlen"
    with pytest.raises(ValueError, match="does not support FlashAttention in transformers"):
        choose(attention="flash_attention_2")
