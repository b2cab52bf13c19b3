"""The attention backends, and the choice of the fastest one that can be exact on a model.

    flash_attn.py, varlen.py      kernels over boundaries, on CUDA in bf16 and fp16
    document_sdpa.py              one document after another: anywhere, any dtype
    (native), block_mask.py       a mask T×T, from position_ids or as input
    recurrent.py                  modules that mix documents run on one after another
    padded_rows.py                padded forwards of the same documents: any model

Only faults that a trial misses are refused here; the isolation check finds the others on the model.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from math import gcd
from typing import Any

import torch
from torch import nn

# Importing document_sdpa registers `torch.ops.trl_packing`.
from trl_packing.attention import (
    block_mask,
    document_sdpa,
    flash_attn,
    padded_rows,
    recurrent,
    varlen,
)
from trl_packing.attention.interface import implementation_name
from trl_packing.attention.model_facts import (
    PACKED_NAMES,
    current_implementation,
    invokes_adapter,
    layer_values,
    native_implementation,
    text_config,
    unwrap_peft,
)

__all__ = ["AttentionChoice", "resolve_attention"]

PADDED = (padded_rows.NAME, padded_rows.EQUAL_LENGTHS)  # shapes follow the documents there

# Backends after the kernels, from the fastest to the most general one.
NATIVE_ATTENTION = ("model", block_mask.NAME, recurrent.NAME, *PADDED)

CHOICES = ("auto", *flash_attn.VERSIONS, "varlen", "documents", *NATIVE_ATTENTION)

_TITLES = {
    "varlen": "torch varlen FlashAttention",
    "documents": "document-wise SDPA",
    "model": "the model's own, masked by position_ids",
    block_mask.NAME: "the model's own, under an explicit 4-D mask",
    recurrent.NAME: "document-wise recurrent modules",
    padded_rows.NAME: "padded rows",
    padded_rows.EQUAL_LENGTHS: "rows of equal length",
}


@dataclass(frozen=True)
class AttentionChoice:
    """The backend that computes attention in packed batches.

    Attributes:
        backend: one of `CHOICES` but ``"auto"``.
        implementation: the `attn_implementation` to set on the model; None: its native one.
        reason: why this backend was chosen, in a few words.
        native: the `attn_implementation` that the model came with.
        slower: the backends to try when this one fails the isolation check, from fast to slow.
        num_ranks: over which rows are divided.
    """

    backend: str
    implementation: str | None
    reason: str
    native: str | None = field(default=None, compare=False, repr=False)
    slower: tuple["AttentionChoice", ...] = field(default=(), compare=False, repr=False)
    num_ranks: int = field(default=1, compare=False, repr=False)

    def __str__(self) -> str:
        return f"{_TITLES.get(self.backend, self.backend)} ({self.reason})"


def resolve_attention(
    model: nn.Module,
    attention: str = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """Return the fastest attention backend that keeps packed documents apart on `model`.

    Args:
        model: it is not changed.
        attention: ``"auto"`` or a backend: ``"flash_attention_2"`` (3, 4), ``"varlen"``,
            ``"documents"``; or one that leaves the model its native implementation: ``"model"``
            (masked by position_ids), ``"mask"`` (with an explicit 4-D mask), ``"padded"`` (the
            same documents as padded rows), ``"equal_lengths"`` (the same without padding). In
            ``"by_document"``, modules that mix documents see them one by one; the isolation check
            finds them.
        device: device of the forward pass; by default the model's.
        dtype: dtype of the forward pass (under autocast, autocast's); by default the model's.

    Raises:
        ValueError: `attention` is unknown, or names a backend that cannot be exact on this model.
    """
    check_is_backend(attention)
    parameter = next(model.parameters(), torch.empty(0))
    kind = torch.device(device or parameter.device).type
    dtype = dtype or parameter.dtype
    native = native_implementation(model)
    refused = refusals(model, device=kind, dtype=dtype)
    if attention == "auto":
        runs_in = f"{kind}, {str(dtype).removeprefix('torch.')}"
        is_bf16 = kind == "cuda" and dtype == torch.bfloat16
        if is_bf16 and torch.cuda.get_device_capability() < (8, 0):
            # SDPA has no memory-efficient kernel for bf16 there, either.
            runs_in += f"; bf16 is emulated on {torch.cuda.get_device_name()}: fp16=True is faster"
        choices = _choices_that_fit(model, refused, runs_in)
        if states := recurrent.describe(model, kind):
            choices = [replace(choice, reason=f"{choice.reason}; {states}") for choice in choices]
        last = choices[-1].backend
        after = NATIVE_ATTENTION.index(last) + 1 if last in NATIVE_ATTENTION else 0
        for name in NATIVE_ATTENTION[after:]:
            kernel = choices[0].implementation if name == recurrent.NAME else None
            choices.append(AttentionChoice(name, kernel, ""))
        first, *slower = (replace(choice, native=native) for choice in choices)
        return replace(first, slower=tuple(slower))
    if refused[attention]:
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: "
            f"{refused[attention]}; set attention='auto'"
        )
    reason = f"attention={attention!r}"
    return AttentionChoice(attention, _implementation(model, attention), reason, native)


def divide_rows(
    model: Any, choices: Sequence[AttentionChoice], num_ranks: int
) -> list[AttentionChoice]:
    """Return those of `choices` that take rows divided over `num_ranks`; PEFT may wrap `model`.

    Raises:
        ValueError: none does, or the heads of `model` cannot be divided.
    """
    base = unwrap_peft(model)
    name = type(base).__name__
    setting = f"sequence_parallel_size={num_ranks}"
    counts = layer_values(text_config(base), "num_attention_heads")
    if undivided := [number for number in counts if number % num_ranks]:
        raise ValueError(
            f"{setting} does not divide the {undivided[0]} attention heads of {name}; set it to "
            f"a divisor of {gcd(*counts)}"
        )
    kernels = [choice for choice in choices if choice.backend not in NATIVE_ATTENTION]
    reason = f"it runs by {choices[0]}"
    if recurrent.take_documents(base):
        kernels = []
        reason = "its recurrent layers carry a state along the row"
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        kernels = []
        reason = "virtual tokens stand in front of each row"
    if not kernels:
        raise ValueError(
            f"{setting} needs attention over boundaries alone, and {name} cannot be divided: "
            f"{reason}; set sequence_parallel_size=1"
        )
    return [replace(choice, num_ranks=num_ranks) for choice in kernels]


def check_is_backend(attention: str) -> None:
    """Raise ValueError if `attention` is neither a backend nor ``"auto"``."""
    if attention not in CHOICES:
        raise ValueError(f"attention={attention!r} is unknown; choose one of {', '.join(CHOICES)}")


def _implementation(model: Any, backend: str) -> str | None:
    ours = {"varlen": varlen.NAME, "documents": document_sdpa.NAME}
    if backend in ours:
        is_eager = str(current_implementation(model)).endswith("eager")
        return implementation_name(ours[backend], "eager" if is_eager else "sdpa")
    if backend == recurrent.NAME and outside_interface(model) is None:
        return _implementation(model, "documents")
    return None if backend in NATIVE_ATTENTION else backend


def _choices_that_fit(
    model: Any, refused: dict[str, str | None], runs_in: str
) -> list[AttentionChoice]:
    """Return the kernels that may be exact on `model`, from fast to slow, or its own attention."""
    if only := _only_exact(model):
        return [only]
    current = str(current_implementation(model))
    capability = torch.cuda.get_device_capability() if torch.cuda.is_available() else None
    installed = flash_attn.installed()
    flash = [name for name in flash_attn.versions_for(capability) if name in installed]
    kernels = []
    if flash_attn.is_flash_attention(current):
        if flash_attn.drops_sinks(current) and _has_sinks(model):
            raise ValueError(
                f"attn_implementation={current!r} silently drops this model's attention sinks; "
                "load it with attn_implementation='eager', or set attention='documents'"
            )
        kernels = [AttentionChoice(current, None, "the model was loaded with it")]
        flash = []
    elif current not in ("None", "sdpa", "eager") and current not in PACKED_NAMES:
        return [AttentionChoice("model", None, f"the model was loaded with {current!r}")]
    reasons = {"varlen": "no flash-attn package needed", "documents": runs_in}
    kernels += [
        AttentionChoice(name, _implementation(model, name), reasons.get(name, "installed"))
        for name in (*flash, "varlen", "documents")
        if refused[name] is None
    ]
    return kernels or [AttentionChoice("model", None, str(refused["documents"]))]


def refusals(model: Any, *, device: Any, dtype: torch.dtype) -> dict[str, str | None]:
    """Return why each backend cannot be exact on `model`, by name, from fast to slow; None: it can.

    `model` may be on the meta device; `device` and `dtype` are those of the forward pass.
    """
    if only := _only_exact(model):
        return {name: None if name == only.backend else only.reason for name in CHOICES[1:]}
    outside = outside_interface(model)
    reason = outside or _no_kernels(device, dtype)
    found: dict[str, str | None] = dict.fromkeys(CHOICES[1:])
    fields = ("attention_dropout", "attn_pdrop", "attention_probs_dropout_prob")
    dropout = [p for name in fields for p in layer_values(text_config(model), name)]
    for name in (*flash_attn.VERSIONS, "varlen", "documents"):
        found[name] = outside if name == "documents" else reason
        # Without an argument for dropout, transformers skips it with a warning.
        if found[name] is None and any(dropout) and name != "flash_attention_2":
            found[name] = f"{name} has no dropout and the model sets {max(dropout)}"
        elif found[name] is None and flash_attn.drops_sinks(name) and _has_sinks(model):
            found[name] = f"{name} has no attention sinks"
    widths = layer_values(text_config(model), "head_dim")
    if found["varlen"] is None and min(widths, default=0) > varlen.WIDEST:
        found["varlen"] = f"all heads are wider than {varlen.WIDEST}"  # it would run none of them
    return found


def _no_kernels(device: Any, dtype: torch.dtype) -> str | None:
    """Return why kernels of GPUs cannot run, or None."""
    kind = torch.device(device).type
    if kind != "cuda":
        return f"the device is {kind}"
    if dtype not in (torch.bfloat16, torch.float16):
        return f"the dtype is {dtype}"
    if torch.cuda.get_device_capability() < (8, 0):
        return f"{torch.cuda.get_device_name()} is older than sm80"
    return None


def _only_exact(model: Any) -> AttentionChoice | None:
    """Return the only exact backend of a model that reads a row as one document, or None.

    A check may miss both: an index over blocks of the row changes its choice for some contents
    (transformers 5.24), and an untrained aLoRA adapter computes nothing (peft 0.21).
    """
    if invokes_adapter(model):
        return AttentionChoice(
            padded_rows.NAME,
            None,
            "alora_invocation_tokens activate the adapter once in each row",
        )
    text = text_config(model)
    for name in ("index_topk_blocks", "indexer_budget"):
        if size := max(layer_values(text, name), default=0):
            return AttentionChoice(
                padded_rows.EQUAL_LENGTHS,
                None,
                f"{name}={size} ranks blocks of the whole row",
            )
    return None


def outside_interface(model: nn.Module) -> str | None:
    """Return why a registered kernel cannot replace the model's attention, or None."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} is outside transformers' attention interface"
    # A kernel that sees boundaries alone would skip chunks, and an index would rank all keys.
    for name in ("attention_chunk_size", "index_topk"):
        if size := max(layer_values(text_config(model), name), default=0):
            return f"{name}={size} needs the mask"
    return None


def _has_sinks(model: nn.Module) -> bool:
    return any(name.endswith("sinks") for name, _ in model.named_parameters())
