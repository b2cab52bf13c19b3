"""Sets an attention backend on a model, and gives the model its native attention back.

The isolation check runs forwards only, and a kernel may lack a right backward. The first call of
each kind in a check therefore runs again: the gradient of the last document's output must be
finite, and zero in front of that document and its prefix.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing.attention import block_mask, flash_attn, padded_rows, varlen
from trl_packing.attention.backends import PADDED, AttentionChoice, outside_interface
from trl_packing.attention.calls import run_known_arguments, run_unchanged, wrap_packed_calls
from trl_packing.attention.model_facts import (
    InstalledName,
    current_implementation,
    invokes_adapter,
    native_implementation,
    restore_implementation,
    rope_thresholds,
    set_implementation,
    unwrap_peft,
)


def install_attention(model: Any, choice: AttentionChoice) -> None:
    """Set `choice` on a transformers model, which PEFT may wrap, in place of an earlier one."""
    base = unwrap_peft(model)
    # The backbone builds the masks, and a fused LM head calls it without `base.forward`.
    backbone = getattr(base, "base_model", base)
    if type(backbone).__name__.endswith(("DecoderWrapper", "OPTModel")):
        backbone = backbone.decoder  # which the whole model calls past its backbone
    for module in (model, base, backbone):
        wrap_packed_calls(module, None)
    set_implementation(base, choice.implementation or choice.native or native_implementation(base))
    if choice.backend in PADDED:
        whole = _model_to_pad(model, base)
        for padded in (backbone, whole) if whole else (backbone,):
            padded_rows.pad_packed_calls(padded, choice.backend, rope_thresholds(base))
        if whole:
            return
    elif choice.backend == block_mask.NAME:
        wrap_packed_calls(backbone, block_mask.run_with_mask, attention=block_mask.NAME)
    else:
        wrap_packed_calls(backbone, run_unchanged, choice.implementation)
    if backbone is not base:
        wrap_packed_calls(base, run_known_arguments, choice.implementation)


def _model_to_pad(model: Any, base: Any) -> Any:
    """Return the model that must see padded rows as a whole, or None if its backbone can."""
    # Virtual tokens come in front of every row; PEFT looks for an invocation in every row.
    is_prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if is_prompted or invokes_adapter(model):
        return model
    return base if getattr(base.forward, "scores_native_logits", False) else None


def take_prefix_keys(model: Any, attention: str) -> str | None:
    """Prepare `model`, on the backend `attention`, for shared prefixes; return why it cannot."""
    if attention in ("documents", "varlen"):
        return None
    if not flash_attn.is_flash_attention(attention) or attention not in ALL_ATTENTION_FUNCTIONS:
        return f"attention={attention!r} has one set of boundaries for queries and keys"
    if reason := outside_interface(unwrap_peft(model)):
        return reason
    flash_attn.gather_prefix_keys(attention)
    return None


@contextmanager
def use_native_attention(model: Any) -> Iterator[None]:
    """Run `model` in the block with its own attention, whose name some models read in any call."""
    installed = current_implementation(model)
    restore_implementation(model)
    set_implementation(model, native_implementation(model))
    try:
        yield
    finally:
        set_implementation(model, installed)


@contextmanager
def use_attention(model: Any, choice: AttentionChoice) -> Iterator[None]:
    """Set the `attn_implementation` of `choice`; the outermost block restores the model's."""
    base = unwrap_peft(model)
    is_nested = isinstance(current_implementation(base), InstalledName)
    set_implementation(base, choice.implementation)
    try:
        yield
    finally:
        if not is_nested:
            restore_implementation(base)


@contextmanager
def try_backward(model: Any, *, training: bool | None) -> Iterator[list[str]]:
    """Run one small backward for each kind of packed call of a third-party kernel in the block.

    It yields the list of faults. `training`: whether `model`, without wrappers, is about to train;
    None reads its mode.
    """
    name = current_implementation(model) or ""
    is_foreign = flash_attn.is_flash_attention(name) or name.startswith(varlen.NAME)
    if not is_foreign or not (model.training if training is None else training):
        yield []
        return
    function = ALL_ATTENTION_FUNCTIONS[name]
    tried = set()
    faults = []

    @functools.wraps(function)
    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> Any:
        # The properties that select the kernel; the length of the row is not one of them.
        kind = (
            *[(x.shape[1], x.shape[-1], x.dtype) for x in (q, k, v)],
            *[kw.get(option) is not None for option in ("sliding_window", "key_index")],
            kw.get("softcap"),
        )
        if kw.get("cu_seq_lens_q") is not None and kind not in tried:
            tried.add(kind)
            try:
                _run_backward(function, module, (q, k, v), args, kw)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                faults.append(f"its backward raises {type(error).__name__}: {error}")
        return function(module, q, k, v, *args, **kw)

    ALL_ATTENTION_FUNCTIONS[name] = attention  # in the instance; the registration stays
    try:
        yield faults
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


@torch.enable_grad()
def _run_backward(
    function: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> None:
    leaves = [x.detach().requires_grad_() for x in tensors]
    if kwargs.get("sliding_window") is not None:
        # Short rows fit into the window, and transformers would skip it.
        half = max(tensors[1].shape[2] // 2, 1)
        kwargs = kwargs | {"sliding_window": min(kwargs["sliding_window"], half)}
    start = _start_of_last_document(kwargs["cu_seq_lens_q"])
    output = function(module, *leaves, *args, **kwargs)[0]  # (rows, T, heads, value_dim)
    found = torch.autograd.grad(output[:, start:].float().sum(), leaves)
    seen = torch.arange(output.shape[1], device=output.device) >= start
    seen_keys = seen.clone()
    if kwargs.get("key_index") is not None:
        seen_keys[kwargs["key_index"][_start_of_last_document(kwargs["cu_seq_lens_k"]) :]] = True
    for gradient, allowed in zip(found, (seen, seen_keys, seen_keys), strict=True):
        if not gradient.isfinite().all():
            raise ValueError("gradients that are not finite")
        if gradient[:, :, ~allowed].any():  # (rows, heads, T, dim)
            raise ValueError("gradients that reach into the documents before it")


def _start_of_last_document(boundaries: Tensor) -> int:
    return int(boundaries[:-1][boundaries.diff() > 0][-1])
