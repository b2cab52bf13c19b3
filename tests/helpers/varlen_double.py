"""Doubles of PyTorch's FlashAttention ops; the backward rebuilds weights from the log-sum-exp.

As the kernel does: whatever `out` and `lse` it is handed decide the gradients.
"""

import math

import torch

from helpers.dense import visible, weighted_sum


def install(monkeypatch) -> list[tuple]:
    """Put the doubles in place of the ops, and return the arguments of every forward."""
    calls = []

    def scores(query, key, cu_q, cu_k, scale, left, right):
        assert right == 0
        seen = visible(cu_q, None if left < 0 else left + 1, cu_k)
        keys = key.repeat_interleave(query.shape[1] // key.shape[1], 1)
        return (torch.einsum("qhd,khd->hqk", query, keys) * scale).masked_fill(~seen, -math.inf)

    def forward(q, k, v, cu_q, cu_k, max_q, max_k, dropout_p, is_causal, return_debug_mask, *,
                scale, window_size_left, window_size_right):  # fmt: skip
        calls.append((cu_q.tolist(), cu_k.tolist(), max_q, max_k, window_size_left, is_causal))
        assert dropout_p == 0
        assert not return_debug_mask
        assert is_causal == (window_size_left < 0)
        assert len(k) == len(v) == int(cu_k[-1])
        s = scores(q, k, cu_q, cu_k, scale, window_size_left, window_size_right)
        out = weighted_sum(s.softmax(-1), v)
        return out, s.logsumexp(-1), torch.zeros(2), torch.zeros(0), torch.zeros(0)

    def backward(grad, q, k, v, out, lse, cu_q, cu_k, max_q, max_k, dropout_p, is_causal,
                 rng_state, unused, *, scale, window_size_left, window_size_right):  # fmt: skip
        assert grad.is_contiguous()
        kv_heads = k.shape[1]
        group = q.shape[1] // k.shape[1]
        keys, values = (x.repeat_interleave(group, 1) for x in (k, v))
        found = scores(q, k, cu_q, cu_k, scale, window_size_left, window_size_right)
        p = torch.exp(found - lse[..., None]).to(q.dtype)
        received = (grad * out).sum(-1).t()[..., None]
        d_scores = p * (torch.einsum("qhd,khd->hqk", grad, values) - received) * scale
        d_key = torch.einsum("hqk,qhd->khd", d_scores, q).unflatten(1, (kv_heads, group)).sum(2)
        d_value = torch.einsum("hqk,qhd->khd", p, grad).unflatten(1, (kv_heads, group)).sum(2)
        return torch.einsum("hqk,khd->qhd", d_scores, keys), d_key, d_value

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", forward)
    monkeypatch.setattr(torch.ops.aten, "_flash_attention_backward", backward)
    return calls
