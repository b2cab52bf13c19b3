"""Which attention keeps the documents of a packed row apart on this model and device, and why.

    flash_attn.py       flash-attn 4/3/2 if installed            CUDA, bf16/fp16
    torch_varlen.py     PyTorch's varlen FlashAttention          CUDA from sm80, bf16/fp16
    document_sdpa.py    document-wise SDPA                       anywhere, any dtype
    (the model's own)   its mask from position_ids: T×T          models outside the interface
    explicit_mask.py    a block-diagonal mask given to it: T×T   models that ignore position_ids
    padded_rows.py      padded forwards of the same documents    any model

`resolve_attention` chooses and changes nothing; `install_attention` sets the choice on the model.
Neither is trusted: the isolation check runs on the result before the first step (`gate.py`).
"""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

import torch
from torch import nn

from trl_packing.attention import block_mask as explicit_mask
from trl_packing.attention import document_sdpa, flash_attn, padded_rows
from trl_packing.attention import varlen as torch_varlen
from trl_packing.attention.implementation import (
    InstalledName,
    current_implementation,
    restore_implementation,
    set_implementation,
)
from trl_packing.attention.interface import (
    announce_boundaries,
    implementation_name,
    mark_packed_calls,
    pass_packed_calls,
    unwrap_packed_calls,
)
from trl_packing.attention.kernel_backward import run_backward_once
from trl_packing.models.introspection import (
    layer_configs,
    layer_values,
    rope_thresholds,
    text_config,
    unwrap_peft,
)

__all__ = [
    "AttentionChoice",
    "install_attention",
    "resolve_attention",
    "use_attention",
    "use_native_attention",
]

# Ways that leave the model its own attention, from the fastest to the one that takes any model.
PADDED = (padded_rows.NAME, padded_rows.EQUAL_LENGTHS)  # shapes follow the documents there
NATIVE_ATTENTION = ("model", explicit_mask.NAME, *PADDED)

_OURS = (document_sdpa.NAME, torch_varlen.NAME)

CHOICES = ("auto", *flash_attn.VERSIONS, "varlen", "documents", *NATIVE_ATTENTION)


@dataclass(frozen=True)
class AttentionChoice:
    """What computes attention in packed batches.

    backend: one of `CHOICES` but ``"auto"``.
    implementation: the `attn_implementation` to set on the model; None leaves it as it is.
    reason: why, in a few words.
    native: the `attn_implementation` that the model came with; backends without one set it back.
    slower: kernels that fit the model too, from fast to slow, for when this one fails the check.
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
    explicit_mask.NAME: "the model's own, under an explicit 4-D mask",
    padded_rows.NAME: "padded rows",
    padded_rows.EQUAL_LENGTHS: "rows of equal length",
}


@dataclass(frozen=True)
class _Needs:
    """What a kernel must handle to be exact on a model, in all of its layers.

    head_sizes: every pair of the sizes of a key and of a value.
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
        """The largest of any layer."""
        return max(max(sizes) for sizes in self.head_sizes)


