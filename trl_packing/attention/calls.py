"""Completes model calls on tokens of a packed row with the row's boundaries, and runs them packed.

A call belongs to a row if its tokens are the row in memory, or as many as those of the current row.
While a row is current, or a model of `enable_packing` trains, any other call raises ValueError,
because its tokens may or may not be a row's; `other_rows` and a cache (`generate`) allow it. A row
with shared prefixes (`key_index`) is refused by attention that does not take keys of its own.
"""

import functools
import inspect
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torch._C import _current_graph_task_id
from torch.nn.functional import pad

from trl_packing.attention.flash_attn import gathers_prefix_keys
from trl_packing.attention.model_facts import (
    PACKED_NAMES,
    current_implementation,
    set_implementation,
)
from trl_packing.documents.boundaries import position_ids_from_lengths
from trl_packing.documents.host_row import (
    BOUNDARIES,
    cached_values,
    for_kernels,
    host_boundaries,
    host_values,
    remember_row,
    rows_alive,
)

Forward: TypeAlias = Callable[..., Any]  # of a model, or of a module inside it
Call: TypeAlias = dict[str, Any]  # the arguments of a forward

# The names under which a forward takes what it has computed of earlier tokens: `cache` since
# transformers 5.24, or one of two names that it accepts until 5.40; then those of single models.
CACHES = (
    *("cache", "past_key_values", "cache_params"),
    *("past_buckets_states", "state", "mems"),
)

_current: Mapping[str, Any] | None = None
_allows_other_rows = False


def current_row() -> Mapping[str, Any] | None:
    """Return the packed micro-batch that is trained or evaluated now, None without one."""
    return _current


def allows_other_rows() -> bool:
    """Whether the code runs inside `other_rows`."""
    return _allows_other_rows


def set_current_row(batch: Mapping[str, Any] | None) -> None:
    """Set the micro-batch that runs from now on; after None or a padded one, no row is current."""
    global _current
    is_packed = batch is not None and torch.is_tensor(batch.get("cu_seq_lens_q"))
    _current = batch if is_packed else None
    if batch is not None:
        remember_row(batch)


def replace_current_row(batch: Mapping[str, Any]) -> None:
    """Make `batch` current in place of another, such as its copy on the CPU; else remember it."""
    (remember_row if _current is None else set_current_row)(batch)


@contextmanager
def use_current_row(batch: Mapping[str, Any] | None) -> Iterator[None]:
    """Make `batch` the current row inside the block, and restore the one before at its end."""
    before = _current
    set_current_row(batch)
    try:
        yield
    finally:
        set_current_row(before)


class CurrentBatches:
    """Micro-batches of a step or data loader, each the current row until the next one is read."""

    def __init__(self, batches: Any):
        self._batches = batches

    def __getattr__(self, name: str) -> Any:
        return getattr(self._batches, name)

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        # No cleanup when the generator is closed: after an error, the garbage collector may close
        # it at any time, even during a later step.
        # Not a list: a loader is read while it is evaluated, and knows when its last batch comes.
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


# The packed call that runs: its way and its boundaries. A plain global: torch.compile follows it.
_running: "tuple[PackedWay, dict[str, Any]] | None" = None


def running_row() -> Mapping[str, Any] | None:
    """Return the boundaries of the packed call that runs, or the current row, None without."""
    if _running is not None:
        return _running[1]
    return None if _allows_other_rows else _current


def packed_row() -> Mapping[str, Any] | None:
    """Return the boundaries of the packed call that runs on its row as a whole, None without."""
    return _running[1] if _running is not None and _running[0].attention is None else None


def refuse_recomputation(given: Tensor) -> None:
    """Raise RuntimeError if a backward computes a part of a packed call again, outside of it.

    Checkpoints of transformers and FSDP run it inside (`run_again_inside`), others may not.
    """
    if torch.compiler.is_compiling() or _current_graph_task_id() < 0:
        return
    if _running is not None or len(given) != 1:
        return
    for ids, row in rows_alive():
        if ids.shape[1] in given.shape[1:] and len(row["cu_seq_lens_q"]) > 2:
            raise RuntimeError(
                "a checkpoint that is not the model's computes a recurrent layer again, without "
                "the boundaries of documents; use gradient_checkpointing=True, or "
                "attention='padded'"
            )


def run_again_inside() -> Callable[..., Any]:
    """Return ``run(checkpoint, function, ...)``: what a checkpoint runs is in the call of now."""
    running = _running

    def run(checkpoint: Callable[..., Any], function: Any, *args: Any, **kwargs: Any) -> Any:
        return checkpoint(functools.partial(_run_inside, running, function), *args, **kwargs)

    return run


