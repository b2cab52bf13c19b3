"""The attention backends, and the choice of the fastest one that can be exact on a model.

    flash_attn.py       flash-attn 4/3/2 if installed              CUDA, bf16/fp16
    varlen.py           PyTorch's varlen FlashAttention            CUDA from sm80, bf16/fp16
    document_sdpa.py    SDPA on one document after another         anywhere, any dtype
    (native)            the model's mask from position_ids: T×T    models outside the interface
    block_mask.py       a block-diagonal mask as input: T×T        models that ignore position_ids
    padded_rows.py      padded forwards of the same documents      any model

`resolve_attention` chooses and changes nothing; `install_attention` sets the choice on the model.
Neither is trusted: the isolation check runs on the result before the first step.
"""

from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

# Importing document_sdpa registers `torch.ops.trl_packing`.
from trl_packing.attention import block_mask, document_sdpa, flash_attn, padded_rows, varlen
from trl_packing.attention.implementation import (
    current_implementation,
    is_packed_implementation,
    native_implementation,
)
from trl_packing.attention.interface import implementation_name
from trl_packing.attention.requirements import (
    Requirements,
    flash_refusal,
    requirements_of,
    varlen_refusal,
)
from trl_packing.models.introspection import invokes_adapter, layer_values, text_config

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


def _kernels(model: Any, needs: Requirements) -> dict[str, tuple[str | None, str, str]]:
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


def _automatic(model: Any, needs: Requirements) -> AttentionChoice:
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
