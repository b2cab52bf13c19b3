"""The choice of a backend: what each machine and model gets, and why others are refused."""

import pytest
import torch
from architectures.tiny_models import tiny_model as any_model
from helpers.flash_attn_double import pretend_cuda
from helpers.tiny import tiny_model

from trl_packing import resolve_attention


def facts_of(choice):
    return choice.backend, choice.implementation, choice.reason


@pytest.mark.parametrize("name", ["gpt_neo", "llama"])
def test_models_outside_the_interface_keep_their_own_attention(name):
    model = any_model(name)
    reason = "GPTNeoForCausalLM is outside transformers' attention interface"
    if name == "llama":
        model.config.attention_chunk_size = 16
        reason = "attention_chunk_size=16 needs the mask"
    assert facts_of(resolve_attention(model)) == ("model", None, reason)
    with pytest.raises(ValueError, match=r"attention='documents' cannot be exact on .*auto"):
        resolve_attention(model, "documents")


@pytest.fixture
def choose(monkeypatch):
    """Return the choice on a GPU with flash-attn, as `resolve_attention` sees it."""

    def choose(name="llama", attention="auto", *, capability=(9, 0), installed=(), **overrides):
        pretend_cuda(monkeypatch, installed, capability)
        dtype = overrides.pop("dtype", torch.bfloat16)
        model = tiny_model(name, **overrides)
        return resolve_attention(model, attention, device="cuda", dtype=dtype)

    return choose


FLASH = {"installed": ["flash_attention_2"]}
CHOICES = [
    # model, options, backend, implementation, the next one
    ("llama", FLASH, "flash_attention_2", "flash_attention_2", "varlen"),
    ("llama", {"dtype": torch.float16}, "varlen", "packed_varlen", "documents"),
    ("gpt_oss", FLASH, "varlen", "packed_varlen_over_eager", "documents"),
    ("llama", FLASH | {"capability": (7, 5)}, "documents", "packed_documents", "model"),
    ("llama", FLASH | {"dtype": torch.float32}, "documents", "packed_documents", "model"),
    ("llama", {"attention_dropout": 0.1}, "model", None, "mask"),
    ("llama", FLASH | {"attention_probs_dropout_prob": 0.1}, *["flash_attention_2"] * 2, "model"),
]


@pytest.mark.parametrize(("name", "options", "backend", "implementation", "slower"), CHOICES)
def test_the_fastest_kernel_that_may_be_exact_comes_first(
    name, options, backend, implementation, slower, choose
):
    chosen = choose(name, **options)
    assert (chosen.backend, chosen.implementation) == (backend, implementation)
    assert chosen.slower[0].backend == slower


@pytest.mark.parametrize(("capability", "dtype", "words"), [
    ((7, 5), torch.bfloat16, "bfloat16; bf16 is emulated on Testla T4: fp16=True is faster"),
    ((7, 5), torch.float16, "float16"),
    ((8, 0), torch.bfloat16, "bfloat16"),
])  # fmt: skip
def test_the_report_says_where_bf16_is_emulated(capability, dtype, words, choose):
    chosen = choose(capability=capability, dtype=dtype)
    documents = next(c for c in (chosen, *chosen.slower) if c.backend == "documents")
    assert str(documents) == f"document-wise SDPA (cuda, {words})"


REFUSED = [
    ("llama", "varlen", {"dtype": torch.float32}, "the dtype is torch.float32"),
    ("llama", "varlen", {"capability": (7, 5)}, "Testla T4 is older than sm80"),
    ("llama", "documents", {"attention_dropout": 0.1}, "no dropout and the model sets 0.1"),
    ("gpt_oss", "flash_attention_2", {}, "flash_attention_2 has no attention sinks"),
    ("llama", "varlen", {"head_dim": 264}, "all heads are wider than 256"),
]


@pytest.mark.parametrize(("name", "attention", "options", "says"), REFUSED)
def test_a_named_kernel_that_would_not_be_exact_is_refused(name, attention, options, says, choose):
    with pytest.raises(ValueError, match=f"attention='{attention}' cannot be exact.*{says}"):
        choose(name, attention, **options)


def test_a_named_backend_is_taken_and_an_unknown_one_refused():
    model = tiny_model("llama")
    choice = "documents", "packed_documents", "attention='documents'"
    assert facts_of(resolve_attention(model, "documents")) == choice
    for name, says in {"varlen": "the device is cpu", "flash": "unknown.*one of auto"}.items():
        with pytest.raises(ValueError, match=says):
            resolve_attention(model, name)


@pytest.mark.parametrize("loaded", ["flash_attention_2", "kernels-community/flash-attn2"])
def test_flash_attention_2_is_refused_where_it_would_drop_sinks(loaded):
    model = tiny_model("gpt_oss")
    model.config._attn_implementation = loaded
    with pytest.raises(ValueError, match=r"drops .* attention sinks.*attention='documents'"):
        resolve_attention(model)
    model = tiny_model("llama")
    model.config._attn_implementation = loaded
    assert facts_of(resolve_attention(model)) == (loaded, None, "the model was loaded with it")
