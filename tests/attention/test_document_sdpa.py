"""Document-wise SDPA equals dense attention, forward and backward, with dropout and compiled."""

import pytest
import torch
from helpers.dense import (
    NUM_TOKENS,
    TOLERANCE,
    assert_equals_dense,
    boundaries,
    inputs,
    outcome,
    probabilities,
    with_keywords,
)

from trl_packing.attention import document_sdpa
from trl_packing.attention import document_sdpa as tiles
from trl_packing.attention.document_sdpa import sdpa_by_document

document_attention = with_keywords(document_sdpa.document_attention)

OPTIONS = {
    "plain": {},
    "window of one": {"window": 1},
    "window longer than documents": {"window": 64},
    "softcap, window": {"softcap": 2.0, "window": 4},
    "sinks": {"sinks": True},
    "softcap, sinks, window": {"softcap": 2.0, "sinks": True, "window": 7},
}

SHAPES = {
    "one key head a query head": {"kv_heads": 4},
    "grouped": {},
    "multi-query": {"kv_heads": 1},
    "narrow values": {"value_dim": 6},
    "wide values": {"value_dim": 12},
}


@pytest.mark.parametrize("block", [512, 4], ids=["one tile", "tiles of 4"])
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_document_attention_equals_dense_attention(options, block, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", block)
    assert_equals_dense(document_attention, inputs(), **options)


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"softcap": 2.0}], ids=str)
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_heads_are_grouped_and_values_have_their_own_width(shape, options):
    assert_equals_dense(document_attention, inputs(**shape), **options)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_document_attention_in_bf16_is_as_close_as_bf16_allows(options):
    tensors = inputs(dtype=torch.bfloat16)
    assert_equals_dense(document_attention, tensors, tolerance=4 * 2**-8, **options)


def test_the_comparison_sees_a_missing_boundary():
    def without_boundaries(query, key, value, cu_seqlens, **options):
        return document_attention(query, key, value, cu_seqlens[[0, -1]], **options)

    with pytest.raises(AssertionError):
        assert_equals_dense(without_boundaries, inputs())


@pytest.mark.parametrize("block", [512, 4, 3], ids=["one tile", "tiles of 4", "tiles of 3"])
@pytest.mark.parametrize("window", [None, 1, 4, 5, 9, 64])
@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
def test_the_variant_for_other_devices_equals_dense_attention(shape, window, block, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", block)

    def attention(query, key, value, cu_seqlens, *, scale, window=None):
        return sdpa_by_document(query, key, value, cu_seqlens, scale, window or 0)

    assert_equals_dense(attention, inputs(**shape), window=window)


@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_scores_on_other_devices_equal_dense_attention(options, monkeypatch):
    """There every tile goes through its scores, in float32: CPU's fused kernel is CPU's."""
    monkeypatch.setattr(tiles, "needs_scores", lambda query, options: True)
    monkeypatch.setattr(tiles, "BLOCK", 4)
    assert_equals_dense(document_attention, inputs(), **options)


DROPOUT = 0.25


def dropout_attention(query, key, value, cu_seqlens, **options):
    torch.manual_seed(11)
    return document_attention(query, key, value, cu_seqlens, dropout=DROPOUT, **options)


def kept_weights(query, key, **options):
    """Return what dropout multiplies each weight with: one-hot values make the weights visible."""
    one_hot = torch.eye(NUM_TOKENS)[:, None].expand(-1, key.shape[1], -1)
    weights = dropout_attention(query, key, one_hot, boundaries(), **options).transpose(0, 1)
    undropped = probabilities(query, key, boundaries(), **options)
    return torch.where(undropped > 0, weights / undropped, 0).detach(), undropped > 0


@pytest.mark.parametrize("options", [{}, {"window": 4}, {"sinks": True}, {"softcap": 2.0}], ids=str)
def test_dropout_drops_the_same_weights_forward_and_backward(options, monkeypatch):
    monkeypatch.setattr(tiles, "BLOCK", 8)
    tensors = inputs()
    if "sinks" in options:
        options = {"sinks": torch.randn(4)}
    kept, seen = kept_weights(*tensors[:2], scale=0.4, **options)

    def dense_with_dropout(query, key, value, cu_seqlens, **options):
        weights = probabilities(query, key, cu_seqlens, **options) * kept
        return torch.einsum("hqk,khd->hqd", weights, value.repeat_interleave(2, 1)).transpose(0, 1)

    upstream = torch.randn(NUM_TOKENS, 4, 8)
    ours = outcome(dropout_attention, tensors, upstream, scale=0.4, **options)
    doubles = [x.double() for x in tensors]
    expected = outcome(dense_with_dropout, doubles, upstream.double(), scale=0.4, **options)
    for got, reference in zip(ours, expected, strict=True):
        torch.testing.assert_close(got.double(), reference, rtol=0, atol=2 * TOLERANCE)
    # Weights are kept at 1 / (1 - p) or dropped, a share p of them: 3 sigma of 2,000 draws is 0.03.
    values = kept[seen]
    assert ((values == 0) | ((values - 1 / (1 - DROPOUT)).abs() < 1e-4)).all()
    assert (values == 0).float().mean().item() == pytest.approx(DROPOUT, abs=0.05)


@pytest.mark.parametrize("seed", [None, torch.tensor(5)], ids=["sinks, window, softcap", "dropout"])
def test_the_op_keeps_the_contract_of_custom_ops(seed):
    sinks = torch.randn(4, requires_grad=True) if seed is None else None
    numbers = [0.4, 4.0, 2.0, 0.0] if seed is None else [0.4, 0.0, 0.0, 0.1]
    arguments = (*inputs(), boundaries(), None, None, sinks, seed, numbers)
    torch.library.opcheck(torch.ops.trl_packing.document_attention.default, arguments)
