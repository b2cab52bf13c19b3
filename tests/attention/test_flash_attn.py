"""FlashAttention-2, through transformers' own path, receives the boundaries of the batch.

A double of the kernel (flash_attn_double.py) computes attention from what it is handed, so loss and
gradients are those of one document at a time only if the boundaries, the lengths and the window are
right. Tolerances as in dense.py.
"""

import logging
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from helpers import flash_attn_double
from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import WINDOW, documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import modeling_flash_attention_utils as flash_utils
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

import trl_packing.isolation.guard
from trl_packing import PackedSFTConfig, PackedSFTTrainer, enable_packing, resolve_attention
from trl_packing.attention import flash_attn
from trl_packing.attention.backends import AttentionChoice

TOLERANCE = 1e-5
MODELS = {"llama": [None, None], "qwen2": [None, None], "mistral": [WINDOW, WINDOW]}


@pytest.fixture
def flash(monkeypatch):
    return flash_attn_double.install(monkeypatch)


def first_step(name, flash, tmp_path, **options):
    """Return trainer, loss, gradients, batch and the kernel's calls of the only optimizer step."""
    model = tiny_model(name, attn_implementation="flash_attention_2")
    trainer, kept, batch = trainer_for(name, tmp_path, model=model, **options)
    # Forwards of the isolation check come first; the last forward is the step's.
    seen_before = []
    trainer.model.register_forward_pre_hook(lambda *_: seen_before.append(len(flash.calls)))
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return trainer, loss, kept.gradients, batch, flash.calls[seen_before[-1] :]


def dataset():
    return Dataset.from_list(documents_of_lengths([3, 20, 1, 9, 31, 12, 5, 17, 2, 26], prompt=2))


def one_document_at_a_time(name, batch):
    """Return loss and gradients of the batch's documents on untouched SDPA."""
    model = tiny_model(name).train()
    lengths = batch["cu_seq_lens_q"].diff().tolist()
    num_trained = int((batch["labels"] != -100).sum())
    total = 0.0
    for ids, labels in zip(
        batch["input_ids"].split(lengths, 1), batch["labels"].split(lengths, 1), strict=True
    ):
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = F.cross_entropy(logits, labels[0, 1:], ignore_index=-100, reduction="sum")
        (loss / num_trained).backward()
        total += loss.item() / num_trained
    return total, {n: p.grad for n, p in model.named_parameters()}


def assert_same(loss, gradients, expected_loss, expected):
    assert loss == pytest.approx(expected_loss, abs=TOLERANCE)
    for name, reference in expected.items():
        atol = TOLERANCE * (1 + reference.abs().max().item())
        torch.testing.assert_close(gradients[name], reference, rtol=0, atol=atol, msg=name)


@pytest.mark.parametrize("name", MODELS)
def test_a_step_through_flash_attention_equals_one_document_at_a_time(name, flash, tmp_path):
    trainer, loss, gradients, batch, calls = first_step(name, flash, tmp_path)
    assert str(trainer.attention) == "flash_attention_2 (the model was loaded with it)"
    assert len(batch["cu_seq_lens_q"]) > 3, "several documents share the row"
    assert_same(loss, gradients, *one_document_at_a_time(name, batch))

    boundaries = batch["cu_seq_lens_q"]
    assert len(calls) == len(MODELS[name]), "one call a layer"
    for call, window in zip(calls, MODELS[name], strict=True):
        for cu_seqlens in call["cu_seqlens"]:
            assert cu_seqlens.dtype == torch.int32
            assert cu_seqlens.tolist() == boundaries.tolist()
        longest = int(boundaries.diff().max())
        assert call["longest"] == (longest, longest)
        assert all(type(x) is int for x in call["longest"]), "a tensor would sync in every layer"
        assert call["causal"] is True
        assert call["window"][0] == (-1 if window is None else window - 1)


@pytest.mark.parametrize("name", MODELS)
def test_a_kernel_that_ignores_the_boundaries_fails_the_same_comparison(name, flash, tmp_path):
    flash.ignores_boundaries = True
    _, loss, gradients, batch, _ = first_step(name, flash, tmp_path, isolation_check="off")
    expected_loss, expected = one_document_at_a_time(name, batch)
    assert abs(loss - expected_loss) > 100 * TOLERANCE
    with pytest.raises(AssertionError):
        assert_same(expected_loss, gradients, expected_loss, expected)


def test_the_isolation_check_stops_a_kernel_that_ignores_the_boundaries(flash, tmp_path):
    flash.ignores_boundaries = True
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, .*attention='model'"):
        first_step("llama", flash, tmp_path, attention="model")


# --- what auto makes of a kernel that cannot train --------------------------------------------


