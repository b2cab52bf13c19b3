"""Replaces a module's forward in packed calls: calls with boundaries and without a mask.

A row with shared prefixes (`key_index`) reaches only attention that takes keys of its own: kernels
of this package, and FlashAttention after `gather_prefix_keys`. Any other refuses it, because it
would silently read the wrong keys.
"""

import functools
import inspect
import weakref
from collections.abc import Callable
from types import MethodType
from typing import Any

import torch
from torch import Tensor, nn

from trl_packing.attention.calls import (
    complete_arguments,
    is_inner_call,
    leave_inner_calls_alone,
    unbind_forward,
)
from trl_packing.attention.flash_attn import gathers_prefix_keys
from trl_packing.attention.implementation import (
    current_implementation,
    is_packed_implementation,
    set_implementation,
)
from trl_packing.attention.neftune import announce_documents
from trl_packing.documents.host_row import BOUNDARIES, host_values


def wrap_packed_calls(
    module: nn.Module,
    run: Callable[..., Any],
    implementation: str | None = None,
    attention: str | None = None,
) -> None:
    """Run packed calls of `module` as ``run(forward, **kwargs)``, and other calls unchanged.

    A call on a packed row without boundaries is a packed call too, if the row is recognized
    (`calls.py`). Positional arguments reach `run` by name.

    Args:
        module: the module whose `forward` is replaced. An earlier `run` is replaced too;
            `unwrap_packed_calls` removes it.
        run: called with the native forward and all arguments by name.
        implementation: the `attn_implementation` that packed calls set, since it is restored after
            each run and does not travel with copies.
        attention: the backend, if it computes packed calls in another way than a kernel and takes
            no rows with shared prefixes.
    """
    unwrap_packed_calls(module)
    before, origin = vars(module).get("forward"), weakref.ref(module)
    inner_forward = unbind_forward(module.forward, module)
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if kwargs.get("cu_seq_lens_q") is None:
            kwargs |= _announced_boundaries
        args, kwargs = complete_arguments(self, names, args, kwargs)
        if kwargs.get("cu_seq_lens_q") is None or kwargs.get("attention_mask") is not None:
            if kwargs.get("key_index") is not None:
                raise ValueError(
                    f"{type(self).__name__} was called on a row with shared prefixes (key_index) "
                    "with an attention_mask or without cu_seq_lens_q; pass the batch unchanged"
                )
            return inner_forward(self, *args, **kwargs)
        is_settled = torch.compiler.is_compiling() or is_inner_call()
        if not is_settled and _settle(origin(), self):
            return self.forward(*args, **kwargs)
        if implementation is not None and current_implementation(self) != implementation:
            set_implementation(self, implementation)
        if kwargs.get("key_index") is not None:
            check_takes_prefix_keys(attention or current_implementation(self))
        named = dict(zip(names, args, strict=False))
        if not torch.compiler.is_compiling():
            _check_covers_row(kwargs["cu_seq_lens_q"], named | kwargs)
        with announce_documents(boundaries=kwargs["cu_seq_lens_q"]), leave_inner_calls_alone():
            return run(functools.partial(inner_forward, self), **named, **kwargs)

    forward.before_packed_calls = (before, origin, inner_forward)  # type: ignore[attr-defined]
    module.forward = MethodType(forward, module)


# Methods that are called before packed calls of a module, and of copies of it.
_settles: weakref.WeakKeyDictionary[nn.Module, weakref.WeakMethod] = weakref.WeakKeyDictionary()


def settle_first(model: nn.Module, settle: Callable[[nn.Module, nn.Module], bool] | None) -> None:
    """Call ``settle(module, called)`` before packed calls of the modules of `model`.

    Args:
        model: its packed calls, and those of its copies, are settled.
        settle: a method; takes the module of `model`, and the one that is called, which may be a
            copy. It returns whether a backend was installed there, which the call then takes.
            None takes back an earlier one.
    """
    for module in model.modules():
        if settle is None:
            _settles.pop(module, None)
        else:
            _settles[module] = weakref.WeakMethod(settle)


@torch.compiler.disable  # called from frames that torch.compile leaves to Python
def _settle(module: nn.Module | None, called: nn.Module) -> bool:
    reference = None if module is None else _settles.get(module)
    settle = None if reference is None else reference()
    return settle is not None and settle(module, called)


@torch.compiler.disable
def _check_covers_row(boundaries: Tensor, arguments: dict[str, Any]) -> None:
    """Raise ValueError unless `boundaries` end with the row: kernels compute no tokens behind them.

    The host reads them once for each tensor, and batches of `PackedCollator` keep them.
    """
    given = (arguments.get(name) for name in ("input_ids", "inputs_embeds"))
    row = next((x for x in given if x is not None), None)
    if row is not None and row.shape[1] != (last := host_values(boundaries)[-1]):
        raise ValueError(
            f"cu_seq_lens_q ends at {last}, and the row has {row.shape[1]} tokens; pass the batch "
            "unchanged. nn.DataParallel splits it: start one process for each GPU (torchrun or "
            "accelerate launch), or set CUDA_VISIBLE_DEVICES to one"
        )


def check_takes_prefix_keys(attention: str | None) -> None:
    """Raise NotImplementedError if `attention` would read the keys of a shared row as its own."""
    if not is_packed_implementation(attention) and not gathers_prefix_keys(attention):
        raise NotImplementedError(
            f"attention={attention!r} has one set of boundaries for queries and keys, and the row "
            "has shared prefixes (key_index); set prefix_sharing='off', or attention='auto'"
        )


def unwrap_packed_calls(module: nn.Module) -> None:
    """Restore the forward that `module` had before `wrap_packed_calls`."""
    forward = vars(module).get("forward")
    if not hasattr(forward, "before_packed_calls"):
        return
    before, origin, unbound = forward.before_packed_calls  # type: ignore[union-attr]
    if before is None:
        del module.forward
    else:  # on a copy, `before` would run the weights of the original
        module.forward = before if origin() is module else MethodType(unbound, module)


def pass_packed_calls(backbone: nn.Module, implementation: str | None = None) -> None:
    """Run packed calls of `backbone` unchanged: its native attention reads boundaries."""
    wrap_packed_calls(backbone, lambda forward, **kwargs: forward(**kwargs), implementation)


# Boundaries announced by the packed call of a whole model, read by its backbone.
_announced_boundaries: dict[str, Any] = {}


def announce_boundaries(
    model: nn.Module, implementation: str | None = None, attention: str | None = None
) -> None:
    """Make the boundaries of packed calls of `model` reach its backbone.

    Some forwards (falcon, mamba) drop unknown arguments.

    Args:
        model: the whole model, with its head.
        implementation: the `attn_implementation` that packed calls need. It is set here too,
            because some models (opt) call past their backbone.
        attention: as in `wrap_packed_calls`.
    """
    parameters = inspect.signature(type(model).forward).parameters.values()
    takes_any = any(p.kind is p.VAR_KEYWORD for p in parameters)
    taken = {p.name for p in parameters} | {"fused_lm_head"}

    def run_with_boundaries(forward: Callable[..., Any], **kwargs: Any) -> Any:
        global _announced_boundaries
        before = _announced_boundaries
        _announced_boundaries = {k: v for k, v in kwargs.items() if k in BOUNDARIES}
        try:
            return forward(**{k: v for k, v in kwargs.items() if takes_any or k in taken})
        finally:
            _announced_boundaries = before

    wrap_packed_calls(model, run_with_boundaries, implementation, attention)
