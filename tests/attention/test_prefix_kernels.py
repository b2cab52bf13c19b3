"""Kernels of other libraries get the keys of each segment, and attention without such keys refuses.

Doubles stand in for the kernels (`varlen_double.py`, `flash_attn_double.py`). They read keys where
the boundaries point, and align the causal mask at the last key, as the kernels do.
"""

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model as any_model
from harness import TWO_RUNS, relative_error, run
from helpers import flash_attn_double, varlen_double
from helpers.dense import assert_equals_dense, inputs
from helpers.shared_prefixes import forked_documents
from helpers.tiny import tiny_model
from helpers.trees import random_tree
from transformers.modeling_utils import AttentionInterface

from trl_packing import PackedCollator
from trl_packing.attention.backends import NATIVE_ATTENTION, AttentionChoice
from trl_packing.attention.install import install_attention, take_prefix_keys
from trl_packing.attention.varlen import varlen_attention
from trl_packing.packing.prefix_tree import build_prefix_tree

TOLERANCE = 1e-4  # of logits and gradients


@pytest.fixture(autouse=True)
def attention_functions(monkeypatch):
    """Restore transformers' attention functions after each test."""
    functions = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)


DOCUMENTS = [np.array(document["input_ids"]) for document in forked_documents()]


def shared_row():
    """Return the batch of `DOCUMENTS` with shared prefixes."""
    batch = PackedCollator(shares_prefixes=True)([{"input_ids": ids} for ids in DOCUMENTS])
    assert batch["input_ids"].shape[1] < sum(map(len, DOCUMENTS))
    return {k: v for k, v in batch.items() if k not in ("labels", "loss_weights", "target_counts")}


def assert_equals_documents_alone(model, reference):
    """Compare the logits of all documents and the gradients of a sum of them."""
    targets = build_prefix_tree(DOCUMENTS, min_shared=16).targets
    rows = np.split(targets, np.cumsum([len(ids) for ids in DOCUMENTS])[:-1])
    logits = model(**shared_row()).logits[0]
    total = expected_total = 0.0
    for ids, at in zip(DOCUMENTS, rows, strict=True):
        alone = reference(input_ids=torch.from_numpy(ids)[None], use_cache=False).logits[0, :-1]
        torch.testing.assert_close(logits[at[1:] - 1], alone, rtol=0, atol=TOLERANCE)
        total = total + logits[at[1:] - 1].square().mean()
        expected_total = expected_total + alone.square().mean()
    total.backward()
    expected_total.backward()
    for (name, p), q in zip(model.named_parameters(), reference.parameters(), strict=True):
        torch.testing.assert_close(p.grad, q.grad, rtol=0, atol=TOLERANCE, msg=name)


@pytest.mark.parametrize("kv_heads", [1, 2])
@pytest.mark.parametrize("sinks", [None, torch.tensor([0.3, -1.0, 2.0, 0.0])], ids=["", "sinks"])
@pytest.mark.parametrize("window", [None, 4])
def test_varlen_attention_over_paths_equals_dense_attention(window, sinks, kv_heads, monkeypatch):
    calls = varlen_double.install(monkeypatch)
    tree = random_tree(np.random.default_rng(3), 9)
    tensors = inputs(kv_heads, num_tokens=tree.starts[-1])
    assert_equals_dense(varlen_attention, tensors, tree=tree, sinks=sinks, window=window)
    (cu_q, cu_k, longest_q, longest_k, left, is_causal) = calls[0]
    assert (cu_q, cu_k) == (tree.cu_seqlens.tolist(), tree.keys.cu_seqlens_k.tolist())
    assert (longest_q, longest_k) == (max(tree.lengths), tree.keys.max_length)
    assert (left, is_causal) == (-1 if window is None else window - 1, window is None)