def resolve_attention(
    model: nn.Module,
    attention: str = "auto",
    *,
    device: torch.device | str | None = None,
    dtype: torch.dtype | None = None,
) -> AttentionChoice:
    """Return the fastest attention that keeps packed documents apart on `model`.

    model: asked for its head sizes, sinks, soft-cap and dropout; nothing on it is changed.
    attention: ``"auto"`` or a name: ``"flash_attention_2"`` (3, 4), ``"varlen"``, ``"documents"``;
        or one that leaves the model its own implementation: ``"model"`` (masked by position_ids),
        ``"mask"`` (under an explicit 4-D mask), ``"padded"`` (the same documents as padded rows),
        ``"equal_lengths"`` (the same without padding).
    device, dtype: of the forward pass (under autocast, autocast's dtype); by default the model's.

    Raises ValueError if `attention` is unknown, or is named and cannot be exact on this model.
    """
    if attention not in CHOICES:
        raise ValueError(
            f"attention={attention!r} is not known; choose one of {', '.join(CHOICES)}"
        )
    needs = _needs(model, device, dtype)
    native = _native_implementation(model)
    indexed = _indexed(model)
    if attention == "auto":
        choice = indexed or _automatic(model, needs)
        slower = tuple(replace(kernel, native=native) for kernel in choice.slower)
        return replace(choice, native=native, slower=slower)
    if indexed is not None and attention != indexed.backend:
        raise ValueError(
            f"attention={attention!r} cannot be exact on {type(model).__name__}: {indexed.reason}; "
            f"set attention='auto' or {indexed.backend!r}"
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


def _kernels(model: Any, needs: _Needs) -> dict[str, tuple[str | None, str, str]]:
    """Return of every kernel, from fast to slow: why it cannot be exact, its name, why to take it.

    The name is the `attn_implementation` to set.
    """
    current = current_implementation(model)
    fallback = "eager" if current is not None and current.endswith("eager") else "sdpa"
    flash = {
        name: (_flash_refusal(model, needs, name), name, "installed")
        for name in flash_attn.VERSIONS
    }
    return flash | {
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


def install_attention(model: Any, choice: AttentionChoice) -> None:
    """Set `choice` on a transformers model, in place of what was installed before.

    `model` may be wrapped by PEFT. Calls that are not packed stay as they were.
    """
    base = unwrap_peft(model)
    # The backbone builds the masks, and a fused LM head calls it without `base.forward`.
    backbone = getattr(base, "base_model", base)
    if type(backbone).__name__.endswith("DecoderWrapper"):  # bart and its kin call past it
        backbone = backbone.decoder
    for module in (model, base, backbone):
        unwrap_packed_calls(module)
    set_implementation(base, choice.implementation or choice.native or _native_implementation(base))
    if choice.backend == explicit_mask.NAME:
        explicit_mask.mask_packed_calls(backbone)
    elif choice.backend in PADDED:
        whole = _whole_model(model, base)
        for padded in (backbone, whole) if whole else (backbone,):
            padded_rows.pad_packed_calls(
                padded,
                thresholds=rope_thresholds(base),
                equal_lengths=choice.backend == padded_rows.EQUAL_LENGTHS,
            )
        if whole:
            return
    elif choice.backend in ("documents", "varlen"):
        mark_packed_calls(backbone, choice.implementation)
    else:
        pass_packed_calls(backbone, choice.implementation)
    if backbone is not base:
        announce_boundaries(base, choice.implementation)


def _whole_model(model: Any, base: Any) -> Any:
    """Return the model that must see padded rows as a whole, or None if its backbone can."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return model  # puts virtual tokens in front of every row
    return base if getattr(base.forward, "scores_native_logits", False) else None


@contextmanager
def use_native_attention(model: Any) -> Iterator[None]:
    """Run `model` with the attention that it had before one of ours was installed.

    Some models ask for its name (``if implementation == "sdpa"``) and compute something else with
    ours, packed or not.
    """
    installed = current_implementation(model)
    restore_implementation(model)
    set_implementation(model, _native_implementation(model))
    try:
        yield
    finally:
        set_implementation(model, installed)


@contextmanager
def use_attention(model: Any, choice: AttentionChoice) -> Iterator[None]:
    """Set the `attn_implementation` of `choice`, and give the model's back in the end.

    Outside, packed calls set it by themselves. Inside another one, it stays.
    """
    base = unwrap_peft(model)
    is_inside = isinstance(current_implementation(base), InstalledName)
    set_implementation(base, choice.implementation)
    try:
        yield
    finally:
        if not is_inside:
            restore_implementation(base)


@contextmanager
def check_backward(model: Any, *, training: bool | None) -> Iterator[list[str]]:
    """Run one small backward in what calls `model`, if it trains by a kernel that is not ours.

    Yields what is wrong with it, empty as long as nothing is.
    """
    implementation = current_implementation(unwrap_peft(model)) or ""
    is_foreign = flash_attn.is_flash_attention(implementation) or implementation.startswith(
        torch_varlen.NAME
    )
    trains = unwrap_peft(model).training if training is None else training
    if is_foreign and trains:
        with run_backward_once(implementation) as faults:
            yield faults
    else:
        yield []


def _native_implementation(model: Any) -> str | None:
    """Return the `attn_implementation` that the model had before one of ours."""
    current = current_implementation(model)
    if isinstance(current, InstalledName):
        return current.native
    if current is None or not current.startswith(_OURS):
        return current
    return "eager" if current.endswith("eager") else "sdpa"  # loaded with ours


def _indexed(model: Any) -> AttentionChoice | None:
    """Return rows of equal length for sparse attention that chooses its keys by an index.

    The index ranks the keys of the whole row. Other documents, and padding, change the choice for
    some contents only, which a check on a few documents may miss (transformers 5.23).
    """
    text = text_config(model)
    for name in ("index_topk", "index_topk_blocks", "indexer_budget"):
        if sizes := [size for size in layer_values(text, name) if size]:
            reason = f"{name}={max(sizes)} ranks the keys of the whole row"
            return AttentionChoice(padded_rows.EQUAL_LENGTHS, None, reason)
    return None


def _automatic(model: Any, needs: _Needs) -> AttentionChoice:
    """Return the fastest kernel that can be exact on `model`, with those that come after it."""
    current = current_implementation(model)
    installed = flash_attn.installed()
    kernels = [
        AttentionChoice(backend, implementation, reason)
        for backend, (refusal, implementation, reason) in _kernels(model, needs).items()
        if refusal is None and (backend in installed or backend not in flash_attn.VERSIONS)
    ]
    if flash_attn.is_flash_attention(current):
        if needs.sinks and flash_attn.drops_sinks(str(current)):
            raise ValueError(
                f"attn_implementation={current!r} drops this model's attention sinks in "
                "silence; load the model with attn_implementation='eager' or set "
                "attention='documents'"
            )
        loaded = AttentionChoice(str(current), None, "the model was loaded with it")
        kernels = [loaded, *(k for k in kernels if k.backend not in flash_attn.VERSIONS)]
    elif current not in (None, "sdpa", "eager") and not str(current).startswith(_OURS):
        return AttentionChoice("model", None, f"the model was loaded with {current!r}")
    if not kernels:
        return AttentionChoice("model", None, str(needs.outside_interface))
    return replace(kernels[0], slower=tuple(kernels[1:]))


def _flash_refusal(model: Any, needs: _Needs, name: str) -> str | None:
    if needs.sinks:
        return "flash-attn has no attention sinks"
    if reason := _half_precision_refusal(needs, flash_attn.MAX_HEAD_DIM):
        return reason
    sizes = needs.head_sizes
    reason = flash_attn.refusal(name, sizes, softcap=needs.softcap, dropout=needs.dropout)
    return reason or _model_refuses_flash(model, name)


def _model_refuses_flash(model: Any, name: str) -> str | None:
    """Return why transformers would not set `name` on `model`, or would set another for it."""
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


def _varlen_refusal(needs: _Needs) -> str | None:
    if needs.softcap:
        return "torch varlen has no soft-cap"
    if needs.dropout:
        return f"torch varlen has no dropout and the model sets {needs.dropout}"
    for key, value in sorted(needs.head_sizes):
        if key % 8 or value != key:
            return f"torch varlen cannot take head_dim {key} with {value}"
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
    text = text_config(model)
    return _Needs(
        device=torch.device(device or found).type,
        dtype=dtype or (parameter.dtype if parameter is not None else torch.float32),
        head_sizes=_head_sizes(model, text),
        softcap=any(layer_values(text, "attn_logit_softcapping")),
        sinks=any(name.endswith("sinks") for name, _ in model.named_parameters()),
        dropout=max(map(float, layer_values(text, "attention_dropout", "attn_pdrop")), default=0.0),
        outside_interface=_outside_interface(model, text),
    )


def _head_sizes(model: nn.Module, text: Any) -> frozenset[tuple[int, int]]:
    """Return every pair of the sizes of a key and of a value, as layers and their configs say.

    Layers may differ (gemma4: 256 with a window, 512 without), and in latent attention keys and
    values do (deepseek_v3: 192 and 128).
    """
    layers = [m for m in model.modules() if hasattr(m, "layer_idx")]
    told = [sizes for part in (*layers, *layer_configs(text)) if (sizes := _sizes(part))]
    if told:
        return frozenset(told)
    # No layer and no config says it.
    heads = max((n for n in layer_values(text, "num_attention_heads") if n), default=1)
    size = max(layer_values(text, "hidden_size"), default=heads) // heads
    return frozenset({(size, size)})


def _sizes(part: Any) -> tuple[int, int] | None:
    """Return what a layer or a config says of the sizes of its keys and values, if anything."""
    # Where there is both, head_dim is that of the rotary part (deepseek_v3).
    key = _first_number(part, "qk_head_dim", "head_dim")
    return None if key is None else (key, _first_number(part, "v_head_dim") or key)


def _first_number(part: Any, *names: str) -> int | None:
    return next((n for name in names if isinstance(n := getattr(part, name, None), int)), None)


def _outside_interface(model: nn.Module, text_config: Any) -> str | None:
    """Return why our kernels cannot take the place of the model's attention, or None."""
    can_set = getattr(type(model), "_can_set_attn_implementation", None)
    if can_set is None or not can_set():
        return f"{type(model).__name__} is outside transformers' attention interface"
    if chunks := [size for size in layer_values(text_config, "attention_chunk_size") if size]:
        # Chunks exist only in the mask; a kernel that sees boundaries alone would skip them.
        return f"attention_chunk_size={max(chunks)} lives in the mask"
    return None
