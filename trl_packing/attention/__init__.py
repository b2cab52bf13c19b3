"""Which attention keeps the documents of a packed row apart on this model and device, and why.

    flash_attn.py       flash-attn 4/3/2 if installed            CUDA, bf16/fp16
    torch_varlen.py     PyTorch's varlen FlashAttention          CUDA from sm80, bf16/fp16
    document_sdpa.py    document-wise SDPA                       anywhere, any dtype
    (the model's own)   its mask from position_ids: T×T          models outside the interface

`resolve_attention` chooses and changes nothing; `install_attention` sets the choice on the model.
Neither is trusted: the isolation check runs on the result before the first step.
"""

from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from trl_packing.attention import document_sdpa, flash_attn, torch_varlen
from trl_packing.attention.interface import implementation_name, mark_packed_calls

__all__ = ["AttentionChoice", "install_attention", "resolve_attention"]

CHOICES = ("auto", *flash_attn.VERSIONS, "varlen", "documents", "model")


@dataclass(frozen=True)
class AttentionChoice:
    """What computes attention in packed batches.

    `backend` is one of `CHOICES` but ``"auto"``; `implementation` is the `attn_implementation` to
    set on the model, None to leave it as it is; `reason` says in a few words why.
    """

    backend: str
    implementation: str | None
    reason: str

    def __str__(self) -> str:
        return f"{_TITLES.get(self.backend, self.backend)} ({self.reason})"


_TITLES = {
    "varlen": "torch varlen FlashAttention",
    "documents": "document-wise SDPA",
    "model": "the model's own, masked by position_ids",
}


@dataclass(frozen=True)
class _Needs:
    """What a kernel must handle to be exact on a model."""

    device: str
    dtype: torch.dtype
    head_dim: int
    value_dim: int
    softcap: bool
    sinks: bool
    dropout: float
    outside_interface: str | None


def resolve_attention(
    model: nn.Module,
    attention: str = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """Return the fastest attention that keeps packed documents apart on `model`.

    `attention` is ``"auto"`` or a name: ``"flash_attention_2"`` (3, 4), ``"varlen"``,
    ``"documents"``, ``"model"`` (the model's own implementation, with a mask built from
    position_ids). `device` and `dtype` are those of the forward pass (under autocast, autocast's
    dtype); by default the model's.

    Raises ValueError if `attention` is unknown, or is named and cannot be exact on this model.
    """
    if attention not in CHOICES:
        raise ValueError(
            f"attention={attention!r} is not known; choose one of {', '.join(CHOICES)}"
        )
    needs = _needs(model, device, dtype)
    current = getattr(getattr(model, "config", None), "_attn_implementation", None)
    fallback = "eager" if current is not None and current.endswith("eager") else "sdpa"
    candidates = {
        "flash": (_flash_refusal(needs), flash_attn.installed(), "installed"),
        "varlen": (
            torch_varlen.unavailable() or _varlen_refusal(needs),
            implementation_name(torch_varlen.NAME, fallback),
            "no flash-attn package needed",
        ),
        "documents": (
            needs.outside_interface,
            implementation_name(document_sdpa.NAME, fallback),
            f"{needs.device}, {str(needs.dtype).removeprefix('torch.')}",
        ),
    }
    if attention == "auto":
        return _automatic(current, needs, candidates)
    if attention == "model":
        return AttentionChoice("model", None, "attention='model'")
    refusal, implementation, _ = candidates[attention if attention in candidates else "flash"]
    if attention in flash_attn.VERSIONS:
        implementation = attention
    if refusal:
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: {refusal}; "
            "set attention='auto'"
        )
    return AttentionChoice(attention, implementation, f"attention={attention!r}")


def install_attention(model: Any, choice: AttentionChoice) -> None:
    """Set `choice` on a transformers model. Calls that are not packed stay as they were."""
    if choice.implementation is None:
        return
    composite = getattr(model.config, "sub_configs", None)
    if composite and "text_config" in composite:
        model.set_attn_implementation({"text_config": choice.implementation})
    else:
        model.set_attn_implementation(choice.implementation)
    if not flash_attn.is_flash_attention(choice.implementation):
        # On the backbone, which builds the masks: a fused LM head calls it without `model.forward`.
        mark_packed_calls(getattr(model, "base_model", model))


