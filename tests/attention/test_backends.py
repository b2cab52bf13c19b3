"""The choice of a backend: what each machine and model gets, and why others are refused."""

import pytest
import torch
import torch.nn.attention.varlen
from helpers.dense import TOLERANCE
from helpers.packed_models import alone, fallbacks, packed_batch
from helpers.tiny import PACKED_MODELS, tiny_model
from torch import nn
from transformers import AutoConfig, AutoModelForCausalLM

from trl_packing import resolve_attention
from trl_packing.attention import document_sdpa, flash_attn
from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention
from trl_packing.isolation.guard import with_fallbacks
from trl_packing.tools.doctor import Trial, Trials, advice


class OutsideTransformers(nn.Module):
    def __init__(self):
        super().__init__()
        self.head = nn.Linear(2, 2)


def gptj():
    """A model of transformers whose attention does not go through the interface."""
    config = AutoConfig.for_model(
        "gptj", vocab_size=320, n_embd=32, n_layer=2, n_head=4, n_positions=64, rotary_dim=4
    )
    return AutoModelForCausalLM.from_config(config)


def test_on_a_cpu_documents_are_taken_one_after_another():
    choice = resolve_attention(tiny_model("llama"))
    assert choice == AttentionChoice("documents", "packed_documents", "cpu, float32")
    assert str(choice) == "document-wise SDPA (cpu, float32)"
    bf16 = resolve_attention(tiny_model("llama"), dtype=torch.bfloat16)
    assert bf16 == AttentionChoice("documents", "packed_documents", "cpu, bfloat16")


@pytest.mark.parametrize("name", PACKED_MODELS)
def test_every_supported_model_gets_documents_over_what_it_was_loaded_with(name):
    for fallback in fallbacks(name):
        model = tiny_model(name, attn_implementation=fallback)
        suffix = "_over_eager" if fallback == "eager" else ""
        for _ in range(2):  # and again when it is already installed
            assert resolve_attention(model).implementation == f"packed_documents{suffix}"
            install_attention(model, resolve_attention(model))


@pytest.mark.parametrize("model", [OutsideTransformers, gptj])
def test_models_outside_the_interface_keep_their_own_attention(model):
    model = model()
    choice = resolve_attention(model)
    name = type(model).__name__
    reason = f"{name} is outside transformers' attention interface"
    assert choice == AttentionChoice("model", None, reason)
    assert str(choice) == f"the model's own, masked by position_ids ({reason})"
    install_attention(model, choice)  # changes nothing
    with pytest.raises(
        ValueError, match=f"attention='documents' cannot be exact on {name}: .*auto"
    ):
        resolve_attention(model, "documents")


def test_the_model_s_own_mask_isolates_a_model_outside_the_interface():
    model = gptj().eval()
    batch = packed_batch([3, 20, 9])
    torch.testing.assert_close(
        model(**batch).logits, alone(model, batch), rtol=0, atol=10 * TOLERANCE
    )


def test_chunked_attention_stays_in_the_mask():
    model = tiny_model("llama")
    model.config.attention_chunk_size = 16
    choice = resolve_attention(model)
    assert (choice.backend, choice.reason) == ("model", "attention_chunk_size=16 lives in the mask")


def test_an_implementation_that_the_user_chose_is_kept():
    model = tiny_model("llama")
    model.config._attn_implementation = "flex_attention"
    choice = resolve_attention(model)
    assert choice == AttentionChoice("model", None, "the model was loaded with 'flex_attention'")


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


def test_what_cannot_run_on_this_machine_says_why(cuda):
    choose = cuda(capability=(7, 5))
    for name in ("varlen", "flash_attention_2"):
        with pytest.raises(ValueError, match="Testla T4 is older than sm80"):
            choose(attention=name)
    with pytest.raises(ValueError, match="no CUDA device"):
        cuda(device=False)(attention="varlen")


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


def test_flash_attention_is_known_by_its_names():
    for name in (*flash_attn.VERSIONS, "kernels-community/flash-attn2", "paged|flash_attention_2"):
        assert flash_attn.is_flash_attention(name)
    for name in (None, "sdpa", "eager", "flex_attention", document_sdpa.NAME, torch_varlen.NAME):
        assert not flash_attn.is_flash_attention(name)


def test_installed_flash_attention_is_found_newest_first(monkeypatch):
    from transformers.utils import import_utils

    for version in "234":
        monkeypatch.setattr(import_utils, f"is_flash_attn_{version}_available", lambda: False)
    assert flash_attn.installed() == []
    found = []
    for version in "234":
        monkeypatch.setattr(import_utils, f"is_flash_attn_{version}_available", lambda: True)
        found.insert(0, f"flash_attention_{version}")
        assert flash_attn.installed() == found


