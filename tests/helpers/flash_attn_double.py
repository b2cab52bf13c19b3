"""A FlashAttention-2 that runs anywhere and keeps what it was handed.

`install(monkeypatch)` lets `attn_implementation="flash_attention_2"` of transformers load without
the package and without a GPU. transformers' own path stays in place down to the kernel; the kernel
computes attention from the boundaries, the scale and the window that it receives.
"""

import torch
import torch.nn.functional as F
from torch import Tensor
from transformers import PreTrainedModel
from transformers import modeling_flash_attention_utils as flash_utils

from helpers.dense import probabilities, visible, weighted_sum
from trl_packing.attention import flash_attn


def pretend_cuda(monkeypatch, installed=(), capability=(9, 0)) -> None:
    """Show a GPU with these versions of flash-attn to `resolve_attention`."""
    monkeypatch.setattr(flash_attn, "installed", lambda: list(installed))
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda *_: "Testla T4")


class _BrokenBackward(torch.autograd.Function):
    """Hand a tensor on, and its gradient as a kernel without a right backward would."""

    @staticmethod
    def forward(ctx, tensor, how):
        ctx.how = how
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx, gradient):
        # As flash_attn/cute does on a GPU that its backward is not written for.
        assert ctx.how != "raises", "Unsupported compute capability. Supported: 9.x, 10.x, 11.x"
        if ctx.how == "returns no numbers":
            return gradient * float("nan"), None
        return (gradient + gradient.mean() if ctx.how == "leaks" else gradient), None


class FlashAttentionDouble:
    """`calls`: the arguments of every call, one dictionary each. The others break it.

    ignores_boundaries: in the forward. backward: what its backward does instead of what it should.
    """

    def __init__(self, backward: str = "") -> None:
        self.calls: list[dict[str, object]] = []
        self.ignores_boundaries = False
        self.backward = backward
        self.sinks: Tensor | None = None  # of the call

    # The name of every parameter matters: transformers passes on what it finds in the signature.
    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        dropout_p: float = 0.0,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        boundaries, longest = (cu_seqlens_q, cu_seqlens_k), (max_seqlen_q, max_seqlen_k)
        self.calls.append({"cu_seqlens": boundaries, "longest": longest, "window": window_size})
        assert not dropout_p
        # The kernel launches blocks for `max_seqlen` queries a document and computes no others. It
        # reads keys wherever the boundaries point.
        for x, cu_seqlens, most in zip((q, k), boundaries, longest, strict=True):
            assert cu_seqlens.dtype == torch.int32
            assert int(cu_seqlens.diff().max()) <= most
            assert int(cu_seqlens[-1]) == len(x)
        assert len(k) == len(v)
        if self.ignores_boundaries:
            boundaries = [cu_seqlens[[0, -1]] for cu_seqlens in boundaries]
        q, k, v = (_BrokenBackward.apply(x, self.backward) for x in (q, k, v))
        if self.backward == "doubles values":
            v = 2 * v - v.detach()
        window = window_size[0] + 1
        if window and self.backward == "window off by one":
            window += 1
        seen = visible(boundaries[0], window, boundaries[1])
        scale = q.shape[-1] ** -0.5 if softmax_scale is None else softmax_scale
        if self.backward == "forgets sinks":
            self.sinks = self.sinks.detach()
        out = weighted_sum(probabilities(q, k, seen, scale, softcap, self.sinks), v)
        if self.backward == "ignores sinks":
            without = weighted_sum(probabilities(q, k, seen, scale, softcap), v)
            out = out.detach() + without - without.detach()
        return out

    def flash_attn_func(self, q: Tensor, k: Tensor, v: Tensor, **options: object) -> Tensor:
        rows, length = q.shape[:2]
        cu_seqlens = F.pad(torch.full((rows,), length).cumsum(0), (1, 0)).to(torch.int32)
        flat = (x.flatten(0, 1) for x in (q, k, v))
        spans = (cu_seqlens, cu_seqlens, length, length)
        return self.flash_attn_varlen_func(*flat, *spans, **options).unflatten(0, (rows, length))


class FlashAttention4Double(FlashAttentionDouble):
    """The same with attention sinks, as in flash_attn.cute of flash-attn-4 4.0.0b36."""

    def flash_attn_varlen_func(
        self,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        cu_seqlens_q: Tensor,
        cu_seqlens_k: Tensor,
        max_seqlen_q: int,
        max_seqlen_k: int,
        softmax_scale: float | None = None,
        causal: bool = False,
        window_size: tuple[int, int] = (-1, -1),
        learnable_sink: Tensor | None = None,
        softcap: float = 0.0,
        deterministic: bool = False,
    ) -> Tensor:
        self.sinks = learnable_sink
        spans = (cu_seqlens_q, cu_seqlens_k, max_seqlen_q, max_seqlen_k)
        options = {"softmax_scale": softmax_scale, "window_size": window_size, "softcap": softcap}
        return super().flash_attn_varlen_func(q, k, v, *spans, causal=causal, **options)


def install(monkeypatch, version: int = 2, backward: str = "") -> FlashAttentionDouble:
    """Make transformers find the double where it looks for `version` of the flash-attn package."""
    double = (FlashAttention4Double if version == 4 else FlashAttentionDouble)(backward)
    padding = (flash_utils._pad_input, flash_utils._unpad_input)
    functions = (double.flash_attn_func, double.flash_attn_varlen_func, None, *padding)
    installed = {"general_availability_check": lambda *args, **kwargs: True}
    entry = flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX[version] | installed
    monkeypatch.setitem(flash_utils.FLASH_ATTENTION_COMPATIBILITY_MATRIX, version, entry)
    monkeypatch.setattr(PreTrainedModel, "_flash_attn_can_dispatch", lambda *args, **kwargs: True)
    monkeypatch.setattr(flash_utils, "_lazy_imports", lambda *args, **kwargs: functions)
    # Loaded once and kept in globals: forget them now, and again in the end.
    kept = "_loaded_implementation _flash_fn _flash_varlen_fn _process_flash_kwargs_fn"
    for name in kept.split():
        monkeypatch.setattr(flash_utils, name, None)
    return double