@pytest.fixture
def gpu(monkeypatch):
    """Return a function that lets the gate see a GPU with these versions of flash-attn."""

    def pretend(*versions, capability=(9, 0)):
        names = [f"flash_attention_{version}" for version in versions]

        def resolve(model, attention, **_):
            with monkeypatch.context() as patch:
                patch.setattr(flash_attn, "installed", lambda: names)
                patch.setattr(torch.cuda, "is_available", lambda: True)
                patch.setattr(torch.cuda, "get_device_capability", lambda: capability)
                return resolve_attention(model, attention, device="cuda", dtype=torch.bfloat16)

        monkeypatch.setattr(trl_packing.isolation.guard, "resolve_attention", resolve)

    return pretend


def trainer_for(name, tmp_path, *, model=None, **options):
    """Return a trainer of one step, the callback that will keep its gradients, and its batch."""
    kept = Keep()
    settings = ONE_STEP | {
        "output_dir": str(tmp_path),
        "max_length": 40,
        "per_device_train_batch_size": 2,
    }
    trainer = PackedSFTTrainer(
        tiny_model(name) if model is None else model,
        PackedSFTConfig(**settings | options),
        train_dataset=dataset(),
        eval_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        callbacks=[kept],
    )
    batch = next(iter(trainer.get_train_dataloader()))
    return trainer, kept, batch


def assert_exact(name, trainer, seen, batch):
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    assert_same(loss, seen.gradients, *one_document_at_a_time(name, batch))


BROKEN = {
    "raises": "AssertionError: Unsupported compute capability",
    "leaks": "gradients that reach into the documents before",
    "returns no numbers": "gradients that are not finite",
}


@pytest.mark.parametrize("name", MODELS)
@pytest.mark.parametrize("backward", BROKEN)
def test_a_kernel_without_a_right_backward_is_passed_over(
    name, backward, gpu, monkeypatch, tmp_path
):
    gpu(4)
    flash_attn_double.install(monkeypatch, 4, backward)
    trainer, seen, batch = trainer_for(name, tmp_path)
    assert trainer.attention.backend == "flash_attention_4"
    assert_exact(name, trainer, seen, batch)
    # varlen, which comes next, needs a GPU; documents comes before the model's own mask.
    assert trainer.attention.backend == "documents"
    first, second = trainer.attention.reason.split("; ")
    assert first.startswith("flash_attention_4 refused (RuntimeError: its backward raises ")
    assert BROKEN[backward][:25] in first
    assert second.startswith("varlen refused (")


def test_a_kernel_with_a_right_backward_is_kept(gpu, monkeypatch, tmp_path):
    """The control: the same kernel, unbroken, trains."""
    gpu(4)
    double = flash_attn_double.install(monkeypatch, 4)
    trainer, seen, batch = trainer_for("mistral", tmp_path)
    assert_exact("mistral", trainer, seen, batch)
    assert str(trainer.attention) == "flash_attention_4 (installed)"
    assert double.calls


@pytest.mark.parametrize("isolation_check", ["error", "off"])
def test_a_package_that_does_not_import_is_passed_over(
    isolation_check, gpu, monkeypatch, tmp_path, caplog
):
    gpu(2)
    flash_attn_double.install(monkeypatch)

    def undefined_symbol(*arguments, **options):
        raise ImportError("flash_attn_2_cuda.so: undefined symbol: _ZN3c104cuda9SetDeviceEi")

    monkeypatch.setattr(flash_utils, "_lazy_imports", undefined_symbol)
    with caplog.at_level(logging.WARNING, logger="trl_packing"):
        trainer, _, _ = trainer_for("llama", tmp_path, isolation_check=isolation_check)
    assert trainer.attention.backend == "varlen"
    assert "flash_attention_2 refused (ImportError: flash_attn_2_cuda.so" in caplog.text


def test_a_named_kernel_without_a_backward_is_refused_before_the_first_step(monkeypatch, tmp_path):
    flash_attn_double.install(monkeypatch, 2, "raises")
    model = tiny_model("llama", attn_implementation="flash_attention_2")
    enable = partial(enable_packing, model, isolation_check="error")
    assert enable().backend == "documents", "loaded with it, it was not named"
    monkeypatch.setattr(trl_packing.isolation.guard, "resolve_attention", named_flash_attention)
    model = tiny_model("llama", attn_implementation="flash_attention_2")
    with pytest.raises(RuntimeError, match=r"its backward raises AssertionError.*attention='auto'"):
        enable_packing(model, attention="flash_attention_2")


def named_flash_attention(model, attention, **_):
    return AttentionChoice(attention, attention, f"attention={attention!r}", "sdpa")


def test_the_attention_functions_of_transformers_stay_as_they_were(monkeypatch):
    flash_attn_double.install(monkeypatch, 2, "raises")
    before = dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)
    enable_packing(tiny_model("llama", attn_implementation="flash_attention_2"))
    assert (dict(ALL_ATTENTION_FUNCTIONS), dict(ALL_ATTENTION_FUNCTIONS._local_mapping)) == before
