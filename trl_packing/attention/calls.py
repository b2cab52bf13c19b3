"""Completes model calls on tokens of a packed row with the row's boundaries.

A call belongs to a row if its tokens share the row's memory, as the whole row or as a part that
starts with a document, or if it is as long as the current row (with changed or embedded tokens).
While a row is current, or a model of `enable_packing` trains, any other call raises ValueError,
because its tokens may or may not be a row's. `other_rows` allows such calls, and a cache with
tokens (`generate`) is allowed too.

    trainer      set_current_row(batch)                  before each micro-batch
    user's loss  model(input_ids=inputs["input_ids"])    names no documents
    the model    complete_call(model, call)              the same call with the row's boundaries

Trainers without this package do not set the current row: the model that they train takes the
boundaries in its call, or refuses it.

Inside a module whose packed calls are wrapped, calls with boundaries and without a mask run in
another way. A row with shared prefixes (`key_index`) reaches only attention that takes keys of its
own: kernels of this package, and FlashAttention after `gather_prefix_keys`. Any other refuses it,
because it would silently read the wrong keys.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import CellType, FunctionType, MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.functional import pad

from trl_packing.attention.flash_attn import gathers_prefix_keys
from trl_packing.attention.model_facts import (
    current_implementation,
    is_packed_implementation,
    set_implementation,
)
from trl_packing.attention.neftune import announce_documents
from trl_packing.documents.boundaries import boundaries_of_row, document_ids_from_lengths
from trl_packing.documents.host_row import (
    BOUNDARIES,
    cached_values,
    for_kernels,
    host_boundaries,
    host_values,
    remember_row,
    rows_alive,
)

# --- the row in flight ----------------------------------------------------------------------------

_current: Mapping[str, Any] | None = None
_allows_other_rows = False


def current_row() -> Mapping[str, Any] | None:
    """Return the packed micro-batch that is trained or evaluated now, None without one."""
    return _current


def allows_other_rows() -> bool:
    """Whether the code runs inside `other_rows`."""
    return _allows_other_rows


def set_current_row(batch: Mapping[str, Any] | None) -> None:
    """Set the micro-batch that is trained or evaluated from now on.

    Args:
        batch: a micro-batch. After None or a padded batch, no row is current.
    """
    global _current
    is_packed = batch is not None and torch.is_tensor(batch.get("cu_seq_lens_q"))
    _current = batch if is_packed else None
    if batch is not None:
        remember_row(batch)


def replace_current_row(batch: Mapping[str, Any]) -> None:
    """Make `batch` the current row in place of another, such as its copy on the CPU.

    Outside of steps there is no current row, and the tokens of `batch` are only remembered.
    """
    if _current is None:
        remember_row(batch)
    else:
        set_current_row(batch)


@contextmanager
def use_current_row(batch: Mapping[str, Any] | None) -> Iterator[None]:
    """Make `batch` the current row inside the block, and restore the one before at its end."""
    before = _current
    set_current_row(batch)
    try:
        yield
    finally:
        set_current_row(before)


class AnnouncedBatches:
    """Micro-batches, of a step or a data loader, each the current row until the next one is read.

    All other attributes are those of the wrapped object. For trainers whose `training_step`,
    `compute_loss` or `prediction_step` may be overridden.
    """

    def __init__(self, batches: Any):
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        # No cleanup when the generator is closed: after an error, the garbage collector may close
        # it at any time, even during a later step.
        for batch in self._batches:
            set_current_row(batch)
            yield batch
        set_current_row(None)


@contextmanager
def other_rows() -> Iterator[None]:
    """Allow calls in your loss on rows that are not in the batch.

    Inside the block, each row of ``(B, T)`` tokens is one document, as in any model, even if it
    contains tokens of the batch, and no call is refused.

    Examples:
        >>> with other_rows():
        ...     pass  # replayed = model(input_ids=ids, attention_mask=mask)
    """
    global _allows_other_rows
    before, _allows_other_rows = _allows_other_rows, True
    try:
        yield
    finally:
        _allows_other_rows = before


# --- completing a call ----------------------------------------------------------------------------


def complete_arguments(
    module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return positional and keyword arguments of a call, with the boundaries if it is on a row.

    Args:
        module: the module that is called.
        names: names of its parameters, for positional arguments.
        args: positional arguments of the call.
        kwargs: keyword arguments of the call.

    Raises:
        ValueError: as `complete_call`.
    """
    if _in_packed_call or (torch.compiler.is_compiling() and _is_complete(kwargs)):
        return args, kwargs
    named = dict(zip(names, args, strict=False)) | kwargs
    call = complete_call(module, named)
    return (args, kwargs) if call is named else ((), call)


