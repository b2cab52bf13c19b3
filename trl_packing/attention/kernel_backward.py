"""Runs one small backward for each kind of call that a model makes of an attention kernel.

The isolation check runs forwards only. A kernel may lack a backward for this GPU, head size or
option (flash-attn 4 asserts in it), which would stop the first step, or its backward may reach into
other documents. The first call of each kind in a check therefore runs again, with gradients:

    row            A A A A B B B          the gradient of B's output
    query, key     0 0 0 0 x x x          must be zero outside B, and finite everywhere

In a row with shared prefixes, B is the last segment, and its gradient may reach its prefix.
"""

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS


@contextmanager
def run_backward_once(implementation: str) -> Iterator[list[str]]:
    """Run one backward for each kind of call of the attention function `implementation`.

    The calls themselves return as usual.

    Yields:
        The faults found so far: the kernel raises, a gradient is not finite, or it reaches into
        another document.
    """
    function, tried = ALL_ATTENTION_FUNCTIONS[implementation], set()
    faults: list[str] = []

    @functools.wraps(function)
    def attention(
        module: nn.Module, query: Tensor, key: Tensor, value: Tensor, *args: Any, **kwargs: Any
    ) -> Any:
        output = function(module, query, key, value, *args, **kwargs)
        kind = _kind(query, key, value, kwargs)
        if kind not in tried:
            tried.add(kind)
            fault = _fault(function, module, (query, key, value), args, kwargs)
            faults.extend([fault] if fault else [])
        return output

    # The interface looks into the instance first, so the global registration stays unchanged.
    local = ALL_ATTENTION_FUNCTIONS._local_mapping
    before = local.get(implementation)
    ALL_ATTENTION_FUNCTIONS[implementation] = attention
    try:
        yield faults
    finally:
        if before is None:
            del ALL_ATTENTION_FUNCTIONS[implementation]
        else:
            ALL_ATTENTION_FUNCTIONS[implementation] = before


def _kind(query: Tensor, key: Tensor, value: Tensor, kwargs: dict[str, Any]) -> tuple[Any, ...]:
    """Return the properties that select the kernel; the length of the row is not one of them."""
    sizes = [(x.shape[1], x.shape[-1], x.dtype) for x in (query, key, value)]
    is_windowed = kwargs.get("sliding_window") is not None
    rows = (kwargs.get("cu_seq_lens_q") is not None, kwargs.get("key_index") is not None)
    return (*sizes, is_windowed, kwargs.get("softcap"), *rows)


@torch.enable_grad()
def _fault(
    function: Callable[..., Any],
    module: nn.Module,
    tensors: tuple[Tensor, ...],
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
) -> str | None:
    """Return the fault of one backward of `function`, or None."""
    leaves = [x.detach().requires_grad_() for x in tensors]
    if kwargs.get("sliding_window") is not None:
        # Short rows fit into the window, and transformers would skip it.
        half = max(tensors[1].shape[2] // 2, 1)
        kwargs = kwargs | {"sliding_window": min(kwargs["sliding_window"], half)}
    start = _start_of_last_document(kwargs.get("cu_seq_lens_q"))
    try:
        output = function(module, *leaves, *args, **kwargs)[0]  # (rows, T, heads, value_dim)
        found = torch.autograd.grad(output[:, start:].float().sum(), leaves)
    except torch.OutOfMemoryError:
        raise
    except Exception as error:
        return f"its backward raises {type(error).__name__}: {error}"
    unseen = torch.ones(output.shape[1], dtype=torch.bool)
    unseen[start:] = False
    beyond = [unseen, *[_not_seen_by_last_segment(unseen, kwargs)] * 2]
    for gradient, rows in zip(found, beyond, strict=True):  # (rows, heads, T, dim)
        if not torch.isfinite(gradient).all():
            return "its backward returns gradients that are not finite"
        if gradient[:, :, rows.to(gradient.device)].any():
            return "its backward reaches into the documents before it"
    return None


def _not_seen_by_last_segment(unseen: Tensor, kwargs: dict[str, Any]) -> Tensor:
    """Return `unseen` ``(T,)`` without the prefix of the last segment, if it has one."""
    index, boundaries = kwargs.get("key_index"), kwargs.get("cu_seq_lens_k")
    if index is None or boundaries is None:
        return unseen
    return unseen.index_fill(0, index[_start_of_last_document(boundaries) :].cpu(), False)


def _start_of_last_document(boundaries: Tensor | None) -> int:
    if boundaries is None:
        return 0
    return int(boundaries[:-1][boundaries.diff() > 0][-1])
