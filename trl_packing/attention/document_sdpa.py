"""Computes attention document by document: Σ len² work, no T×T mask.

    query, key, value    (T, heads, head_dim)        key and value may have fewer heads (GQA)
    cu_seqlens           (N + 1,) int32              document n: rows cu_seqlens[n]:cu_seqlens[n+1]
    output               (T, heads, value_dim)

Each document is cut into tiles (`tiles.py`), each an independent softmax. Without a sliding window
a document is one causal tile. With a window, tiles follow it and the work is Σ len·window.

The loop over tiles runs in one custom op with an explicit backward. `torch.compile` therefore sees
one call for any documents, and the backward writes into place instead of scattering a slice per
document. On other devices than CPUs, and without torch.compile, `sdpa_by_document.py` takes over.
"""

import torch
from torch import Tensor

from trl_packing.attention import tiles
from trl_packing.attention.interface import KernelOptions, register_packed_kernel
from trl_packing.attention.prefix_keys import PrefixKeys, merge_softmax, prefix_keys
from trl_packing.attention.sdpa_by_document import sdpa_by_document
from trl_packing.attention.sinks import gradient_of_sinks, lse_with_sinks, share_of_keys

NAME = "packed_documents"


def document_attention(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    options: KernelOptions,
    max_length: int | None = None,
    keys: PrefixKeys | None = None,
) -> Tensor:
    """Return causal attention within each document, ``(T, heads, value_dim)``.

    Args:
        query: ``(T, heads, head_dim)``.
        key: ``(T, kv_heads, head_dim)``.
        value: ``(T, kv_heads, value_dim)``.
        cu_seqlens: boundaries of the documents, ``(N + 1,)`` int32, from 0 to T.
        options: scale, window, soft-cap, sinks and dropout.
        max_length: not used; other packed kernels need it.
        keys: the keys of each segment, if documents share prefixes; `cu_seqlens` are then the
            boundaries of segments.

    Raises:
        ValueError: `cu_seqlens` does not run from 0 to T, or does not fit `keys`.
        NotImplementedError: documents share prefixes, with dropout: each would need its own.

    Examples:
        >>> q, options = torch.randn(5, 2, 4), KernelOptions(scale=0.5)
        >>> out = document_attention(q, q, q, torch.tensor([0, 3, 5]), options)
        >>> alone = document_attention(q[3:], q[3:], q[3:], torch.tensor([0, 2]), options)
        >>> bool(torch.allclose(out[3:], alone))
        True
    """
    scale, window, softcap, sinks, dropout = options
    if keys is not None and dropout:
        raise NotImplementedError(
            f"shared prefixes have no attention dropout (got {dropout}); set the model's "
            "attention_dropout to 0, or prefix_sharing='off'"
        )
    plain = sinks is None and not softcap and not dropout
    if plain and query.device.type != "cpu" and not torch.compiler.is_compiling():
        return sdpa_by_document(query, key, value, cu_seqlens, scale, window or 0, keys)
    # The seed is a tensor, so that a compiled graph gets a new one in each call.
    seed = torch.randint(2**62, (), dtype=torch.int64) if dropout else None
    output, _ = torch.ops.trl_packing.document_attention(
        query,
        key,
        value,
        cu_seqlens,
        *(keys[:2] if keys else (None, None)),
        sinks,
        seed,
        scale,
        window or 0,
        softcap or 0.0,
        dropout,
    )
    return output


@torch.library.custom_op("trl_packing::document_attention", mutates_args=())
def _forward_op(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    key_index: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor]:
    """Return output ``(T, heads, value_dim)`` and log-sum-exp ``(heads, T)`` float32."""
    options = KernelOptions(scale, window, softcap, None, dropout)
    num_tokens, num_heads, _ = query.shape
    keys = prefix_keys(cu_seqlens_k, key_index)
    # Parts of a softmax are merged in float32; without shared prefixes, each tile is all of it.
    dtype = query.dtype if keys is None else torch.float32
    output = query.new_empty(num_tokens, num_heads, value.shape[-1], dtype=dtype)
    lse = query.new_empty(num_heads, num_tokens, dtype=torch.float32)
    generator = tiles.generator_from_seed(seed, query.device)
    forward = tiles.fused_forward
    if tiles.needs_scores(query, options):
        forward = tiles.scored_forward
    for tile in tiles.cut_tiles(cu_seqlens, options, query, keys):
        rows = slice(tile.q0, tile.q1)
        q, k, v = tiles.split_by_kv_head(query, key, value, tile)
        out, tile_lse = forward(q, k, v, tile, options, generator)
        out, tile_lse = out.flatten(0, 1).transpose(0, 1), tile_lse.flatten(0, 1)
        if tile.merges:
            out, tile_lse = merge_softmax(output[rows], lse[:, rows], out, tile_lse)
        output[rows], lse[:, rows] = out, tile_lse
    output = output.to(query.dtype)
    if sinks is not None:
        with_sinks = lse_with_sinks(lse, sinks)
        output.mul_(share_of_keys(lse, with_sinks).to(output.dtype))
        lse = with_sinks
    return output, lse


