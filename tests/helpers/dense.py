"""Dense attention: every score of the row, a block-diagonal mask, a softmax.

`dense_attention` is the reference of `tests/attention`. Doubles of kernels compute with it too,
from the boundaries, window and scale that they are given: a wrong one gives wrong gradients.
`assert_equals_dense` compares a kernel with it on a row of seven documents.

The tolerance, in float32: the reference runs in float64, so what remains is the rounding of one
kernel: 2**-24 = 6e-8 of values of size 1 to 10, over sums of at most 40 keys × 16 dimensions, far
below 1e-5. Whole models need more; see `tests/training/test_exact.py`.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from trl_packing.attention.interface import KernelOptions, PackedKernel

TOLERANCE = 1e-5

# Two documents without tokens, one of a single token, and one longer than every window of a test.
LENGTHS = (5, 1, 0, 30, 2, 0, 3)
NUM_TOKENS = sum(LENGTHS)


def visible(
    cu_seqlens: Tensor, left: int | None = None, cu_seqlens_k: Tensor | None = None
) -> Tensor:
    """Return which query sees which key, ``(Q, K)`` bool.

    `left`: how many keys before itself, None: all.
    Causal masks are aligned at the last key of each document, as FlashAttention aligns them.
    """
    of_query, behind_query = _places(cu_seqlens)
    of_key, behind_key = _places(cu_seqlens if cu_seqlens_k is None else cu_seqlens_k)
    distance = behind_key[None] - behind_query[:, None]
    seen = (distance >= 0) & (of_query[:, None] == of_key[None])
    return seen if left is None else seen & (distance <= left)


def _places(cu_seqlens: Tensor) -> tuple[Tensor, Tensor]:
    """Return the document of each token, and how many tokens it has from there on."""
    lengths = cu_seqlens.long().diff()
    document = torch.arange(len(lengths)).repeat_interleave(lengths)
    return document, cu_seqlens[1:][document] - torch.arange(len(document))


def probabilities(
    query: Tensor,
    key: Tensor,
    cu_seqlens: Tensor,
    *,
    window: int | None = None,
    cu_seqlens_k: Tensor | None = None,
    **options: object,
) -> Tensor:
    """Return ``(heads, Q, K)``; rows sum to one, or to less with sinks."""
    seen = visible(cu_seqlens, None if window is None else window - 1, cu_seqlens_k)
    return probabilities_of(query, key, seen, **options)


def probabilities_of(
    query: Tensor,
    key: Tensor,
    seen: Tensor,
    scale: float,
    softcap: float | None = None,
    sinks: Tensor | None = None,
) -> Tensor:
    """Return the same where `seen` ``(Q, K)`` says which query sees which key."""
    group = query.shape[1] // key.shape[1]
    scores = torch.einsum("qhd,khd->hqk", query, key.repeat_interleave(group, 1)) * scale
    if softcap:
        scores = softcap * torch.tanh(scores / softcap)
    scores = scores.masked_fill(~seen, float("-inf"))
    if sinks is None:
        return scores.softmax(-1)
    column = sinks[:, None, None].expand(-1, scores.shape[1], 1)
    return torch.cat([scores, column], -1).softmax(-1)[..., :-1]


def dense_attention(
    query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: object
) -> Tensor:
    """Return ``(T, heads, value_dim)``; arguments as of `document_attention`."""
    group = query.shape[1] // value.shape[1]
    weights = probabilities(query, key, cu_seqlens, **options)
    return torch.einsum("hqk,khd->qhd", weights, value.repeat_interleave(group, 1))


def boundaries(lengths=LENGTHS):
    return torch.tensor([0, *torch.tensor(lengths).cumsum(0)], dtype=torch.int32)


def inputs(heads=4, kv_heads=2, head_dim=8, value_dim=8, dtype=torch.float32):
    return [
        torch.randn(NUM_TOKENS, h, d).to(dtype).requires_grad_()
        for h, d in ((heads, head_dim), (kv_heads, head_dim), (kv_heads, value_dim))
    ]


def outcome(attention, tensors, upstream, **options):
    """Return the output and the gradient of every tensor in `tensors` and of the sinks."""
    leaves = [x.detach().clone().requires_grad_() for x in tensors]
    given = dict(options)
    if options.get("sinks") is not None:
        given["sinks"] = options["sinks"].detach().to(tensors[0].dtype).clone().requires_grad_()
        leaves.append(given["sinks"])
    output = attention(*leaves[:3], boundaries(), **given)
    return [output, *torch.autograd.grad(output, leaves, upstream.to(output.dtype))]


def assert_equals_dense(attention, tensors, tolerance=TOLERANCE, **options):
    upstream = torch.randn(NUM_TOKENS, tensors[0].shape[1], tensors[2].shape[2])
    if options.get("sinks") is True:
        options["sinks"] = torch.randn(tensors[0].shape[1])
    ours = outcome(attention, tensors, upstream, scale=0.4, **options)
    reference = outcome(
        dense_attention, [x.double() for x in tensors], upstream.double(), scale=0.4, **options
    )
    for got, expected in zip(ours, reference, strict=True):
        size = 1 + expected.abs().max().item()
        torch.testing.assert_close(got.double(), expected, rtol=0, atol=tolerance * size)


def with_keywords(kernel: PackedKernel) -> Callable[..., Tensor]:
    """Return `kernel` with its options as keyword arguments, as `dense_attention` takes them."""

    def attention(
        query: Tensor, key: Tensor, value: Tensor, cu_seqlens: Tensor, **options: object
    ) -> Tensor:
        return kernel(query, key, value, cu_seqlens, KernelOptions(**options), None)

    return attention
