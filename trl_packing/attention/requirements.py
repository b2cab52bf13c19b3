"""Properties of a model that decide which kernel can compute its attention, and the refusals.

A refusal is the reason, in a few words, why a kernel cannot be exact on a model; None if it can.
Only faults that a trial misses are refused here: a kernel that leaves something out without a word,
or one of training alone, such as dropout. The isolation check finds the others (head sizes, GPUs
without a kernel, soft-caps without a backward), and the next backend is taken.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_packing.attention.flash_attn import drops_sinks
from trl_packing.models.introspection import layer_values, text_config


@dataclass(frozen=True)
class Requirements:
    """Everything that a kernel must handle to be exact on a model, in all of its layers.

    Attributes:
        device: type of the device, such as ``"cuda"``.
        dtype: dtype of query, key and value.
        softcap: whether scores are soft-capped.
        sinks: whether heads have learned attention sinks.
        dropout: largest dropout probability of attention weights, in [0, 1].
        outside_interface: why registered kernels cannot replace the model's attention; None if
            they can.
    """

    device: str
    dtype: torch.dtype
    softcap: bool
    sinks: bool
    dropout: float
    outside_interface: str | None


def requirements_of(model: nn.Module, device: Any, dtype: torch.dtype | None) -> Requirements:
    """Return the requirements of `model`, by default on its device and in its dtype."""
    parameter = next(model.parameters(), None)
    found = parameter.device if parameter is not None else torch.device("cpu")
    text = text_config(model)
    return Requirements(
        device=torch.device(device or found).type,
        dtype=dtype or (parameter.dtype if parameter is not None else torch.float32),
        softcap=any(layer_values(text, "attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        dropout=max(map(float, layer_values(text, "attention_dropout", "attn_pdrop")), default=0.0),
        outside_interface=outside_interface(model),
    )


def outside_interface(model: nn.Module) -> str | None:
    """Return why a registered kernel cannot replace the model's attention, or None."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} is outside transformers' attention interface"
    chunks = [size for size in layer_values(text_config(model), "attention_chunk_size") if size]
    if chunks:
        # Chunks exist only in the mask; a kernel that sees boundaries alone would skip them.
        return f"attention_chunk_size={max(chunks)} lives in the mask"
    return None


def flash_refusal(model: Any, needs: Requirements, name: str) -> str | None:
    """Return why flash-attn version `name` cannot be exact on `model`, or None."""
    if reason := _half_precision_refusal(needs):
        return reason
    if needs.sinks and drops_sinks(name):
        return f"{name} has no attention sinks"
    if needs.dropout and not name.endswith("2"):
        # transformers only warns, and skips dropout, if the kernel has no such argument.
        return f"{name} has no dropout and the model sets {needs.dropout}"
    if needs.dropout and needs.softcap:
        return f"{name} has no soft-cap with dropout, and the model sets {needs.dropout}"
    return _transformers_refusal(model, name)


def _transformers_refusal(model: Any, name: str) -> str | None:
    """Return why transformers would not set `name` on `model`, or would set another version."""
    text = text_config(model)
    for part in model.modules():
        if getattr(part, "config", None) is not text:
            continue
        if not getattr(part, "_supports_flash_attn", True):
            return f"{type(part).__name__} does not support FlashAttention in transformers"
        compatible = getattr(part, "_compatible_flash_implementations", None)
        if compatible is not None and name not in compatible:
            return f"{type(part).__name__} takes {', '.join(compatible)} instead of {name}"
    return None


def varlen_refusal(needs: Requirements) -> str | None:
    """Return why PyTorch's varlen attention cannot be exact on a model, or None."""
    if needs.softcap:
        return "torch varlen has no soft-cap"
    if needs.dropout:
        return f"torch varlen has no dropout and the model sets {needs.dropout}"
    return _half_precision_refusal(needs)


def _half_precision_refusal(needs: Requirements) -> str | None:
    if needs.outside_interface:
        return needs.outside_interface
    if needs.device != "cuda":
        return f"the device is {needs.device}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {needs.dtype}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm80"
    return None