ALL = list(flash_attn.VERSIONS)

TAKEN = [
    # compute capability, model, changes to it, the versions that auto tries of all installed
    ((8, 0), "llama", {}, [2, 3]),
    ((8, 9), "llama", {}, [2, 3]),
    ((9, 0), "llama", {}, [3, 4, 2]),
    ((10, 0), "llama", {}, [4, 2]),
    ((12, 0), "llama", {}, [4, 2]),
    ((7, 5), "llama", {}, []),
    # dropout, which transformers silently leaves out for versions 3 and 4
    ((9, 0), "llama", {"attention_dropout": 0.1}, [2]),
    ((9, 0), "gpt2_dropout", {}, [2]),
    ((9, 0), "gemma2", {"attention_dropout": 0.1}, []),
    # transformers passes sinks to version 4 alone, and not to version 2 or 3
    ((10, 0), "gpt_oss", {}, [4]),
]


@pytest.mark.parametrize(("capability", "name", "overrides", "expected"), TAKEN)
def test_auto_tries_the_versions_of_a_gpu_from_fast_to_slow(
    capability, name, overrides, expected, cuda
):
    choice = cuda(flash=ALL, capability=capability)(name, **overrides)
    tried = [way.backend for way in with_fallbacks(choice) if way.backend in ALL]
    assert tried == [f"flash_attention_{version}" for version in expected]


@pytest.mark.parametrize("capability", [(8, 0), (9, 0), (10, 0)])
def test_the_doctor_and_auto_agree_about_the_fastest_version(capability, cuda):
    first = cuda(flash=ALL, capability=capability)().backend
    trials = Trials("cuda", "bfloat16", tuple(Trial(n, "exact") for n in ALL), first)
    assert advice(trials, capability) == (
        f"nothing to install: {first} is the fastest exact backend here"
    )


def test_a_model_that_transformers_keeps_from_flash_attention_gets_varlen(cuda, monkeypatch):
    """Setting it would stop the run, or load another kernel from the hub instead."""
    from transformers import LlamaPreTrainedModel

    choose = cuda(flash="flash_attention_2")
    with monkeypatch.context() as patch:
        patch.setattr(LlamaPreTrainedModel, "_supports_flash_attn", False)
        assert choose().backend == "varlen"
        with pytest.raises(ValueError, match="does not support FlashAttention in transformers"):
            choose(attention="flash_attention_2")
    with monkeypatch.context() as patch:
        only = ["kernels-community/vllm-flash-attn3"]
        patch.setattr(
            LlamaPreTrainedModel, "_compatible_flash_implementations", only, raising=False
        )
        assert choose().backend == "varlen"
    assert choose().backend == "flash_attention_2"


def test_after_a_kernel_come_the_other_kernels_and_then_the_model_s_own_mask(cuda):
    def order(*arguments, **options):
        choice = cuda(*arguments, **options)()
        return [way.backend for way in with_fallbacks(choice)]

    own = ["model", "mask", "padded", "equal_lengths"]
    four, three, two = ALL
    assert order(flash=ALL) == [three, four, two, "varlen", "documents", *own]
    assert order(flash=ALL, capability=(8, 0)) == [two, three, "varlen", "documents", *own]
    assert order() == ["varlen", "documents", *own]
    assert order(capability=(7, 5)) == ["documents", *own]


@pytest.mark.parametrize("fallback", ["sdpa", "eager"])
def test_after_a_kernel_the_model_gets_its_own_implementation_back(fallback, cuda):
    cuda(flash=ALL)
    model = tiny_model("llama", attn_implementation=fallback)
    ways = with_fallbacks(resolve_attention(model, device="cuda", dtype=torch.bfloat16))
    implementations = {}
    for way in ways:
        model.config._attn_implementation = "flash_attention_4"  # as the first way has set it
        if way.backend not in ALL:
            install_attention(model, way)
            implementations[way.backend] = model.config._attn_implementation
    suffix = "_over_eager" if fallback == "eager" else ""
    assert implementations == {
        "varlen": f"packed_varlen{suffix}",
        "documents": f"packed_documents{suffix}",
        **dict.fromkeys(["model", "mask", "padded", "equal_lengths"], fallback),
    }


def test_a_model_loaded_with_flash_attention_falls_back_to_our_kernels(cuda):
    cuda(flash=ALL)
    model = tiny_model("llama")
    model.config._attn_implementation = "flash_attention_2"
    ways = with_fallbacks(resolve_attention(model, device="cuda", dtype=torch.bfloat16))
    own = ["model", "mask", "padded", "equal_lengths"]
    assert [way.backend for way in ways] == ["flash_attention_2", "varlen", "documents", *own]
    assert {way.native for way in ways} == {"flash_attention_2"}