@_forward_op.register_fake
def _(query, key, value, *_others):
    num_tokens, num_heads, _ = query.shape
    return (
        query.new_empty(num_tokens, num_heads, value.shape[-1]),
        query.new_empty(num_heads, num_tokens, dtype=torch.float32),
    )


@torch.library.custom_op("trl_packing::document_attention_backward", mutates_args=())
def _backward_op(
    grad: Tensor,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    output: Tensor,
    lse: Tensor,
    cu_seqlens: Tensor,
    cu_seqlens_k: Tensor | None,
    key_index: Tensor | None,
    sinks: Tensor | None,
    seed: Tensor | None,
    scale: float,
    window: int,
    softcap: float,
    dropout: float,
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the gradients of query, key, value and sinks (without sinks: empty), in their shapes.

    `grad` and `output` are ``(T, heads, value_dim)``, `lse` is ``(heads, T)`` float32.
    """
    options = KernelOptions(scale, window, softcap, None, dropout)
    # Fresh pages cost as much as the arithmetic: fill with zeros only if tiles overlap and add up.
    keys = prefix_keys(cu_seqlens_k, key_index)
    overlap = bool(window) or tiles.needs_scores(query, options) or keys is not None
    d_query = query.new_empty(query.shape)
    d_key, d_value = (
        x.new_zeros(x.shape) if overlap else x.new_empty(x.shape) for x in (key, value)
    )
    generator = tiles.generator_from_seed(seed, query.device)
    backward = tiles.fused_backward
    if tiles.needs_scores(query, options):
        backward = tiles.scored_backward
    for tile in tiles.cut_tiles(cu_seqlens, options, query, keys):
        rows = slice(tile.q0, tile.q1)
        q, k, v = tiles.split_by_kv_head(query, key, value, tile)
        g, o = (tiles.split_by_group(x[rows], k.shape[0]) for x in (grad, output))
        tile_lse = lse[:, rows].unflatten(0, q.shape[:2])
        dq, dk, dv = backward(g, q, k, v, o, tile_lse, tile, options, generator)
        dq = dq.flatten(0, 1).transpose(0, 1)
        d_query[rows].add_(dq) if tile.merges else d_query[rows].copy_(dq)
        for total, part in ((d_key, dk), (d_value, dv)):
            part = (part.sum(1) if part.shape[1] > 1 else part[:, 0]).transpose(0, 1)
            seen = total[tile.k0 : tile.k1]
            seen.add_(part) if overlap else seen.copy_(part)
    if sinks is None:
        return d_query, d_key, d_value, query.new_empty(0)
    return d_query, d_key, d_value, gradient_of_sinks(grad, output, lse, sinks)


@_backward_op.register_fake
def _(grad, query, key, value, output, lse, cu_seqlens, cu_seqlens_k, key_index, sinks, *_others):
    d_sinks = query.new_empty(0) if sinks is None else torch.empty_like(sinks)
    return (*(x.new_empty(x.shape) for x in (query, key, value)), d_sinks)


def _setup_context(ctx, inputs, output):
    query, key, value, *rest = inputs
    *rest, scale, window, softcap, dropout = rest
    ctx.options = (scale, window, softcap, dropout)
    ctx.save_for_backward(query, key, value, *output, *rest)


def _autograd_backward(ctx, grad, _grad_lse):
    saved = ctx.saved_tensors  # once: gradient checkpointing computes them on this access
    sinks = saved[-2]
    *gradients, d_sinks = torch.ops.trl_packing.document_attention_backward(
        grad, *saved, *ctx.options
    )
    d_sinks = None if sinks is None else d_sinks
    return *gradients, None, None, None, d_sinks, None, None, None, None, None


_forward_op.register_autograd(_autograd_backward, setup_context=_setup_context)


register_packed_kernel(NAME, document_attention)