def _is_complete(kwargs: dict[str, Any]) -> bool:
    """Whether a call has all boundaries that kernels need, no mask and no cache."""
    return (
        kwargs.get("cu_seq_lens_q") is not None
        and kwargs.get("attention_mask") is None
        and isinstance(kwargs.get("max_length_q"), int)
        and kwargs.get("use_cache") is False
    )


# Whether a packed call is running, whose inner calls must not be completed.
_in_packed_call = False


@contextmanager
def leave_inner_calls_alone() -> Iterator[None]:
    """Leave calls inside the block unchanged, because an outer call has the boundaries already."""
    global _in_packed_call
    before, _in_packed_call = _in_packed_call, True
    try:
        yield
    finally:
        _in_packed_call = before


@torch.compiler.disable
def complete_call(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the call with boundaries if its tokens are a packed row's, else unchanged.

    Args:
        model: the model that is called.
        call: arguments of its forward by name.

    Raises:
        ValueError: the call has only some tokens of a packed row, or other tokens too, or a mask
            under which documents see each other.
    """
    if call.get("cu_seq_lens_q") is None:
        if allows_other_rows():
            return call
        boundaries = _find_boundaries(model, call)
        if boundaries is None:
            return call
        positions = _valid_positions(model, call.get("position_ids"), boundaries)
        call = call | boundaries | {"position_ids": positions}
    return _as_packed(model, call)


# --- the row of a call ----------------------------------------------------------------------------


def _find_boundaries(model: Any, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the boundaries of the row whose tokens the call has, None if it has no row's."""
    tokens = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    if not torch.is_tensor(tokens) or tokens.dim() < 2:
        return None
    ids, row = _row_in_memory(tokens)
    current = current_row()
    if ids is None and current is not None and tokens.shape[:2] == current["input_ids"].shape:
        ids, row = tokens, {k: current[k] for k in BOUNDARIES if k in current}
    if ids is None:
        if call.get("past_key_values") is not None:
            return None
        if current is not None:
            shape = _shape(current["input_ids"])
            raise ValueError(_in_step(model, tokens, f"whose row has shape {shape}"))
        if model.training and getattr(model, "trains_packed_rows", False):
            raise ValueError(
                f"{type(model).__name__} was called in training on tokens of shape "
                f"{_shape(tokens)} without the boundaries of documents, which could see each "
                "other; call model(**inputs) on a batch of PackedDataset or PackedCollator, and "
                "rows that are not packed inside `with trl_packing.other_rows():`"
            )
        return None
    if call.get("past_key_values") is not None:
        raise ValueError(_in_step(model, tokens, _CACHE))
    if tokens.shape[:2] == ids.shape[:2]:
        return row
    if row.get("key_index") is not None:
        raise ValueError(_in_step(model, tokens, "which are part of a row with shared prefixes"))
    return _boundaries_of_part(model, tokens, ids, row)


def _row_in_memory(tokens: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return `input_ids` and boundaries of the row that shares the memory of `tokens`."""
    if tokens.dtype.is_floating_point:
        return None, {}
    memory = tokens.untyped_storage().data_ptr()
    for ids, row in rows_alive():
        if ids is tokens or (ids.untyped_storage().data_ptr() == memory and memory):
            return ids, row
    return None, {}


def _boundaries_of_part(
    model: Any, tokens: Tensor, ids: Tensor, row: dict[str, Any]
) -> dict[str, Any]:
    """Return the boundaries of a part `tokens` of the row `ids` that starts with a document."""
    start = int(tokens.storage_offset() - ids.storage_offset())
    end = start + int(tokens.shape[1])
    whole = host_boundaries(row["cu_seq_lens_q"])
    is_slice = len(tokens) == 1 and tokens.dim() == 2 and tokens.stride(1) == 1
    if not is_slice or start not in whole or end > whole[-1] or end == start:
        raise ValueError(_in_step(model, tokens, f"which are part of a row of shape {_shape(ids)}"))
    lengths = np.diff(np.unique(np.array(whole).clip(start, end)))
    made = boundaries_of_row(torch.from_numpy(lengths))
    return {k: v.to(tokens.device) if torch.is_tensor(v) else v for k, v in made.items()}


def _valid_positions(model: Any, given: Any, boundaries: dict[str, Any]) -> Any:
    """Return the given `position_ids` if they restart in every document, else the row's."""
    restarting = boundaries["position_ids"]
    if not torch.is_tensor(given) or given is restarting or given.dim() != 2:
        return restarting if given is None else given
    if given.shape != restarting.shape:
        raise ValueError(
            _in_step(model, given, f"with position_ids of {_shape(restarting)} tokens")
        )
    counted = torch.arange(given.shape[1], device=given.device, dtype=given.dtype)
    if torch.equal(given[0], counted):  # counted as for one document
        return restarting
    if bool((given[restarting.to(given.device) == 0] == 0).all()):
        return given
    raise ValueError(_in_step(model, given, "with position_ids that do not restart in each"))


_CACHE = "with a cache, which is for one document"


def _in_step(model: Any, tokens: Tensor, why: str) -> str:
    return (
        f"{type(model).__name__} was called on tokens of shape {_shape(tokens)} in a step on packed"
        f" documents, {why}, so documents could see each other; call model(**inputs), or pass "
        "inputs['input_ids'] whole, cut at the end, or one document of it; call rows that are not "
        "in the batch inside `with trl_packing.other_rows():`"
    )


def _shape(tokens: Tensor) -> str:
    return str(tuple(tokens.shape[:2]))


# --- a packed call --------------------------------------------------------------------------------


_LONGEST = ("max_length_q", "max_length_k")


def _as_packed(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return a call with boundaries as packed kernels need it: without mask and cache.

    Targets that another document would predict are masked.
    """
    boundaries = call["cu_seq_lens_q"]
    mask = call.get("attention_mask")
    if mask is not None:
        if not _keeps_apart(mask, boundaries):
            raise ValueError(
                f"{type(model).__name__} was called on packed documents with an attention_mask "
                "that hides tokens, or under which documents would see each other; leave it out: "
                "documents are kept apart without one"
            )
        if mask.dim() != 4:
            call = call | {"attention_mask": None}
    if call.get("past_key_values") is None:
        call = call | {"use_cache": False}
    if not all(isinstance(call.get(name), int) for name in _LONGEST):
        sizes = for_kernels(call)
        call = call | {name: sizes[name] for name in _LONGEST}
    if call.get("key_index") is not None:  # the collator has masked the labels of such a row
        return call
    for name, places in (("labels", boundaries[:-1]), ("shift_labels", boundaries[1:] - 1)):
        labels = call.get(name)
        if torch.is_tensor(labels) and labels.dim() == 2 and cached_values(labels) is None:
            call = call | {name: _mask_targets_at(labels, places)}
    return call


def _mask_targets_at(labels: Tensor, places: Tensor) -> Tensor:
    """Return `labels` ``(1, T)``, with -100 where one document would predict the next one."""
    # One more column for the boundaries of empty documents, which are T.
    wide = pad(labels, (0, 1)).index_fill(1, places.to(labels.device).long().clamp(min=0), -100)
    return wide[:, :-1]


def _keeps_apart(mask: Any, boundaries: Tensor) -> bool:
    """Whether `mask` hides no tokens and, if it is 4-D, keeps documents apart."""
    if not torch.is_tensor(mask):
        return False
    lengths = torch.from_numpy(np.diff(host_boundaries(boundaries)))
    if mask.dim() == 2:
        return bool(mask[:, : int(lengths[lengths > 0][:-1].sum()) + 1].all())
    if mask.dim() != 4:
        return False
    ids = document_ids_from_lengths(lengths[lengths > 0]).to(mask.device)
    is_open = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool((is_open & (ids[:, None] != ids[None])).any())


# --- a forward that follows copies ----------------------------------------------------------------


def unbind_forward(forward: Callable[..., Any], module: nn.Module) -> Callable[..., Any]:
    """Return `forward` of `module` as a function that takes the module as its first argument.

    A bound forward would run the weights of `module` even when it is called on a copy.
    """
    function = getattr(forward, "__func__", None)
    if function is not None and getattr(forward, "__self__", None) is module:
        return _follow_copies(function, module)
    if isinstance(forward, functools.partial) and forward.args[:1] == (module,):  # accelerate's
        first, given = forward.args[1:], forward.keywords
        return lambda self, *args, **kwargs: forward.func(self, *first, *args, **given, **kwargs)
    return lambda _self, *args, **kwargs: forward(*args, **kwargs)


def _follow_copies(function: Any, module: nn.Module) -> Callable[..., Any]:
    """Return `function`, whose closure may hold a bound method of `module` (TRL's head does).

    On a copy of `module`, that method is bound to the copy.
    """
    cells = function.__closure__ or () if isinstance(function, FunctionType) else ()
    held = [cell.cell_contents for cell in cells]
    if not any(isinstance(x, MethodType) and x.__self__ is module for x in held):
        return function

    def follow(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if self is module:
            return function(self, *args, **kwargs)
        of_copy = tuple(
            CellType(MethodType(unbind_forward(x, module), self))
            if isinstance(x, MethodType) and x.__self__ is module
            else cell
            for x, cell in zip(held, cells, strict=True)
        )
        made = FunctionType(
            function.__code__, function.__globals__, closure=of_copy, argdefs=function.__defaults__
        )
        made.__kwdefaults__ = function.__kwdefaults__
        return made(self, *args, **kwargs)

    return follow


# --- packed calls of a module run in another way --------------------------------------------------


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
        is_settled = torch.compiler.is_compiling() or _in_packed_call
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
