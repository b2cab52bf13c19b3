"""Properties of a model that decide which kernel can compute its attention, and the refusals.

A refusal is the reason, in a few words, why a kernel cannot be exact on a model; None if it can.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_packing.attention import flash_attn
from trl_packing.models.introspection import layer_configs, layer_values, text_config


@dataclass(frozen=True)
class Requirements:
    """Everything that a kernel must handle to be exact on a model, in all of its layers.

    Attributes:
        device: type of the device, such as ``"cuda"``.
        dtype: dtype of query, key and value.
        head_sizes: all pairs (size of a key, size of a value) that layers have.
        softcap: whether scores are soft-capped.
        sinks: whether heads have learned attention sinks.
        dropout: largest dropout probability of attention weights, in [0, 1].
        outside_interface: why registered kernels cannot replace the model's attention; None if
            they can.
    """

    device: str
    dtype: torch.dtype
    head_sizes: frozenset[tuple[int, int]]
    softcap: bool
    sinks: bool
    dropout: float
    outside_interface: str | None

    @property
    def head_dim(self) -> int:
        """The largest size of a key or value in any layer."""
        return max(max(sizes) for sizes in self.head_sizes)


def requirements_of(model: nn.Module, device: Any, dtype: torch.dtype | None) -> Requirements:
    """Return the requirements of `model`, by default on its device and in its dtype."""
    parameter = next(model.parameters(), None)
    found = parameter.device if parameter is not None else torch.device("cpu")
    text = text_config(model)
    return Requirements(
        device=torch.device(device or found).type,
        dtype=dtype or (parameter.dtype if parameter is not None else torch.float32),
        head_sizes=_head_sizes(model, text),
        softcap=any(layer_values(text, "attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        dropout=max(map(float, layer_values(text, "attention_dropout", "attn_pdrop")), default=0.0),
        outside_interface=outside_interface(model),
    )


def _head_sizes(model: nn.Module, text: Any) -> frozenset[tuple[int, int]]:
    """Return all pairs of the sizes of a key and a value, from the layers and their configs.

    Layers may differ (gemma4: 256 with a window, 512 without), and so may keys and values in
    latent attention (deepseek_v3: 192 and 128).
    """
    layers = [m for m in model.modules() if hasattr(m, "layer_idx")]
    found = [sizes for part in (*layers, *layer_configs(text)) if (sizes := _sizes(part))]
    if found:
        return frozenset(found)
    heads = max((n for n in layer_values(text, "num_attention_heads") if n), default=1)
    size = max(layer_values(text, "hidden_size"), default=heads) // heads
    return frozenset({(size, size)})


def _sizes(part: Any) -> tuple[int, int] | None:
    """Return the sizes of keys and values that a layer or a config names, if it names any."""
    # If both exist, head_dim is the size of the rotary part (deepseek_v3).
    key = _first_number(part, "qk_head_dim", "head_dim")
    return None if key is None else (key, _first_number(part, "v_head_dim") or key)


def _first_number(part: Any, *names: str) -> int | None:
    return next((n for name in names if isinstance(n := getattr(part, name, None), int)), None)


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


# --- refusals -------------------------------------------------------------------------------------


def flash_refusal(model: Any, needs: Requirements, name: str) -> str | None:
    """Return why flash-attn version `name` cannot be exact on `model`, or None."""
    if needs.sinks:
        return "flash-attn has no attention sinks"
    if reason := _half_precision_refusal(needs, flash_attn.MAX_HEAD_DIM):
        return reason
    sizes = needs.head_sizes
    reason = flash_attn.refusal(name, sizes, softcap=needs.softcap, dropout=needs.dropout)
    return reason or _transformers_refusal(model, name)


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
    for key, value in sorted(needs.head_sizes):
        if key % 8 or value != key:
            return f"torch varlen cannot take head_dim {key} with {value}"
    return _half_precision_refusal(needs, flash_attn.MAX_HEAD_DIM)


def _half_precision_refusal(needs: Requirements, max_head_dim: int) -> str | None:
    if needs.outside_interface:
        return needs.outside_interface
    if needs.device != "cuda":
        return f"the device is {needs.device}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {needs.dtype}"
    if needs.head_dim > max_head_dim:
        return f"head_dim {needs.head_dim} is above {max_head_dim}"
    return None