def _run_inside(running: Any, function: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Any:
    """Return ``function(*args, **kwargs)``, run inside of a packed call, a part of one, or none."""
    global _running
    before, _running = _running, running
    try:
        return function(*args, **kwargs)
    finally:
        _running = before


def needs_no_mask() -> bool:
    """Whether a packed call runs on a kernel that needs boundaries only."""
    return _running is not None and _running[0].implementation in PACKED_NAMES


def complete_arguments(
    module: nn.Module, names: Sequence[str], args: tuple[Any, ...], kwargs: Call
) -> tuple[tuple[Any, ...], Call]:
    """Return the arguments of a call, positional ones of these `names`, as `complete_call` does."""
    if _running is not None or (torch.compiler.is_compiling() and _is_complete(kwargs)):
        return args, kwargs
    named = dict(zip(names, args, strict=False)) | kwargs
    call = complete_call(module, named)
    return (args, kwargs) if call is named else ((), call)


def _is_complete(kwargs: Call) -> bool:
    """Whether a call has all that kernels need, no mask and no cache."""
    return (
        kwargs.get("cu_seq_lens_q") is not None
        and kwargs.get("position_ids") is not None
        and kwargs.get("attention_mask") is None
        and isinstance(kwargs.get("max_length_q"), int)
        and kwargs.get("use_cache") is False
    )


@torch.compiler.disable
def complete_call(model: Any, call: Call) -> Call:
    """Return the call of `model` with boundaries if its tokens are a packed row's, else unchanged.

    ValueError for other tokens beside a row's, and for a mask under which documents see each other.
    """
    boundaries = call.get("cu_seq_lens_q")
    has_positions = call.get("position_ids") is not None
    if call.get("key_index") is not None and (boundaries is None or not has_positions):
        # Attention would gather keys, and read the row as one document.
        raise ValueError("a call has key_index without boundaries or positions; use **inputs")
    if boundaries is None:
        row = None if _allows_other_rows else _find_row(model, call)
        if row is None:
            return call
        call = call | row | {"position_ids": _valid_positions(model, call, row["position_ids"])}
    elif not has_positions:  # the model would count on from document to document
        lengths = torch.from_numpy(np.diff(host_values(boundaries)))
        positions = position_ids_from_lengths(lengths)[None].to(boundaries.device)
        call = call | {"position_ids": positions}
    return _as_packed(model, call)


def has_cache(call: Mapping[str, Any]) -> bool:
    """Whether a call of a model continues tokens of earlier calls, as those of `generate` do."""
    return any(call.get(name) is not None for name in CACHES)


def tokens_of(call: Call) -> Any:
    """Return the ids of the tokens of a call, or else their embeddings, or else None."""
    tokens = call.get("input_ids")
    return call.get("inputs_embeds") if tokens is None else tokens


def _find_row(model: Any, call: Call) -> dict[str, Any] | None:
    """Return the boundaries of the row whose tokens the call has, None if it has no row's."""
    tokens = tokens_of(call)
    if not torch.is_tensor(tokens) or tokens.dim() < 2:
        return None
    ids, row = _row_in_memory(tokens)
    if ids is None and _current is not None and tokens.shape[:2] == _current["input_ids"].shape:
        ids = tokens
        row = {k: _current[k] for k in BOUNDARIES if k in _current}
    if ids is None:
        trains = model.training and getattr(model, "trains_packed_rows", False)
        if has_cache(call) or (_current is None and not trains):
            return None
    elif tokens.shape[:2] == ids.shape[:2] and not has_cache(call):
        return row
    raise ValueError(_refusal(model, tokens))


def _row_in_memory(tokens: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return `input_ids` and boundaries of the row that shares the memory of `tokens`."""
    memory = 0 if tokens.is_floating_point() else tokens.untyped_storage().data_ptr()
    for ids, row in rows_alive():
        if ids is tokens or (memory and ids.untyped_storage().data_ptr() == memory):
            return ids, row
    return None, {}


def _valid_positions(model: Any, call: Call, restarting: Any) -> Any:
    """Return the `position_ids` of the call if they restart in every document, else the row's."""
    given = call.get("position_ids")
    if not torch.is_tensor(given) or given is restarting or given.dim() != 2:
        return restarting if given is None else given
    if given.shape == restarting.shape:
        row = restarting.to(given.device)
        if torch.equal(given[0], torch.arange(len(row[0])).to(given)):  # as for one document
            return restarting
        if bool((given[row == 0] == 0).all()):
            return given
    raise ValueError(_refusal(model, given, " and with position_ids that do not restart in each"))


def _refusal(model: Any, tokens: Tensor, why: str = "") -> str:
    return (
        f"{type(model).__name__} was called on tokens of shape {tuple(tokens.shape[:2])} without "
        f"the boundaries of documents{why}; call model(**inputs), pass inputs['input_ids'] whole, "
        "or call one document or other rows inside `with trl_packing.other_rows()`"
    )


def _as_packed(model: Any, call: Call) -> Call:
    """Return a call as kernels need it: no mask, no new cache, no targets across documents."""
    boundaries = call["cu_seq_lens_q"]
    mask = call.get("attention_mask")
    if mask is not None:
        starts = host_boundaries(boundaries)
        last = max((x for x in starts if x < starts[-1]), default=0)  # padding may be hidden
        if not torch.is_tensor(mask) or mask.dim() != 2 or not mask[:, : last + 1].all():
            raise ValueError(
                f"{type(model).__name__} was called on packed documents with an attention_mask "
                "that hides tokens, or is not (1, T); leave it out"
            )
        call = call | {"attention_mask": None}
    call = for_kernels(call) | {"use_cache": has_cache(call)}
    if call.get("key_index") is not None:  # the collator has masked the labels of such a row
        return call
    tokens = host_values(boundaries)[-1]
    for name, places in (("labels", boundaries[:-1]), ("shift_labels", boundaries[1:] - 1)):
        labels = call.get(name)
        if not torch.is_tensor(labels) or labels.shape[1:] != (tokens,):
            continue  # those of a divided row were masked before
        if cached_values(labels) is None:
            # One more column for the boundaries of empty documents, which are T.
            at = places.to(labels.device).long().clamp(min=0)
            call = call | {name: pad(labels, (0, 1)).index_fill(1, at, -100)[:, :-1]}
    return call


@dataclass(eq=False)
class PackedWay:
    """How packed calls of `module`, and of its copies, run; kept by its wrapped forward.

    They run by ``run(module, inner, arguments)``, where `inner` is the forward before it was
    wrapped; None runs all calls unchanged. They set `implementation`, which does not travel with
    copies. `attention` names a backend that needs no boundaries inside and takes no prefixes. The
    `run` of a part of a model gets the boundaries of the packed call that runs, too. Rows may be
    divided over `num_ranks`.
    """

    module: weakref.ref
    inner: Forward
    run: Callable[..., Any] | None = None
    implementation: str | None = None
    attention: str | None = None
    is_part: bool = False
    num_ranks: int = 1


def wrap_packed_calls(
    module: nn.Module,
    run: Callable[..., Any] | None,
    implementation: str | None = None,
    attention: str | None = None,
    is_part: bool = False,
    num_ranks: int = 1,
) -> None:
    """Run packed calls of `module` by `run`, below wrappers of others; arguments: `PackedWay`."""
    way = packed_way(module)
    if way is None or way.module() is not module:  # those of a copy are the original's
        if way is None and run is None:
            return
        inner = unbind_forward(module.forward, module) if way is None else way.inner
        way = PackedWay(weakref.ref(module), inner)
        module.forward = MethodType(_wrapped(module, way), module)
    way.run, way.implementation, way.attention = run, implementation, attention
    way.is_part, way.num_ranks = is_part, num_ranks


def packed_way(module: nn.Module) -> PackedWay | None:
    """Return how packed calls of `module` run, of a copy as of its original, None if unwrapped."""
    found = vars(module).get("forward")
    way = None
    while found is not None and way is None:
        way, found = getattr(found, "packed_way", None), getattr(found, "__wrapped__", None)
    return way


def run_unchanged(module: nn.Module, forward: Forward, arguments: Call) -> Any:
    """Run a packed call as it is: kernels, or the native attention, read the boundaries."""
    return forward(**arguments)


def run_known_arguments(module: nn.Module, forward: Forward, arguments: Call) -> Any:
    """Run a packed call of a whole model, whose forward may drop boundaries (falcon, mamba)."""
    parameters = inspect.signature(type(module).forward).parameters.values()
    if not any(p.kind is p.VAR_KEYWORD for p in parameters):
        taken = {p.name for p in parameters} | {"fused_lm_head"}
        arguments = {k: v for k, v in arguments.items() if k in taken}
    return forward(**arguments)


def _wrapped(module: nn.Module, way: PackedWay) -> Forward:
    names = list(inspect.signature(type(module).forward).parameters)[1:]

    @functools.wraps(type(module).forward)
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if way.run is None:
            return way.inner(self, *args, **kwargs)
        if way.is_part:
            return _run_part(way, dict(zip(names, args, strict=False)) | kwargs, self)
        enabled = None if _running is not None else getattr(self, "enabled_packing", None)
        if enabled is not None and not enabled.is_checking:
            run = functools.partial(_run_call, way, names, self)
            return enabled.run(self, run, dict(zip(names, args, strict=False)) | kwargs)
        return _run_call(way, names, self, *args, **kwargs)

    forward.packed_way = way  # type: ignore[attr-defined]
    return forward


def _run_call(
    way: PackedWay, names: Sequence[str], module: nn.Module, *args: Any, **kwargs: Any
) -> Any:
    before = _running
    if before is not None and not before[0].attention and kwargs.get("cu_seq_lens_q") is None:
        kwargs |= before[1]
    args, kwargs = complete_arguments(module, names, args, kwargs)
    if kwargs.get("cu_seq_lens_q") is None or kwargs.get("attention_mask") is not None:
        return way.inner(module, *args, **kwargs)
    kwargs = dict(zip(names, args, strict=False)) | kwargs
    if not torch.compiler.is_compiling():
        if before is None:
            _settle(way.module(), module)
        _check_covers_row(kwargs, way.num_ranks)
    if way.implementation is not None and current_implementation(module) != way.implementation:
        set_implementation(module, way.implementation)
    if kwargs.get("key_index") is not None:
        attention = way.attention or current_implementation(module)
        if attention not in PACKED_NAMES and not gathers_prefix_keys(attention):
            raise NotImplementedError(
                f"attention={attention!r} has one set of boundaries for queries and keys, and the "
                "row has shared prefixes (key_index); set prefix_sharing='off'"
            )
    row = {name: kwargs[name] for name in BOUNDARIES if name in kwargs}
    run = way.run or run_unchanged  # settled in another way
    return _run_inside((way, row), run, module, functools.partial(way.inner, module), kwargs)


def _run_part(way: PackedWay, arguments: Call, module: nn.Module) -> Any:
    row = packed_row()
    if row is None:
        refuse_recomputation(next(x for x in arguments.values() if torch.is_tensor(x)))
        return way.inner(module, **arguments)
    run: Any = way.run
    return _run_inside((way, {}), run, module, functools.partial(way.inner, module), arguments, row)


# Methods that are called before packed calls of a module, and of copies of it.
_settles: weakref.WeakKeyDictionary[Any, weakref.WeakMethod] = weakref.WeakKeyDictionary()


def settle_first(model: nn.Module, settle: Callable[[nn.Module], None] | None) -> None:
    """Call ``settle(called)`` before packed calls of `model`, its parts and copies; None: never."""
    for module in model.modules():
        if settle is None:
            _settles.pop(module, None)
        else:
            _settles[module] = weakref.WeakMethod(settle)


@torch.compiler.disable  # called from frames that torch.compile leaves to Python
def _settle(module: nn.Module | None, called: nn.Module) -> None:
    settle = _settles[module]() if module in _settles else None
    if settle is not None:
        settle(called)


@torch.compiler.disable
def _check_covers_row(arguments: Call, num_ranks: int) -> None:
    """Raise ValueError unless boundaries end with the row: kernels compute nothing behind them."""
    row = tokens_of(arguments)
    last = host_values(arguments["cu_seq_lens_q"])[-1]
    if row is not None and last not in (row.shape[1], row.shape[1] * num_ranks):
        raise ValueError(
            f"cu_seq_lens_q ends at {last}, and the row has {row.shape[1]} tokens; nn.DataParallel "
            "splits it: start one process for each GPU, or set CUDA_VISIBLE_DEVICES to one"
        )


def unbind_forward(forward: Forward, module: nn.Module) -> Forward:
    """Return `forward` of `module` as a function of the module, which may be a copy."""
    if isinstance(forward, functools.partial) and forward.args == (module,):  # accelerate's
        return forward.func
    function: Any = getattr(forward, "__func__", None)
    if function is None or getattr(forward, "__self__", None) is not module:
        return lambda _self, *args, **kwargs: forward(*args, **kwargs)
    held = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    if "original_forward" not in held:
        return function
    native = unbind_forward(held["original_forward"].cell_contents, module)

    # TRL's head would run other calls on the model that was copied.
    def call(self: nn.Module, *args: Any, fused_lm_head: bool = False, **kwargs: Any) -> Any:
        if fused_lm_head:
            return function(self, *args, fused_lm_head=True, **kwargs)
        return native(self, *args, **kwargs)

    return call
