"""Document-wise SDPA equals dense attention, forward and backward, also of other shapes."""

import pytest
import torch
from helpers.dense import (
    KERNEL_OPTIONS,
    TOLERANCE,
    assert_is_dense,
    boundaries,
    inputs,
    last_queries,
)
from helpers.trees import Tree

from trl_packing.attention import document_sdpa as tiles
from trl_packing.attention.document_sdpa import document_attention

SHAPES = {
    "one key head a query head": {"kv_heads": 4},
    "multi-query": {"kv_heads": 1},
    "narrow values": {"value_dim": 6},
    "wide values": {"value_dim": 12},
}


@pytest.mark.parametrize("way", ["one tile", "tiles of 4", "bf16", "scores on other devices"])
@pytest.mark.parametrize("options", KERNEL_OPTIONS.values(), ids=KERNEL_OPTIONS)
def test_document_attention_equals_dense_attention(options, way, monkeypatch):
    tensors = inputs()
    tolerance = TOLERANCE
    if way == "bf16":
        tensors = inputs(dtype=torch.bfloat16)
        tolerance = 4 * 2**-8
    elif way != "one tile":
        monkeypatch.setattr(tiles, "BLOCK", 4)
    if "scores" in way:  # in float32: CPU's fused kernel is CPU's
        monkeypatch.setattr(tiles, "needs_scores", lambda query, options: True)
    assert_is_dense(document_attention, tensors, tolerance, **options)
    chunk, keys = last_queries(11, tensors)
    assert_is_dense(document_attention, chunk, tolerance, tree=keys, **options)


def by_sdpa(query, key, value, cu_seqlens, options, max_length, keys=None):
    lengths = [length for length in cu_seqlens.diff().tolist() if length]
    return tiles.sdpa_by_document(query, key, value, lengths, options.scale)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_are_grouped_and_values_have_their_own_width(shape):
    for options in ({"window": 4}, {"softcap": 2.0}):
        assert_is_dense(document_attention, inputs(**shape), **options)
    assert_is_dense(by_sdpa, inputs(**shape))  # of other devices
    chunk, keys = last_queries(11, inputs(**shape))
    assert_is_dense(by_sdpa, chunk, tree=keys)


def test_the_comparison_sees_a_missing_boundary():
    def without_boundaries(query, key, value, cu_seqlens, *options):
        return document_attention(query, key, value, cu_seqlens[[0, -1]], *options)

    with pytest.raises(AssertionError):
        assert_is_dense(without_boundaries, inputs())


@pytest.mark.parametrize("shared", [False, True])
def test_the_op_keeps_the_contract_of_custom_ops(shared):
    """It is compiled too, with sizes that vary."""
    sinks = torch.randn(4, requires_grad=True)
    tensors = inputs()
    row = boundaries()
    keys = (None, None)
    if shared:
        tree = Tree([3, 2, 2], [-1, 0, 0])
        tensors = inputs(num_tokens=7)
        row = tree.cu_seqlens
        keys = tree.keys[:2]
    arguments = (*tensors, row, *keys, sinks, [0.4, 4.0, 2.0])
    torch.library.opcheck(torch.ops.trl_packing.document_attention.default, arguments)
