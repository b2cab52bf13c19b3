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
        model: the model whose sinks, soft-cap and dropout decide; it is not changed.
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
    parameter = next(model.parameters(), torch.empty(0))
    kind, dtype = torch.device(device or parameter.device).type, dtype or parameter.dtype
    native = native_implementation(model)
    if attention == "auto":
        choices = _choices_that_fit(model, kind, dtype)
        first, *slower = (replace(choice, native=native) for choice in choices)
        return replace(first, slower=tuple(slower))
    if refusal := _refusal(model, attention, kind, dtype):
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: {refusal}; "
            "set attention='auto'"
        )
    reason = f"attention={attention!r}"
    return AttentionChoice(attention, _implementation(model, attention), reason, native)


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
    kind = torch.device(device).type
    return {name: _refusal(model, name, kind, dtype) for name in CHOICES[1:]}


def _implementation(model: Any, backend: str) -> str | None:
    """Return the `attn_implementation` to set for `backend`, None for the native one."""
    ours = {"varlen": varlen.NAME, "documents": document_sdpa.NAME}
    if backend in ours:
        is_eager = str(current_implementation(model)).endswith("eager")
        return implementation_name(ours[backend], "eager" if is_eager else "sdpa")
    return None if backend in NATIVE_ATTENTION else backend


def _only_exact(model: Any) -> AttentionChoice | None:
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


def _choices_that_fit(model: Any, device: str, dtype: torch.dtype) -> list[AttentionChoice]:
    """Return the kernels that may be exact on `model`, from fast to slow, or its own attention."""
    if only := _only_exact(model):
        return [only]
    current = str(current_implementation(model))
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    installed = flash_attn.installed()
    flash = [name for name in flash_attn.versions_for(capability) if name in installed]
    kernels, is_loaded = [], flash_attn.is_flash_attention(current)
    if is_loaded:
        if flash_attn.drops_sinks(current) and _has_sinks(model):
            raise ValueError(
                f"attn_implementation={current!r} silently drops this model's attention sinks; "
                "load the model with attn_implementation='eager' or set attention='documents'"
            )
        kernels, flash = [AttentionChoice(current, None, "the model was loaded with it")], []
    elif current not in ("None", "sdpa", "eager") and not is_packed_implementation(current):
        return [AttentionChoice("model", None, f"the model was loaded with {current!r}")]
    reasons = {
        "varlen": "no flash-attn package needed",
        "documents": f"{device}, {str(dtype).removeprefix('torch.')}",
    }
    kernels += [
        AttentionChoice(name, _implementation(model, name), reasons.get(name, "installed"))
        for name in (*flash, "varlen", "documents")
        if _refusal(model, name, device, dtype) is None
    ]
    return kernels or [AttentionChoice("model", None, str(outside_interface(model)))]


# --- why a kernel is refused ----------------------------------------------------------------------


def outside_interface(model: nn.Module) -> str | None:
    """Return why a registered kernel cannot replace the model's attention, or None."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} is outside transformers' attention interface"
    chunks = [size for size in layer_values(text_config(model), "attention_chunk_size") if size]
    # Chunks exist only in the mask; a kernel that sees boundaries alone would skip them.
    return f"attention_chunk_size={max(chunks)} lives in the mask" if chunks else None


def _refusal(model: Any, name: str, device: str, dtype: torch.dtype) -> str | None:
    """Return why backend `name` cannot be exact on `model`, in any of its layers, or None."""
    if only := _only_exact(model):
        return None if name == only.backend else only.reason
    if name in NATIVE_ATTENTION:
        return None
    reason = outside_interface(model)
    if reason or name == "documents":
        return reason
    if device != "cuda":
        return f"the device is {device}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {dtype}"
    if not torch.cuda.is_available():
        return "no CUDA device"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm80"
    text = text_config(model)
    softcap = any(layer_values(text, "attn_logit_softcapping"))
    dropout = max(map(float, layer_values(text, "attention_dropout", "attn_pdrop")), default=0.0)
    if softcap and (name == "varlen" or dropout):
        return f"{name} has no soft-cap" + " with dropout" * (name != "varlen")
    # Without an argument for dropout, transformers skips it with a warning.
    if dropout and name != "flash_attention_2":
        return f"{name} has no dropout and the model sets {dropout}"
    if name == "varlen":
        return None
    if flash_attn.drops_sinks(name) and _has_sinks(model):
        return f"{name} has no attention sinks"
    # transformers would not set `name`, or would set another version.
    for part in model.modules():
        if getattr(part, "config", None) is not text:
            continue
        if not getattr(part, "_supports_flash_attn", True):
            return f"{type(part).__name__} does not support FlashAttention in transformers"
        compatible = getattr(part, "_compatible_flash_implementations", None)
        if compatible is not None and name not in compatible:
            return f"{type(part).__name__} takes {', '.join(compatible)} instead of {name}"
    return None


def _has_sinks(model: nn.Module) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())
