"""Attention with shared prefixes equals dense attention by paths, and each document alone."""

import numpy as np
import pytest
import torch
from helpers.dense import KERNEL_OPTIONS, assert_is_dense, inputs
from helpers.trees import Tree, random_tree

from trl_packing.attention import document_sdpa as tiles
from trl_packing.attention import prefix_keys
from trl_packing.attention.document_sdpa import document_attention
from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.prefix_keys import gather_keys

OPTIONS = ("plain", "window of one", "window of twelve", "sinks", "softcap, sinks, window")


@pytest.mark.parametrize("block", [512, 4], ids=["one tile", "tiles of 4"])
@pytest.mark.parametrize("options", [KERNEL_OPTIONS[name] for name in OPTIONS], ids=OPTIONS)
def test_attention_over_paths_equals_dense_attention(options, block, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", block)
    rng = np.random.default_rng(0)
    for _ in range(12):
        tree = random_tree(rng, int(rng.integers(1, 12)))
        tensors = inputs(num_tokens=tree.starts[-1])
        assert_is_dense(document_attention, tensors, tree=tree, **options)


def test_the_comparison_sees_siblings_that_see_each_other():
    family = Tree([3, 2, 2], [-1, 0, 0])
    chain = Tree([3, 2, 2], [-1, 0, 1])
    tensors = inputs(num_tokens=7)
    assert_is_dense(document_attention, tensors, tree=family)
    with pytest.raises(AssertionError):
        assert_is_dense(document_attention, tensors, tree=family, keys=chain.keys)


def test_keys_that_do_not_fit_are_refused():
    row = Tree([3, 2], [-1, 0])
    q, k, v = inputs(num_tokens=5)
    good = row.keys
    swapped = good._replace(key_index=good.key_index.flip(0))
    short = good._replace(cu_seqlens_k=good.cu_seqlens_k[:-1])
    for keys in (swapped, short):
        with pytest.raises(ValueError, match="segment"):
            document_attention(q, k, v, row.cu_seqlens, KernelOptions(0.4), keys=keys)


def test_gradients_of_gathered_keys_are_summed_in_float32(monkeypatch):
    """In bf16, a sum over 600 segments would stop growing at 256."""
    monkeypatch.setattr(prefix_keys, "_PART", 100)
    row = torch.zeros(3, 1, 2, dtype=torch.bfloat16, requires_grad=True)
    index = torch.tensor([0, 2] * 300 + [0] * 300)
    torch.use_deterministic_algorithms(True)  # raises for sums in no fixed order
    try:
        gather_keys(row, index).sum().backward()
    finally:
        torch.use_deterministic_algorithms(False)
    assert row.grad[:, 0, 0].tolist() == [600, 0, 300]
    assert row.grad.dtype == torch.bfloat16
