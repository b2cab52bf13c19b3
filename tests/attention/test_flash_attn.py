"""FlashAttention-2, through transformers' own path, receives the boundaries of the batch.

A double of the kernel (flash_attn_double.py) computes attention from what it is handed, so loss and
gradients are those of one document at a time only if boundaries, lengths and window are right.
"""

from functools import cache

import pytest
import torch
from harness import alone, assert_exact, make_trainer, run
from helpers import flash_attn_double
from helpers.packed_models import packed_batch
from helpers.tiny import WINDOW, documents_of_lengths, tiny_model
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trl_packing.isolation.guard
from trl_packing import resolve_attention
from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.install import install_attention, restore_implementation, use_attention

DOCUMENTS = documents_of_lengths([3, 20, 1, 9, 31, 12, 5, 17, 2, 26], prompt=2)
MODELS = {"llama": None, "mistral": WINDOW}


@cache
def truth(name):
    return alone(tiny_model(name), DOCUMENTS)


def loaded(name):
    return tiny_model(name, attn_implementation="flash_attention_2")


@pytest.mark.parametrize("name", MODELS)
def test_a_step_through_flash_attention_equals_one_document_at_a_time(name, monkeypatch, tmp_path):
    double = flash_attn_double.install(monkeypatch)
    found = run(loaded(name), DOCUMENTS, tmp_path)
    assert str(found.trainer.attention) == "flash_attention_2 (the model was loaded with it)"
    assert_exact(found, truth(name))
    boundaries = found.batches[0][0]["cu_seq_lens_q"]
    longest = int(boundaries.diff().max())
    for call in double.calls[-2:]:  # one of each layer
        assert all(cu_seqlens.equal(boundaries) for cu_seqlens in call["cu_seqlens"])
        assert call["longest"] == (longest, longest)
        assert all(type(x) is int for x in call["longest"]), "a tensor would sync in every layer"
        assert call["window"][0] == (MODELS[name] or 0) - 1


def test_a_kernel_that_ignores_the_boundaries_fails_the_same_comparison(monkeypatch, tmp_path):
    flash_attn_double.install(monkeypatch).ignores_boundaries = True
    found = run(loaded("llama"), DOCUMENTS, tmp_path, isolation_check="off")
    with pytest.raises(AssertionError):
        assert_exact(found, truth("llama"))
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, .*attention='model'"):
        run(loaded("llama"), DOCUMENTS, tmp_path, attention="model")


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets the gate see a GPU with this version of flash-attn."""

    def pretend(version, backward=""):
        def resolve(model, attention, **_):
            with monkeypatch.context() as patch:
                flash_attn_double.pretend_cuda(patch, [f"flash_attention_{version}"])
                return resolve_attention(model, attention, device="cuda", dtype=torch.bfloat16)

        monkeypatch.setattr(trl_packing.isolation.guard, "resolve_attention", resolve)
        return flash_attn_double.install(monkeypatch, version, backward)

    return pretend


BROKEN = {
    "raises": ("mistral", "AssertionError"),
    "leaks": ("mistral", "gradients that reach"),
    "returns no numbers": ("mistral", "gradients that are not"),
    "doubles values": ("mistral", "gradient of value is off by 100.0%"),
    "window off by one": ("mistral", "output is off by "),
    "forgets sinks": ("gpt_oss", "gradient of sinks is off by 100.0%"),
    "ignores sinks": ("gpt_oss", "gradient of "),
    "": ("gpt_oss", None),  # the control: the same kernel, unbroken, trains
}


@pytest.mark.parametrize("backward", BROKEN)
def test_a_kernel_without_a_right_backward_is_passed_over(backward, gpu, tmp_path):
    gpu(4, backward)
    name, reason = BROKEN[backward]
    wide = {"sliding_window": 4096}  # as those that people train: no probe shows where it ends
    found = run(tiny_model(name, **wide), DOCUMENTS, tmp_path, router_aux_loss_coef=0.0)
    assert_exact(found, alone(tiny_model(name, **wide), DOCUMENTS))
    attention = found.trainer.attention
    # varlen, which comes next, needs a GPU; documents comes before the model's own mask.
    assert attention.backend == ("documents" if backward else "flash_attention_4")
    if backward:
        first, second = attention.reason.split("; ")
        assert first.startswith("flash_attention_4 refused (RuntimeError: its backward raises ")
        assert reason in first
        assert second.startswith("varlen refused (")


def test_a_package_that_does_not_import_is_passed_over(gpu, monkeypatch, tmp_path, caplog):
    gpu(2)

    def undefined_symbol(*arguments, **options):
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")

    monkeypatch.setattr(flash_utils, "_lazy_imports", undefined_symbol)
    trainer = make_trainer(tmp_path, DOCUMENTS, max_length=40)
    assert trainer.attention.backend == "varlen"
    assert "flash_attention_2 refused (ImportError: flash_attn_2_cuda.so" in caplog.text


def test_a_kernel_from_a_hub_is_set_once_and_the_native_name_restored(monkeypatch):
    """Without flash-attn, transformers takes another name than the one it is asked for."""
    hub = "kernels-community/flash-attn2"
    monkeypatch.setitem(ALL_ATTENTION_FUNCTIONS, hub, ALL_ATTENTION_FUNCTIONS["packed_documents"])
    monkeypatch.setitem(ALL_MASK_ATTENTION_FUNCTIONS, hub, lambda *args, **kwargs: None)
    model = tiny_model("llama")
    asked = []

    def set_implementation(name):
        asked.append(name)
        model.config._attn_implementation = hub if name == "flash_attention_2" else name

    monkeypatch.setattr(model, "set_attn_implementation", set_implementation)
    choice = AttentionChoice("flash_attention_2", "flash_attention_2", "installed", "sdpa")
    install_attention(model, choice)
    restore_implementation(model)
    batch = packed_batch([3, 9])
    for _ in range(2):
        with use_attention(model, choice):
            for _ in range(3):
                model(**batch)
            assert model.config._attn_implementation == hub
        assert model.config._attn_implementation == "sdpa"
    assert asked == ["flash_attention_2"] * 3  # when it is installed, and by each block
