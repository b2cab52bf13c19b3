"""Hybrid models stay packed where their recurrent kernels take boundaries, and are checked.

Without `causal_conv1d` and `fla`, transformers refuses packed rows, and documents are padded. The
doubles have the arguments of those packages (`seq_idx`, `cu_seqlens`), and run transformers' own
functions on one document after another.
"""

import importlib
import inspect

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from datasets import Dataset
from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import tiny_tokenizer

from trl_packing import PackedSFTConfig, PackedSFTTrainer

MODULES = {
    "qwen3_5_text": "transformers.models.qwen3_5.modeling_qwen3_5",
    "lfm2": "transformers.models.lfm2.modeling_lfm2",
}


def install_kernels(module, monkeypatch, leaks=False):
    """Put doubles of both packages in place of what transformers found; return their calls."""
    calls = []
    conv = inspect.unwrap(module.causal_conv1d_fn)

    def lengths_of(seq_idx, size):
        calls.append(seq_idx)
        if seq_idx is None or leaks:
            return [size]
        return torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()

    def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None, **_):
        options = {} if activation is None else {"activation": activation}
        parts = x.split(lengths_of(seq_idx, x.shape[-1]), -1)
        return torch.cat([conv(part, weight, bias, **options) for part in parts], -1)

    monkeypatch.setattr(module, "causal_conv1d_fn", causal_conv1d_fn)
    if not hasattr(module, "torch_chunk_gated_delta_rule"):
        return calls
    rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def chunk_gated_delta_rule(q, k, v, *, g, beta, cu_seqlens=None, **options):
        options = {x: options[x] for x in ("use_qk_l2norm_in_kernel",) if x in options}
        calls.append(cu_seqlens)
        is_apart = cu_seqlens is not None and not leaks
        lengths = cu_seqlens.diff().tolist() if is_apart else [q.shape[1]]
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
        made = [rule(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts]
        return torch.cat(made, 1), None

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    return calls


def train(name, folder, documents):
    """Return the trainer after a step on all documents, its gradients, and its loss."""
    kept = Keep()
    settings = ONE_STEP | {
        "output_dir": str(folder),
        "max_length": 64,
        "per_device_train_batch_size": 2,
    }
    model = tiny_model(name)
    trainer = PackedSFTTrainer(
        model,
        PackedSFTConfig(**settings),
        train_dataset=Dataset.from_list(documents),
        processing_class=tiny_tokenizer(),
        callbacks=[kept],
    )
    trainer.train()
    loss = next(entry["loss"] for entry in trainer.state.log_history if "loss" in entry)
    return trainer, kept.gradients, loss


def one_at_a_time(name, documents):
    """Return loss and gradients of all tokens, one document at a time."""
    model, total = tiny_model(name).train(), 0.0
    number = sum(len(document["input_ids"]) - 1 for document in documents)
    for document in documents:
        ids = torch.tensor([document["input_ids"]])
        logits = model(input_ids=ids, use_cache=False).logits[0, :-1]
        loss = torch.nn.functional.cross_entropy(logits, ids[0, 1:], reduction="sum") / number
        loss.backward()
        total += loss.item()
    return total, {n: p.grad for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("kernels", ["with", "without", "leaking"])
@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_a_hybrid_model_stays_packed_if_its_kernels_take_boundaries(
    name, kernels, monkeypatch, tmp_path
):
    rng = np.random.default_rng(0)
    most = tiny_model(name).config.vocab_size
    documents = [{"input_ids": rng.integers(3, most, n).tolist()} for n in (9, 20, 5, 30)]
    loss, expected = one_at_a_time(name, documents)
    calls = []
    if kernels != "without":
        module = importlib.import_module(MODULES[name])
        calls = install_kernels(module, monkeypatch, leaks=kernels == "leaking")
    trainer, found, found_loss = train(name, tmp_path, documents)
    assert trainer.attention.backend == ("documents" if kernels == "with" else "padded")
    assert "isolated" in str(trainer.packing_report), "checked on this model"
    if kernels == "with":
        assert all(call is not None for call in calls[-2:]), "the step's rows are packed"
    # Without kernels, transformers 5.17 leaks where 5.23 raises.
    reasons = {"without": "refused (ValueError: |leaks by", "leaking": "leaks by"}
    reason = trainer.attention.reason
    assert any(words in reason for words in reasons.get(kernels, "cpu, float32").split("|"))
    assert found_loss == pytest.approx(loss, rel=1e-4)
    for parameter, gradient in expected.items():
        bound = 1e-4 * (1 + gradient.abs().max().item())
        torch.testing.assert_close(found[parameter], gradient, rtol=0, atol=bound, msg=parameter)
