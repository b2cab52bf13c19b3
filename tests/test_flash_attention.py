"""FlashAttention-2, through transformers' own path, receives the boundaries of the batch.

A double of the kernel (flash_attn_double.py) computes attention from what it is handed, so loss and
gradients are those of one document at a time only if the boundaries, the lengths and the window are
right. Tolerances as in test_exact.py.
"""

import flash_attn_double
import pytest
import torch
import torch.nn.functional as F
from datasets import Dataset
from tiny import WINDOW, documents_of_lengths, tiny_model, tiny_tokenizer
from transformers import TrainerCallback

from trl_packing import PackedSFTConfig, PackedSFTTrainer, resolve_attention

TOLERANCE = 1e-5
MODELS = {"llama": [None, None], "qwen2": [None, None], "mistral": [WINDOW, WINDOW]}


@pytest.fixture
def flash(monkeypatch):
    return flash_attn_double.install(monkeypatch)


class FirstStep(TrainerCallback):
    """Keep what the kernel saw in the first micro-batch, and the gradients; then stop."""

    def on_pre_optimizer_step(self, args, state, control, model=None, **kwargs):
        self.gradients = {n: p.grad.clone() for n, p in model.named_parameters()}
        control.should_training_stop = True


def first_step(name, flash, tmp_path, **options):
    """Return trainer, loss, gradients, batch and the kernel's calls of the first optimizer step."""
    seen = FirstStep()
    trainer = PackedSFTTrainer(
        tiny_model(name, attn_implementation="flash_attention_2"),
        PackedSFTConfig(
            output_dir=str(tmp_path),
            max_length=40,
            per_device_train_batch_size=2,
            gradient_checkpointing=False,
            max_grad_norm=0.0,
            logging_steps=1,
            save_strategy="no",
            report_to="none",
            disable_tqdm=True,
            bf16=False,
            **options,
        ),
        train_dataset=dataset(),
        processing_class=tiny_tokenizer(),
        callbacks=[seen],
    )
    batch = next(iter(trainer.get_train_dataloader()))
    # Forwards of the isolation check come first; the last forward is the step's.
    seen_before = []
    trainer.model.register_forward_pre_hook(lambda *_: seen_before.append(len(flash.calls)))
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return trainer, loss, seen.gradients, batch, flash.calls[seen_before[-1] :]


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
    with pytest.raises(RuntimeError, match=r"LEAK.*LlamaForCausalLM, flash_attention_2"):
        first_step("llama", flash, tmp_path)


def test_padded_batches_reach_the_kernel_unpadded(flash):
    """transformers' own way, which our choice leaves alone."""
    model = tiny_model("llama", attn_implementation="flash_attention_2")
    assert resolve_attention(model).implementation is None
    ids = torch.randint(6, 300, (2, 7))
    mask = torch.tensor([[1] * 7, [0] * 4 + [1] * 3])
    model(input_ids=ids, attention_mask=mask)
    assert flash.calls[0]["cu_seqlens"][0].tolist() == [0, 7, 10]
