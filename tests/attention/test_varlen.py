"""PyTorch's varlen attention gets the right arguments; doubles stand in for its kernels."""

import collections

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from helpers import varlen_double
from helpers.dense import assert_is_dense, boundaries, inputs, last_queries
from helpers.packed_models import alone, install, packed_batch
from helpers.trees import random_tree

from trl_packing.attention import varlen
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.varlen import varlen_attention

OPTIONS = [{}, {"window": 1}, {"window": 64}, {"window": 4, "sinks": torch.arange(4.0) - 1}]


@pytest.mark.parametrize("is_tree", [False, True], ids=["documents", "shared prefixes"])
@pytest.mark.parametrize("kv_heads", [1, 2, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, is_tree, monkeypatch):
    calls = varlen_double.install(monkeypatch)
    tree = None
    ends = boundaries().tolist()
    tensors = inputs(kv_heads)
    expected = (ends, ends, 30, 30)
    if is_tree:
        tree = random_tree(np.random.default_rng(3), 9)
        ends = tree.cu_seqlens.tolist()
        keys = tree.keys
        expected = (ends, keys.cu_seqlens_k.tolist(), max(tree.lengths), keys.max_length)
        tensors = inputs(kv_heads, num_tokens=ends[-1])
    assert_is_dense(varlen_attention, tensors, tree=tree, **options)
    left = options.get("window", 0) - 1
    assert calls.pop() == (*expected, left, left < 0)
    chunk, keys = last_queries(11, inputs(kv_heads))
    assert_is_dense(varlen_attention, chunk, tree=keys, **options)
    assert calls == [([0, 11], [0, 41], 11, 41, left, left < 0)]


def test_varlen_attention_refuses_what_the_kernel_lacks():
    with pytest.raises(NotImplementedError, match=r"softcap=2\.0.*'documents'"):
        varlen_attention(*inputs(), boundaries(), KernelOptions(0.4, softcap=2.0))


@pytest.mark.parametrize("widths", [(12, 12), (24, 16), (16, 5), (40, 40)], ids=str)
@pytest.mark.parametrize("sinks", [None, torch.arange(4.0) - 1], ids=["", "sinks"])
def test_heads_of_any_width_equal_dense_attention(widths, sinks, monkeypatch):
    monkeypatch.setattr(varlen, "WIDEST", 32)
    calls = varlen_double.install(monkeypatch)
    tensors = inputs(value_dim=widths[1])
    for place in (0, 1):
        tensors[place] = torch.randn(*tensors[place].shape[:2], widths[0], requires_grad=True)
    assert_is_dense(varlen_attention, tensors, sinks=sinks)
    assert len(calls) == (max(widths) <= 32)


# Calls of the kernel by its window, in one forward of the tiny model.
PER_LAYER = {
    "gemma4_text": {7: 2},  # the two layers without a window have heads of 64
    "deepseek_v3": {None: 2},  # keys of 24, values of 16
}


@pytest.mark.parametrize("name", PER_LAYER)
def test_layers_that_the_kernel_lacks_run_document_by_document(name, monkeypatch):
    model = tiny_model(name)
    batch = packed_batch([3, 21, 1, 9])
    batch["input_ids"] %= model.config.vocab_size
    expected = alone(model, batch)
    monkeypatch.setattr(varlen, "WIDEST", 32)
    calls = varlen_double.install(monkeypatch)
    install(model, "varlen", gpu=monkeypatch)
    upstream = torch.randn_like(expected)
    weights = list(model.parameters())
    gradients = torch.autograd.grad((expected * upstream).sum(), weights, allow_unused=True)
    found = model(**batch).logits
    ours = torch.autograd.grad((found * upstream).sum(), weights, allow_unused=True)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(ours, gradients, rtol=1e-3, atol=1e-3)
    windows = collections.Counter(left if left >= 0 else None for *_, left, _ in calls)
    assert windows == PER_LAYER[name]