@pytest.mark.parametrize("name", ["mistral", "gpt_oss"])
def test_models_on_torch_varlen_share_prefixes(name, monkeypatch):
    calls = varlen_double.install(monkeypatch)
    model, batch = tiny_model(name), shared_row()
    fallback = "_over_eager" if name == "gpt_oss" else ""
    install_attention(model, AttentionChoice("varlen", "packed_varlen" + fallback, "a test"))
    assert take_prefix_keys(model, "varlen") is None
    assert_equals_documents_alone(model, tiny_model(name))
    # A call that names no boundaries is known by its tokens, and completed.
    del calls[:]
    model(input_ids=batch["input_ids"])
    model(**batch)
    half = len(calls) // 2
    assert calls[:half] == calls[half:]
    with pytest.raises(ValueError, match="without the boundaries of documents"):
        model(input_ids=batch["input_ids"][:, :20])


@pytest.mark.parametrize(
    ("name", "version", "checkpointing"),
    [("llama", 2, True), ("mistral", 3, False), ("gemma2", 2, False)],
)
def test_models_on_flash_attention_share_prefixes(name, version, checkpointing, monkeypatch):
    double = flash_attn_double.install(monkeypatch, version)
    implementation = f"flash_attention_{version}"
    model = tiny_model(name, attn_implementation=implementation)
    install_attention(model, AttentionChoice(implementation, None, "a test"))
    assert take_prefix_keys(model, implementation) is None
    if checkpointing:
        model.train()
        model.gradient_checkpointing_enable({"use_reentrant": False})
    assert_equals_documents_alone(model, tiny_model(name, attn_implementation="eager"))
    batch = shared_row()
    for call in double.calls:
        assert call["longest"] == (batch["max_length_q"], batch["max_length_k"])
        assert all(type(x) is int for x in call["longest"]), "a tensor would sync in every layer"


@pytest.mark.parametrize("backend", NATIVE_ATTENTION)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_attention_with_one_set_of_boundaries_refuses(name, backend):
    model = any_model(name)
    install_attention(model, AttentionChoice(backend, None, "a test", "sdpa"))
    assert take_prefix_keys(model, backend).startswith(f"attention={backend!r} has one set of")
    with pytest.raises(NotImplementedError, match=r"one set of boundaries.*prefix_sharing='off'"):
        model(**shared_row())


# --- a run ----------------------------------------------------------------------------------------


def run_on_flash_attention(folder, mode, monkeypatch, backward=""):
    """Return the run of a step, and the boundaries of queries and keys of each call."""
    double = flash_attn_double.install(monkeypatch, 2, backward)
    model = tiny_model("mistral", attn_implementation="flash_attention_2")
    rows = [{"input_ids": ids.tolist()} for ids in DOCUMENTS]
    options = {"max_length": 128, "per_device_train_batch_size": 2, "prefix_sharing": mode}
    # The check of shared prefixes runs all the same.
    found = run(model, rows, folder, isolation_check="off", **options)
    return found, [call["cu_seqlens"] for call in double.calls]


def test_a_run_on_flash_attention_equals_the_run_that_does_not_share(tmp_path, monkeypatch):
    shared, calls = run_on_flash_attention(tmp_path / "a", "bin", monkeypatch)
    assert shared.trainer.attention.backend == "flash_attention_2"
    assert not torch.equal(*calls[-1])
    apart, calls = run_on_flash_attention(tmp_path / "b", "off", monkeypatch)
    assert all(torch.equal(*call) for call in calls)
    assert shared.losses[0] == pytest.approx(apart.losses[0], rel=TWO_RUNS)
    assert relative_error(shared.gradients, apart.gradients) <= TWO_RUNS


@pytest.mark.parametrize("backward", ["leaks", "returns no numbers"])
def test_a_run_does_not_share_on_a_kernel_whose_backward_fails(backward, tmp_path, monkeypatch):
    found, _ = run_on_flash_attention(tmp_path, "bin", monkeypatch, backward)
    assert not found.trainer.data_collator.shares_prefixes
    assert "backward" in found.trainer.packing_report.prefixes.reason
