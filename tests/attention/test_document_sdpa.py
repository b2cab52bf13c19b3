"""Document-wise SDPA equals dense attention, forward and backward, with dropout and compiled."""

import pytest
import torch
from helpers.dense import (
    LENGTHS,
    NUM_TOKENS,
    SCALE,
    TOLERANCE,
    assert_equals_dense,
    boundaries,
    inputs,
    outcome,
    probabilities,
    visible,
    weighted_sum,
)

from trl_packing.attention import document_sdpa as tiles
from trl_packing.attention.document_sdpa import document_attention
from trl_packing.attention.interface import KernelOptions

SINKS = torch.tensor([0.3, -1.0, 2.0, 0.0])
OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window longer than documents": {"window": 64},
    "softcap, window": {"softcap": 2.0, "window": 4},
    "sinks": {"sinks": SINKS},
    "softcap, sinks, window": {"softcap": 2.0, "sinks": SINKS, "window": 7},
}
SHAPES = {
    "one key head a query head": {"kv_heads": 4},
    "multi-query": {"kv_heads": 1},
    "narrow values": {"value_dim": 6},
    "wide values": {"value_dim": 12},
}


@pytest.mark.parametrize("way", ["one tile", "tiles of 4", "bf16", "scores on other devices"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_document_attention_equals_dense_attention(options, way, monkeypatch):
    tensors, tolerance = inputs(), TOLERANCE
    if way == "bf16":
        tensors, tolerance = inputs(dtype=torch.bfloat16), 4 * 2**-8
    elif way != "one tile":
        monkeypatch.setattr(tiles, "BLOCK", 4)
    if "scores" in way:  # in float32: CPU's fused kernel is CPU's
        monkeypatch.setattr(tiles, "needs_scores", lambda query, options: True)
    assert_equals_dense(document_attention, tensors, tolerance, **options)


def by_sdpa(query, key, value, cu_seqlens, options, max_length):
    return tiles.sdpa_by_document(query, key, value, [n for n in LENGTHS if n], options.scale)


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_are_grouped_and_values_have_their_own_width(shape):
    for options in ({"window": 4}, {"softcap": 2.0}):
        assert_equals_dense(document_attention, inputs(**shape), **options)
    assert_equals_dense(by_sdpa, inputs(**shape))  # of other devices


def test_the_comparison_sees_a_missing_boundary():
    def without_boundaries(query, key, value, cu_seqlens, *options):
        return document_attention(query, key, value, cu_seqlens[[0, -1]], *options)

    with pytest.raises(AssertionError):
        assert_equals_dense(without_boundaries, inputs())


DROPOUT = 0.25


@pytest.mark.parametrize("options", [{"window": 4}, {"sinks": SINKS}, {"softcap": 2.0}], ids=str)
def test_dropout_drops_the_same_weights_forward_and_backward(options, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 8)
    sinks, softcap = options.get("sinks"), options.get("softcap")

    def attention(query, key, value, sinks=None):
        torch.manual_seed(11)
        given = KernelOptions(SCALE, options.get("window"), softcap, sinks, DROPOUT)
        return document_attention(query, key, value, boundaries(), given)

    query, key, value = tensors = inputs()
    seen = visible(boundaries(), options.get("window"))
    # Which weights are dropped: values that are one-hot make weights visible.
    one_hot = torch.eye(NUM_TOKENS)[:, None].expand(-1, key.shape[1], -1)
    weights = attention(query, key, one_hot, sinks).transpose(0, 1)
    undropped = probabilities(query, key, seen, SCALE, softcap, sinks)
    kept = torch.where(undropped > 0, weights / undropped, 0).detach()

    def dense_with_dropout(query, key, value, sinks=None):
        return weighted_sum(probabilities(query, key, seen, SCALE, softcap, sinks) * kept, value)

    upstream = torch.randn(value.shape[0], 4, 8)
    ours = outcome(attention, tensors, upstream, sinks)
    expected = outcome(dense_with_dropout, [x.double() for x in tensors], upstream, sinks)
    for got, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=0, atol=2 * TOLERANCE)
    # Weights are kept at 1 / (1 - p) or dropped, a share p of them: 3 sigma of 2,000 draws is 0.03.
    values = kept[undropped > 0]
    assert ((values == 0) | ((values - 1 / (1 - DROPOUT)).abs() < 1e-4)).all()
    assert (values == 0).float().mean().item() == pytest.approx(DROPOUT, abs=0.05)


@pytest.mark.parametrize("seed", [None, torch.tensor(5)], ids=["sinks, window, softcap", "dropout"])
def test_the_op_keeps_the_contract_of_custom_ops(seed):
    sinks = torch.randn(4, requires_grad=True) if seed is None else None
    numbers = [0.4, 4.0, 2.0, 0.0] if seed is None else [0.4, 0.0, 0.0, 0.1]
    arguments = (*inputs(), boundaries(), None, None, sinks, seed, numbers)
    torch.library.opcheck(torch.ops.trl_packing.document_attention.default, arguments)
