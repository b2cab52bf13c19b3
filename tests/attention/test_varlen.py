"""PyTorch's varlen attention gets the right arguments; doubles stand in for its kernels."""

import numpy as np
import pytest
import torch
from helpers import varlen_double
from helpers.dense import assert_equals_dense, boundaries, inputs
from helpers.trees import random_tree

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
    assert_equals_dense(varlen_attention, tensors, tree=tree, **options)
    left = options.get("window", 0) - 1
    assert calls == [(*expected, left, left < 0)]


def test_varlen_attention_refuses_what_the_kernel_lacks():
    with pytest.raises(NotImplementedError, match=r"softcap=2\.0.*'documents'"):
        varlen_attention(*inputs(), boundaries(), KernelOptions(0.4, softcap=2.0))
