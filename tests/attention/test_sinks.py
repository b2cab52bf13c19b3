"""Sinks added to plain attention give the softmax over keys and sink, and its gradient."""

import torch

from trl_packing.attention.prefix_keys import gradient_of_sinks, lse_with_sinks, share_of_keys

HEADS, TOKENS, KEYS, DIM = 2, 3, 5, 4


def plain(scores, values):
    """Return output ``(T, H, D)`` and log-sum-exp ``(H, T)`` of attention without sinks."""
    output = torch.einsum("hqk,khd->qhd", scores.softmax(-1), values)
    return output, scores.logsumexp(-1)


def with_column(scores, values, sinks):
    """Return the output of attention whose softmax has the sink as one more column."""
    column = sinks[:, None, None].expand(-1, TOKENS, 1)
    weights = torch.cat([scores, column], -1).softmax(-1)[..., :-1]
    return torch.einsum("hqk,khd->qhd", weights, values)


def inputs():
    torch.manual_seed(0)
    return (
        torch.randn(HEADS, TOKENS, KEYS),
        torch.randn(KEYS, HEADS, DIM),
        torch.randn(HEADS, requires_grad=True),
    )


def test_a_scaled_output_equals_the_softmax_over_keys_and_sink():
    scores, values, sinks = inputs()
    output, lse = plain(scores, values)
    scaled = output * share_of_keys(lse, lse_with_sinks(lse, sinks))
    torch.testing.assert_close(scaled, with_column(scores, values, sinks))
    assert not torch.allclose(output, scaled), "the sinks must take a share"


def test_the_gradient_of_sinks_equals_autograd_s():
    scores, values, sinks = inputs()
    upstream = torch.randn(TOKENS, HEADS, DIM)
    output = with_column(scores, values, sinks)
    (expected,) = torch.autograd.grad(output, sinks, upstream)
    with_sinks = lse_with_sinks(plain(scores, values)[1], sinks)
    torch.testing.assert_close(gradient_of_sinks(upstream, output, with_sinks, sinks), expected)


def test_the_gradient_has_the_dtype_of_the_sinks():
    scores, values, sinks = inputs()
    output, lse = plain(scores, values)
    sinks = sinks.detach().bfloat16()
    gradient = gradient_of_sinks(output, output, lse_with_sinks(lse, sinks), sinks)
    assert gradient.dtype == torch.bfloat16
    assert gradient.shape == (HEADS,)
