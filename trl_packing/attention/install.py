"""Sets an attention backend on a model, and gives the model its native attention back."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing.attention import block_mask, flash_attn, padded_rows, varlen
from trl_packing.attention.backends import PADDED, AttentionChoice
from trl_packing.attention.implementation import (
    InstalledName,
    current_implementation,
    native_implementation,
    restore_implementation,
    set_implementation,
)
from trl_packing.attention.interface import mark_packed_calls
from trl_packing.attention.kernel_backward import run_backward_once
from trl_packing.attention.packed_calls import (
    announce_boundaries,
    pass_packed_calls,
    unwrap_packed_calls,
)
from trl_packing.attention.requirements import outside_interface
from trl_packing.models.introspection import invokes_adapter, rope_thresholds, unwrap_peft


def install_attention(model: Any, choice: AttentionChoice) -> None:
    """Set `choice` on a transformers model, in place of a backend that was installed before.

    Calls that are not packed stay unchanged.

    Args:
        model: a transformers model, which PEFT may wrap.
        choice: the backend, as `resolve_attention` returns it.
    """
    base = unwrap_peft(model)
    # The backbone builds the masks, and a fused LM head calls it without `base.forward`.
    backbone = getattr(base, "base_model", base)
    if type(backbone).__name__.endswith("DecoderWrapper"):  # bart's family calls past it
        backbone = backbone.decoder
    for module in (model, base, backbone):
        unwrap_packed_calls(module)
    set_implementation(base, choice.implementation or choice.native or native_implementation(base))
    if choice.backend == block_mask.NAME:
        block_mask.mask_packed_calls(backbone)
    elif choice.backend in PADDED:
        whole = _model_to_pad(model, base)
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


def take_prefix_keys(model: Any, attention: str) -> str | None:
    """Prepare `model` for rows with shared prefixes; return why it cannot take them, or None.

    Args:
        model: a transformers model, which PEFT may wrap.
        attention: the backend that is installed on it.
    """
    if attention in ("documents", "varlen"):
        return None
    if not flash_attn.is_flash_attention(attention) or attention not in ALL_ATTENTION_FUNCTIONS:
        return f"attention={attention!r} has one set of boundaries for queries and keys"
    if reason := outside_interface(unwrap_peft(model)):
        return reason
    flash_attn.gather_prefix_keys(attention)
    return None


def _model_to_pad(model: Any, base: Any) -> Any:
    """Return the model that must see padded rows as a whole, or None if its backbone can."""
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        return model  # puts virtual tokens in front of every row
    if invokes_adapter(model):
        return model  # PEFT's forward looks for the invocation in every row
    return base if getattr(base.forward, "scores_native_logits", False) else None


@contextmanager
def use_native_attention(model: Any) -> Iterator[None]:
    """Run `model` inside the block with the attention that it had before a packed backend.

    Some models compare the name of their implementation (``if implementation == "sdpa"``) and
    compute something else under a packed one, even in calls that are not packed.
    """
    installed = current_implementation(model)
    restore_implementation(model)
    set_implementation(model, native_implementation(model))
    try:
        yield
    finally:
        set_implementation(model, installed)


@contextmanager
def use_attention(model: Any, choice: AttentionChoice) -> Iterator[None]:
    """Set the `attn_implementation` of `choice`, and restore the model's at the end of the block.

    Outside of such a block, packed calls set it themselves. A nested block leaves it in place.
    """
    base = unwrap_peft(model)
    is_nested = isinstance(current_implementation(base), InstalledName)
    set_implementation(base, choice.implementation)
    try:
        yield
    finally:
        if not is_nested:
            restore_implementation(base)


@contextmanager
def check_backward(model: Any, *, training: bool | None) -> Iterator[list[str]]:
    """Run one small backward of a third-party kernel, in the first call of `model` in the block.

    Args:
        model: the model that is called, with its wrappers.
        training: whether the model is about to train; None reads its mode.

    Yields:
        The faults found so far; empty without any, and for kernels of this package.
    """
    implementation = current_implementation(unwrap_peft(model)) or ""
    is_foreign = flash_attn.is_flash_attention(implementation) or implementation.startswith(
        varlen.NAME
    )
    trains = unwrap_peft(model).training if training is None else training
    if is_foreign and trains:
        with run_backward_once(implementation) as faults:
            yield faults
    else:
        yield []
