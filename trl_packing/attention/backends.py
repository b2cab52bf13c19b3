"""The attention backends, and the choice of the fastest one that can be exact on a model.

    flash_attn.py       flash-attn 4/3/2 if installed              CUDA, bf16/fp16
    varlen.py           PyTorch's varlen FlashAttention            CUDA from sm80, bf16/fp16
    document_sdpa.py    SDPA on one document after another         anywhere, any dtype
    (native)            the model's mask from position_ids: T×T    models outside the interface
    block_mask.py       a block-diagonal mask as input: T×T        models that ignore position_ids
    padded_rows.py      padded forwards of the same documents      any model

`resolve_attention` chooses and changes nothing; `install_attention` sets the choice on the model.
Neither is trusted: the isolation check runs on the result before the first step.

A refusal is the reason, in a few words, why a kernel cannot be exact on a model. Only faults that a
trial misses are refused: a kernel that leaves something out without a word, or one of training
alone, such as dropout. The check finds the others (head sizes, GPUs without a kernel, soft-caps
without a backward), and the next backend is taken.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

# Importing document_sdpa registers `torch.ops.trl_packing`.
from trl_packing.attention import block_mask, document_sdpa, flash_attn, padded_rows, varlen
from trl_packing.attention.interface import implementation_name
from trl_packing.attention.model_facts import (
    current_implementation,
    invokes_adapter,
    is_packed_implementation,
    layer_values,
    native_implementation,
    text_config,
)

__all__ = ["AttentionChoice", "resolve_attention"]

PADDED = (padded_rows.NAME, padded_rows.EQUAL_LENGTHS)  # shapes follow the documents there

# Backends that leave the model its native attention, from the fastest to the most general one.
NATIVE_ATTENTION = ("model", block_mask.NAME, *PADDED)

CHOICES = ("auto", *flash_attn.VERSIONS, "varlen", "documents", *NATIVE_ATTENTION)


@dataclass(frozen=True)
class AttentionChoice:
    """The backend that computes attention in packed batches.

    Attributes:
        backend: one of `CHOICES` but ``"auto"``.
        implementation: the `attn_implementation` to set on the model; None leaves it as it is.
        reason: why this backend was chosen, in a few words.
        native: the `attn_implementation` that the model came with. Backends without an
            implementation restore it.
        slower: other kernels that fit the model, from fast to slow, for when this one fails the
            isolation check.
    """

    backend: str
    implementation: str | None
    reason: str
    native: str | None = field(default=None, compare=False, repr=False)
    slower: tuple["AttentionChoice", ...] = field(default=(), compare=False, repr=False)

    def __str__(self) -> str:
        return f"{_TITLES.get(self.backend, self.backend)} ({self.reason})"


_TITLES = {
    "varlen": "torch varlen FlashAttention",
    "documents": "document-wise SDPA",
    "model": "the model's own, masked by position_ids",
    block_mask.NAME: "the model's own, under an explicit 4-D mask",
    padded_rows.NAME: "padded rows",
    padded_rows.EQUAL_LENGTHS: "rows of equal length",
}


def resolve_attention(
    model: nn.Module,
    attention: str = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """Return the fastest attention backend that keeps packed documents apart on `model`.

    Args:
        model: the model whose head sizes, sinks, soft-cap and dropout decide; it is not changed.
        attention: ``"auto"`` or a backend: ``"flash_attention_2"`` (3, 4), ``"varlen"``,
            ``"documents"``; or one that leaves the model its native implementation: ``"model"``
            (masked by position_ids), ``"mask"`` (with an explicit 4-D mask), ``"padded"`` (the
            same documents as padded rows), ``"equal_lengths"`` (the same without padding).
        device: device of the forward pass; by default the model's.
        dtype: dtype of the forward pass (under autocast, autocast's); by default the model's.

    Raises:
        ValueError: `attention` is unknown, or names a backend that cannot be exact on this model.
    """
    check_is_backend(attention)
    needs = requirements_of(model, device, dtype)
    native = native_implementation(model)
    only = _choice_for_whole_rows(model)
    if attention == "auto":
        choice = only or _automatic(model, needs)
        slower = tuple(replace(kernel, native=native) for kernel in choice.slower)
        return replace(choice, native=native, slower=slower)
    if only is not None and attention != only.backend:
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: {only.reason}; "
            f"set attention='auto' or {only.backend!r}"
        )
    if attention in NATIVE_ATTENTION:
        return AttentionChoice(attention, None, f"attention={attention!r}", native)
    refusal, implementation, _ = _kernels(model, needs)[attention]
    if refusal:
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: {refusal}; "
            "set attention='auto'"
        )
    return AttentionChoice(attention, implementation, f"attention={attention!r}", native)


def check_is_backend(attention: str) -> None:
    """Raise ValueError if `attention` is neither a backend nor ``"auto"``."""
    if attention not in CHOICES:
        raise ValueError(
            f"attention={attention!r} is not known; choose one of {', '.join(CHOICES)}"
        )


def refusals(model: nn.Module, *, device: Any, dtype: torch.dtype) -> dict[str, str | None]:
    """Return why each backend cannot be exact on `model`, by name, from fast to slow; None: it can.

    Args:
        model: as in `resolve_attention`; it may be on the meta device.
        device: device of the forward pass.
        dtype: dtype of the forward pass.
    """
    kernels = _kernels(model, requirements_of(model, device, dtype))
    found = {name: refusal for name, (refusal, _, _) in kernels.items()}
    found |= dict.fromkeys(NATIVE_ATTENTION)
    if (only := _choice_for_whole_rows(model)) is not None:
        found |= {name: only.reason for name in found if name != only.backend}
    return found


def _kernels(model: Any, needs: "Requirements") -> dict[str, tuple[str | None, str, str]]:
    """Return all kernels by backend, from fast to slow.

    Each has three strings: why it cannot be exact on `model` (None if it can), the
    `attn_implementation` to set, and the reason to report if it is chosen.
    """
    current = current_implementation(model)
    fallback = "eager" if current is not None and current.endswith("eager") else "sdpa"
    flash = {
        name: (flash_refusal(model, needs, name), name, "installed") for name in flash_attn.VERSIONS
    }
    return flash | {
        "varlen": (
            varlen_refusal(needs),
            implementation_name(varlen.NAME, fallback),
            "no flash-attn package needed",
        ),
        "documents": (
            needs.outside_interface,
            implementation_name(document_sdpa.NAME, fallback),
            f"{needs.device}, {str(needs.dtype).removeprefix('torch.')}",
        ),
    }


def _choice_for_whole_rows(model: Any) -> AttentionChoice | None:
    """Return the only exact backend of a model that reads a row as one document, or None.

    Sparse attention that chooses its keys by an index ranks those of the whole row. Other
    documents, and padding, change the choice for some contents only (transformers 5.23). An aLoRA
    adapter is active from its last invocation in the row on, and computes nothing before it is
    trained (peft 0.21). A check on a few documents may miss both.
    """
    if invokes_adapter(model):
        reason = "alora_invocation_tokens activate the adapter once in each row"
        return AttentionChoice(padded_rows.NAME, None, reason)
    text = text_config(model)
    for name in ("index_topk", "index_topk_blocks", "indexer_budget"):
        if sizes := [size for size in layer_values(text, name) if size]:
            reason = f"{name}={max(sizes)} ranks the keys of the whole row"
            return AttentionChoice(padded_rows.EQUAL_LENGTHS, None, reason)
    return None


def _automatic(model: Any, needs: "Requirements") -> AttentionChoice:
    """Return the fastest kernel that can be exact on `model`, with the slower ones."""
    current = current_implementation(model)
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    installed = flash_attn.installed()
    names = [name for name in flash_attn.versions_for(capability) if name in installed]
    found = _kernels(model, needs)
    kernels = [
        AttentionChoice(backend, implementation, reason)
        for backend in (*names, "varlen", "documents")
        for refusal, implementation, reason in [found[backend]]
        if refusal is None
    ]
    if flash_attn.is_flash_attention(current):
        if needs.sinks and flash_attn.drops_sinks(str(current)):
            raise ValueError(
                f"attn_implementation={current!r} silently drops this model's attention sinks; "
                "load the model with attn_implementation='eager' or set attention='documents'"
            )
        loaded = AttentionChoice(str(current), None, "the model was loaded with it")
        kernels = [loaded, *(k for k in kernels if k.backend not in flash_attn.VERSIONS)]
    elif current not in (None, "sdpa", "eager") and not is_packed_implementation(current):
        return AttentionChoice("model", None, f"the model was loaded with {current!r}")
    if not kernels:
        return AttentionChoice("model", None, str(needs.outside_interface))
    return replace(kernels[0], slower=tuple(kernels[1:]))


# --- what a model needs, and why a kernel is refused ----------------------------------------------


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
    if needs.sinks and flash_attn.drops_sinks(name):
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
