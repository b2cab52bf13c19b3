"""Sets an attention backend on a model, and gives the model its native attention back.

The isolation check runs forwards only, and a kernel may lack a right backward. The first call of
each kind in a check therefore runs again: output and gradients of the last document must be those
of document-wise attention in float32, within rounding, and zero in front of that document and its
prefix.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from trl_packing.attention import (
    block_mask,
    document_sdpa,
    flash_attn,
    padded_rows,
    recurrent,
    varlen,
)
from trl_packing.attention.backends import PADDED, AttentionChoice, outside_interface
from trl_packing.attention.calls import (
    Call,
    run_known_arguments,
    run_unchanged,
    wrap_packed_calls,
)
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
from trl_packing.attention.sequence_parallel import exchanging


def install_attention(model: Any, choice: AttentionChoice) -> None:
    """Set `choice` on a transformers model, which PEFT may wrap, in place of an earlier one."""
    base = unwrap_peft(model)
    # The backbone builds the masks, and a fused LM head calls it without `base.forward`.
    backbone = getattr(base, "base_model", base)
    if type(backbone).__name__.endswith(("DecoderWrapper", "OPTModel")):
        backbone = backbone.decoder  # which the whole model calls past its backbone
    for module in (model, base, backbone):
        wrap_packed_calls(module, None)
    if choice.backend != recurrent.NAME:
        recurrent.run_parts_whole(base)
    has_states = bool(recurrent.take_documents(base)) or choice.backend == recurrent.NAME
    implementation = choice.implementation or choice.native or native_implementation(base)
    set_implementation(base, implementation)
    if choice.backend in PADDED:
        whole = _model_to_pad(model, base)
        for padded in (backbone, whole) if whole else (backbone,):
            padded_rows.pad_packed_calls(padded, choice.backend, rope_thresholds(base))
        if whole:
            return
    elif choice.backend == block_mask.NAME:
        wrap_packed_calls(backbone, block_mask.run_with_mask, attention=block_mask.NAME)
    else:
        run = recurrent.run_again_as_packed if has_states else run_unchanged
        wrap_packed_calls(backbone, run, choice.implementation, num_ranks=choice.num_ranks)
        if choice.num_ranks > 1:
            name = str(implementation)
            AttentionInterface.register(name, exchanging(ALL_ATTENTION_FUNCTIONS[name]))
    if backbone is not base:
        run = run_known_arguments
        wrap_packed_calls(base, run, choice.implementation, num_ranks=choice.num_ranks)


def _model_to_pad(model: Any, base: Any) -> Any:
    """Return the model that must see padded rows as a whole, or None if its backbone can."""
    # Virtual tokens come in front of every row; PEFT looks for an invocation in every row.
    is_prompted = getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False)
    if is_prompted or invokes_adapter(model):
        return model
    return base if getattr(base.forward, "scores_native_logits", False) else None


def take_prefix_keys(model: Any, attention: str) -> str | None:
    """Prepare `model`, on the backend `attention`, for shared prefixes; return why it cannot."""
    if attention == recurrent.NAME or recurrent.take_documents(unwrap_peft(model)):
        return "recurrent layers carry a state along the row"
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
    registered = ALL_ATTENTION_FUNCTIONS[name]
    # Of a divided row, the trial sees the whole.
    function = getattr(registered, "of_whole_rows", registered)
    tried = set()
    faults = []

    @functools.wraps(function)
    def attention(module: nn.Module, q: Tensor, k: Tensor, v: Tensor, *args: Any, **kw: Any) -> Any:
        # The properties that select the kernel; the length of the row is not one of them.
        shapes = tuple((x.shape[1], x.shape[-1], x.dtype) for x in (q, k, v))
        given = [kw.get(option) is not None for option in ("sliding_window", "key_index", "s_aux")]
        kind = (shapes, *given, kw.get("softcap"))
        if kw.get("cu_seq_lens_q") is not None and kind not in tried:
            tried.add(kind)
            try:
                _check_backward(function, module, (q, k, v), args, kw)
            except torch.OutOfMemoryError:
                raise
            except Exception as error:
                faults.append(f"its backward raises {type(error).__name__}: {error}")
        return function(module, q, k, v, *args, **kw)

    # In the instance; the registration stays.
    divides = function is not registered
    ALL_ATTENTION_FUNCTIONS[name] = exchanging(attention) if divides else attention
    try:
        yield faults
    finally:
        del ALL_ATTENTION_FUNCTIONS[name]


# An error may be this many times that of document-wise attention in the same dtype. In bfloat16
# rounding gives up to 2 times, a window off by one 30 times.
_ROUNDING = 8
_MOST_WINDOW = 16  # tokens of a window in a trial; the fewer, the more one token counts


def _check_backward(
    function: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, ...],
    args: tuple[Any, ...],
    kwargs: Call,
) -> None:
    """Raise an error if output or gradients of an attention function are wrong."""
    start = _start_of_last_document(kwargs["cu_seq_lens_q"])
    if kwargs.get("sliding_window") is not None:
        # A document that fits into the window would not show it.
        half = max((tensors[0].shape[2] - start) // 2, 1)
        kwargs = kwargs | {"sliding_window": min(kwargs["sliding_window"], half, _MOST_WINDOW)}
    found = _output_and_gradients(function, module, tensors, args, kwargs, start)
    _check_reach(found, kwargs, start)
    is_causal = kwargs.get("is_causal")
    if not (getattr(module, "is_causal", True) if is_causal is None else is_causal):
        return  # a tower of images, which document-wise attention does not compute
    reference = ALL_ATTENTION_FUNCTIONS[document_sdpa.NAME]
    rounded = _output_and_gradients(reference, module, tensors, args, kwargs, start)
    with torch.autocast(tensors[0].device.type, enabled=False):
        wide = tuple(x.float() for x in tensors)
        exact = _output_and_gradients(reference, module, wide, args, kwargs, start)
    # In float32, the reference rounds as much as the kernel.
    rounding = max(torch.finfo(found["output"].dtype).eps, 1e-4)
    for name, value in exact.items():
        if value.norm() == 0:  # as the gradients of queries in a document of one token
            continue
        error, other = ((x[name].float() - value).norm() for x in (found, rounded))
        allowed = _ROUNDING * max(float(other), rounding * float(value.norm()))
        if not error <= allowed:
            share, most = (float(x / value.norm()) for x in (error, allowed))
            what = name if name == "output" else f"gradient of {name}"
            raise ValueError(f"{what} is off by {share:.1%}, rounding allows {most:.1%}")


@torch.enable_grad()
def _output_and_gradients(
    function: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, ...],
    args: tuple[Any, ...],
    kwargs: Call,
    start: int,
) -> dict[str, Tensor]:
    """Return the output from `start` on, and the gradients of its weighted sum, by name."""
    leaves = dict(zip(("query", "key", "value"), tensors, strict=True))
    if kwargs.get("s_aux") is not None:
        leaves["sinks"] = kwargs["s_aux"]
    leaves = {name: tensor.detach().clone().requires_grad_() for name, tensor in leaves.items()}
    query, key, value, *sinks = leaves.values()
    if sinks:
        kwargs = kwargs | {"s_aux": sinks[0]}
    output = function(module, query, key, value, *args, **kwargs)[0]  # (rows, T, heads, value_dim)
    output = output[:, start:]
    # Weights that differ from value to value, and are the same for every function.
    weights = torch.linspace(0, 997, output.numel(), device=output.device).cos().view(output.shape)
    total = (output.float() * weights).sum()
    # A kernel that gives a tensor no gradient at all gives it zeros.
    gradients = torch.autograd.grad(total, list(leaves.values()), materialize_grads=True)
    return {"output": output.detach()} | dict(zip(leaves, gradients, strict=True))


def _check_reach(found: dict[str, Tensor], kwargs: Call, start: int) -> None:
    """Raise ValueError for gradients that are not finite, or outside of what `start` on sees."""
    tokens = torch.arange(found["query"].shape[2], device=found["query"].device)
    seen = tokens >= start
    seen_keys = seen.clone()
    if kwargs.get("key_index") is not None:
        seen_keys[kwargs["key_index"][_start_of_last_document(kwargs["cu_seq_lens_k"]) :]] = True
    for gradient in found.values():
        if not gradient.isfinite().all():
            raise ValueError("gradients that are not finite")
    for name, allowed in (("query", seen), ("key", seen_keys), ("value", seen_keys)):
        if found[name][:, :, ~allowed].any():  # (rows, heads, T, dim)
            raise ValueError("gradients that reach into the documents before it")


def _start_of_last_document(boundaries: Tensor) -> int:
    return int(boundaries[:-1][boundaries.diff() > 0][-1])