def _automatic(
    current: str | None, needs: _Needs, candidates: dict[str, tuple[str | None, str | None, str]]
) -> AttentionChoice:
    if flash_attn.is_flash_attention(current):
        if needs.sinks and flash_attn.drops_sinks(str(current)):
            raise ValueError(
                f"attn_implementation={current!r} drops this model's attention sinks in "
                "silence; load the model with attn_implementation='eager' or set "
                "attention='documents'"
            )
        return AttentionChoice(str(current), None, "the model was loaded with it")
    ours = (document_sdpa.NAME, torch_varlen.NAME)
    if current not in (None, "sdpa", "eager") and not str(current).startswith(ours):
        return AttentionChoice("model", None, f"the model was loaded with {current!r}")
    for backend, (refusal, implementation, reason) in candidates.items():
        if refusal is None and implementation is not None:
            named = implementation if backend == "flash" else backend
            return AttentionChoice(named, implementation, reason)
    return AttentionChoice("model", None, str(needs.outside_interface))


def _flash_refusal(needs: _Needs) -> str | None:
    if needs.sinks:
        return "flash-attn has no attention sinks"
    return _half_precision_refusal(needs, flash_attn.MAX_HEAD_DIM)


def _varlen_refusal(needs: _Needs) -> str | None:
    if needs.softcap:
        return "torch varlen has no soft-cap"
    if needs.dropout:
        return f"torch varlen has no dropout and the model sets {needs.dropout}"
    if needs.head_dim % 8 or needs.value_dim != needs.head_dim:
        return f"torch varlen cannot take head_dim {needs.head_dim} with {needs.value_dim}"
    return _half_precision_refusal(needs, torch_varlen.MAX_HEAD_DIM)


def _half_precision_refusal(needs: _Needs, max_head_dim: int) -> str | None:
    if needs.outside_interface:
        return needs.outside_interface
    if needs.device != "cuda":
        return f"the device is {needs.device}"
    if needs.dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {needs.dtype}"
    if needs.head_dim > max_head_dim:
        return f"head_dim {needs.head_dim} is above {max_head_dim}"
    return None


def _needs(model: nn.Module, device: Any, dtype: torch.dtype | None) -> _Needs:
    parameter = next(model.parameters(), None)
    found = parameter.device if parameter is not None else torch.device("cpu")
    config: Any = getattr(model, "config", None)
    text = config.get_text_config() if hasattr(config, "get_text_config") else config

    def field(*names: str) -> Any:
        return next((v for n in names if (v := getattr(text, n, None)) is not None), None)

    heads = field("num_attention_heads") or 1
    heads = max(heads) if isinstance(heads, (list, tuple)) else heads
    # Where a model has both, head_dim is that of its rotary part (deepseek_v3).
    head_dim = field("qk_head_dim", "head_dim") or (field("hidden_size") or heads) // heads
    # Layers may have their own (gemma4: 256 with a window, 512 without).
    of_layers = [getattr(m, "head_dim", 0) for m in model.modules() if hasattr(m, "layer_idx")]
    head_dim = max([head_dim, *(d for d in of_layers if isinstance(d, int))])
    return _Needs(
        device=torch.device(device or found).type,
        dtype=dtype or (parameter.dtype if parameter is not None else torch.float32),
        head_dim=int(head_dim),
        value_dim=int(field("v_head_dim") or head_dim),
        softcap=bool(field("attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        dropout=float(field("attention_dropout", "attn_pdrop") or 0.0),
        outside_interface=_outside_interface(model, text),
    )


def _outside_interface(model: nn.Module, text_config: Any) -> str | None:
    """Return why our kernels cannot take the place of the model's attention, or None."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} is outside transformers' attention interface"
    if getattr(text_config, "attention_chunk_size", None):
        # Chunks exist only in the mask; a kernel that sees boundaries alone would skip them.
        return f"attention_chunk_size={text_config.attention_chunk_size} lives in the mask"
    return None
