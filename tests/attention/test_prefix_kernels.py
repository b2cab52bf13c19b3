"""Kernels of other libraries get the keys of each segment, and attention without such keys refuses.

Doubles stand in for the kernels (`varlen_double.py`, `flash_attn_double.py`). They read keys where
the boundaries point, and align the causal mask at the last key, as the kernels do.
"""

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model as any_model
from harness import alone, assert_exact, run
from helpers import flash_attn_double, varlen_double
from helpers.dense import inputs
from helpers.shared_prefixes import forked_documents
from helpers.tiny import tiny_model
from helpers.trees import random_tree
from transformers.modeling_utils import AttentionInterface

from trl_packing import PackedCollator
from trl_packing.attention.backends import NATIVE_ATTENTION, AttentionChoice
from trl_packing.attention.install import install_attention, take_prefix_keys
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.varlen import varlen_attention


@pytest.fixture(autouse=True)
def attention_functions(monkeypatch):
    """Restore transformers' attention functions after each test."""
    functions = dict(AttentionInterface._global_mapping)
    monkeypatch.setattr(AttentionInterface, "_global_mapping", functions)


def shared_row():
    """Return a batch with shared prefixes."""
    documents = [{"input_ids": document["input_ids"]} for document in forked_documents()]
    batch = PackedCollator(shares_prefixes=True)(documents)
    assert batch["input_ids"].shape[1] < sum(len(d["input_ids"]) for d in documents)
    return {k: v for k, v in batch.items() if k not in ("labels", "loss_weights", "target_counts")}


def test_gathered_keys_are_not_kept_until_the_backward(monkeypatch):
    varlen_double.install(monkeypatch)
    tree = random_tree(np.random.default_rng(3), 9)
    kept = []
    assert len(tree.keys.key_index) > 1.5 * tree.starts[-1]
    with torch.autograd.graph.saved_tensors_hooks(lambda x: kept.append(x.shape) or x, lambda x: x):
        options = KernelOptions(0.4)
        tensors = inputs(num_tokens=tree.starts[-1])
        varlen_attention(*tensors, tree.cu_seqlens, options, None, tree.keys).sum().backward()
    assert kept
    assert max(shape[0] for shape in kept if len(shape) == 3) == tree.starts[-1]


@pytest.mark.parametrize("backend", NATIVE_ATTENTION)
@pytest.mark.parametrize("name", ["llama", "opt"])
def test_attention_with_one_set_of_boundaries_refuses(name, backend):
    model = any_model(name)
    install_attention(model, AttentionChoice(backend, None, "a test", "sdpa"))
    words = f"attention={backend!r} has one set of"
    if backend == "by_document":
        words = "recurrent layers carry a state"
    assert take_prefix_keys(model, backend).startswith(words)
    with pytest.raises(NotImplementedError, match=r"one set of boundaries.*prefix_sharing='off'"):
        model(**shared_row())


def run_on_flash_attention(name, version, folder, monkeypatch, *, backward="", **options):
    """Return the run of a step on shared prefixes, and the double of the kernel."""
    double = flash_attn_double.install(monkeypatch, version, backward)
    model = tiny_model(name, attn_implementation=f"flash_attention_{version}")
    options |= {"max_length": 128, "prefix_sharing": "bin"}
    # The check of shared prefixes runs all the same.
    return run(model, forked_documents(), folder, isolation_check="off", **options), double


FLASH = [("llama", 2, True), ("mistral", 3, False), ("gemma2", 2, False)]


@pytest.mark.parametrize(("name", "version", "checkpointing"), FLASH)
def test_a_run_on_flash_attention_shares(name, version, checkpointing, tmp_path, monkeypatch):
    found, double = run_on_flash_attention(
        name, version, tmp_path, monkeypatch, gradient_checkpointing=checkpointing
    )
    assert found.trainer.attention.backend == f"flash_attention_{version}"
    assert_exact(found, alone(tiny_model(name), forked_documents()))
    for call in double.calls[-2:]:
        assert not torch.equal(*call["cu_seqlens"])
        assert call["longest"] == tuple(int(x.diff().max()) for x in call["cu_seqlens"])
        assert all(type(x) is int for x in call["longest"]), "a tensor would sync in every layer"


@pytest.mark.parametrize("backward", ["leaks", "returns no numbers"])
def test_a_run_does_not_share_on_a_kernel_whose_backward_fails(backward, tmp_path, monkeypatch):
    found, _ = run_on_flash_attention("mistral", 2, tmp_path, monkeypatch, backward=backward)
    assert not found.trainer.data_collator.shares_prefixes
    assert "backward" in found.trainer.packing_report.prefixes.reason
