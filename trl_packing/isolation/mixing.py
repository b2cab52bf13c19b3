"""Finds the modules of a model in which documents of a row affect each other.

Two rows hold the same document behind two different ones. In the first module that returns other
values of it although it was given the same, the documents mix. That module is run by document, and
the rows run again, until no module inside the model mixes them.
"""

from collections.abc import Iterator
from contextlib import ExitStack
from typing import Any

import torch
from torch import Tensor, nn

from trl_packing.attention.calls import Call, packed_way
from trl_packing.attention.model_facts import unwrap_model
from trl_packing.attention.ranks import all_reduce_max
from trl_packing.attention.recurrent import run_parts_by_document
from trl_packing.isolation.check import collate_probe
from trl_packing.isolation.preserve import preserve_state, restore_state
from trl_packing.isolation.probes import random_tokens
from trl_packing.packing.collator import PackedCollator

_BEFORE, _TOKENS = 23, 18  # of the other document and the one that is compared
# A state reaches the first tokens of the next document; these are compared.
_COMPARED = 6
_ROUNDS = 8
# Values that differ by more than these times their rounding are not the same.
_ROUNDING = 4


@torch.no_grad()
def run_mixing_modules_by_document(
    model: nn.Module, training: bool | None, *, ranks_alike: bool = False
) -> list[str]:
    """Run the modules of `model` that mix documents by document; return their classes.

    The attention to run with is installed. Under ZeRO-3, where every call of a module gathers its
    weights, none is.

    Args:
        model: it may be wrapped.
        training: the mode of the forward; None: that of the model.
        ranks_alike: all ranks are here, and run equally many forwards.
    """
    inner = unwrap_model(model)
    if any(hasattr(parameter, "ds_id") for parameter in inner.parameters()):
        return []  # ranks have other numbers of documents, and would wait for each other
    draw = random_tokens(inner)
    document = draw(_TOKENS)
    batches = []
    for _ in range(2):
        row = [{"input_ids": draw(_BEFORE)}, {"input_ids": document}]
        batch = collate_probe(inner, PackedCollator(), row)
        del batch["labels"]
        batches.append(batch)
    found: list[str] = []
    with preserve_state(model, training):
        for _ in range(_ROUNDS):
            kind = _first_that_mixes(model, inner, batches)
            is_new = kind is not None and kind.__name__ not in found
            if not (all_reduce_max(int(is_new)) if ranks_alike else is_new):
                break
            if kind is not None and is_new:
                run_parts_by_document(inner, kind)
                found.append(kind.__name__)
    return found


def _first_that_mixes(model: Any, inner: nn.Module, batches: list[Call]) -> type | None:
    """Return the class of the first module that mixes the documents of rows, None without one."""
    wholes = {id(m) for m in inner.modules() if (way := packed_way(m)) and not way.is_part}
    seen: list[list[tuple[nn.Module, list[Tensor], list[Tensor]]]] = []
    for batch in batches:
        calls: list[tuple[nn.Module, list[Tensor], list[Tensor]]] = []

        def record(module: nn.Module, args: Any, kwargs: Any, output: Any) -> None:
            given = list(_of_document((args, tuple(kwargs.values()))))
            calls.append((module, given, list(_of_document(output))))  # noqa: B023

        with ExitStack() as stack, restore_state(model):
            for module in inner.modules():
                if id(module) not in wholes:
                    stack.enter_context(module.register_forward_hook(record, with_kwargs=True))
            model(**batch)
        seen.append(calls)
    for (module, *first), (other, *second) in zip(*seen, strict=False):
        if module is not other:
            return None
        inputs, outputs = ((a, b) for a, b in zip(first, second, strict=True))
        if _are_same(*inputs) and not _are_same(*outputs):
            return type(module)
    return None


def _of_document(values: Any) -> Iterator[Tensor]:
    """Yield the values of the document that is compared in tensors ``(1, T, ...)``."""
    if isinstance(values, (tuple, list)):
        for value in values:
            yield from _of_document(value)
    elif torch.is_tensor(values) and values.shape[:2] == (1, _BEFORE + _TOKENS):
        yield values[0, _BEFORE : _BEFORE + _COMPARED].clone()


def _are_same(values: list[Tensor], others: list[Tensor]) -> bool:
    for value, other in zip(values, others, strict=True):
        if not value.is_floating_point():
            if not torch.equal(value, other):
                return False
            continue
        allowed = _ROUNDING * torch.finfo(value.dtype).eps * float(value.abs().max())
        if not float((value - other).abs().max()) <= allowed:
            return False
    return True
