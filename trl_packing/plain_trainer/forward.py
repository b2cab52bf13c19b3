"""The forward of an enabled model: recognizes packed rows, ensures isolation, computes the loss.

    attention_mask   1 1 1 2 2        rows of `PackedDataset`, stacked by Trainer's own collators
    cu_seq_lens_q    0 3 5            batches of `PackedCollator`
    position_ids     0 1 2 0 1        batches of transformers' `DataCollatorWithFlattening`

Each of these locates the documents of a single row. In training, a call without them is refused.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trl_packing.attention.calls import complete_call, other_rows, unbind_forward
from trl_packing.attention.model_facts import length_constants, unwrap_peft
from trl_packing.attention.neftune import announce_documents, scale_noise_by_document
from trl_packing.attention.sharding import is_sharded
from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.guard import IsolationGuard, Precision
from trl_packing.isolation.probes import random_tokens
from trl_packing.loss.next_token import next_token_loss

logger = logging.getLogger(__name__)

VIRTUAL_TOKENS = (
    "a packed row has several documents, but virtual tokens (prompt and prefix tuning), a cache or "
    "inputs_embeds belong to one document; train such a model with PackedSFTTrainer"
)


@dataclass
class Packing:
    """The state that `enable_packing` keeps on a model.

    Attributes:
        guard: checks isolation.
        documents: token ids ``(T,)`` of the documents to check.
        reach: tokens of the longest document that the check covers.
        divides_by_count: whether the native loss is divided by `num_items_in_batch`.
        inner_forward: the forward of the instance under ours, as a function of the model. None if
            the model has the forward of its class.
    """

    guard: IsolationGuard
    documents: list[np.ndarray]
    reach: int
    divides_by_count: bool
    inner_forward: Callable[..., Any] | None = None


def find_packing(model: nn.Module) -> Packing | None:
    """Return the state that `enable_packing` keeps on `model`, if it was called."""
    return getattr(vars(model).get("forward"), "packing", None)


def wrap_forward(model: nn.Module, packing: Packing) -> None:
    """Make `model` recognize packed rows. An earlier wrapper of ours is replaced."""
    earlier = find_packing(model)
    if earlier is None:
        packing.inner_forward = _pop_forward(model)
    else:
        packing.inner_forward = earlier.inner_forward
        packing.divides_by_count = earlier.divides_by_count

    # The state is in a closure and not on the model, which can be pickled without our classes.
    @functools.wraps(type(model).forward)  # Trainer and `generate` read the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _run(self, packing, *args, **kwargs)

    forward.packing = packing  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


@contextmanager
def unwrap_forward(model: Any, packing: Packing) -> Iterator[None]:
    """Take our wrapper, and those put on top of it, off the model inside the block.

    `install_attention` wraps the forward too, and recognizes its wrapper only on top.
    """
    on_top = vars(model).pop("forward")
    if packing.inner_forward is not None:
        model.forward = MethodType(packing.inner_forward, model)
    try:
        yield
    finally:
        packing.inner_forward = _pop_forward(model)
        model.forward = on_top


def _pop_forward(model: nn.Module) -> Callable[..., Any] | None:
    """Remove the forward of the instance and return it as a function of the model."""
    forward = vars(model).pop("forward", None)
    return None if forward is None else unbind_forward(forward, model)


def _run(self: Any, packing: Packing, *args: Any, **kwargs: Any) -> Any:
    names = list(inspect.signature(type(self).forward).parameters)[1:]
    call = dict(zip(names, args, strict=False)) | kwargs
    if call.get("key_index") is not None:
        raise ValueError(
            f"{type(self).__name__} was called on a row with shared prefixes (key_index), whose "
            "tokens count once for each of their documents; train it with PackedSFTTrainer, or "
            "set shares_prefixes=False in PackedCollator"
        )
    batch = _packed_batch(self, call)
    if batch is None:  # maybe a row in memory or of our trainer; else refused in training
        completed = complete_call(self, call)
        batch = None if completed is call else _packed_batch(self, completed)
    if batch is not None:
        _ensure_isolation(self, packing, batch)
        with announce_documents(boundaries=batch["cu_seq_lens_q"]):
            return run_with_packed_loss(_inner_forward(self, packing), batch)
    with other_rows():  # the model's calls of its parts or embeddings are not on packed rows
        if call.get("num_items_in_batch") is not None and not packing.divides_by_count:
            return run_with_packed_loss(_inner_forward(self, packing), call)
        return _inner_forward(self, packing)(*args, **kwargs)


def _inner_forward(model: Any, packing: Packing) -> Callable[..., Any]:
    return functools.partial(packing.inner_forward or type(model).forward, model)


# --- packed rows ----------------------------------------------------------------------------------


@torch.compiler.disable
def _packed_batch(model: nn.Module, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the call as a packed one, None if its row is not packed.

    Args:
        model: the model that is called.
        call: arguments of its forward by name.

    Raises:
        ValueError: the packed call has a mask, a cache, virtual tokens, or a label on the first
            token of a document.
    """
    mask, ids = call.get("attention_mask"), call.get("input_ids")
    if call.get("cu_seq_lens_q") is not None:
        if mask is not None:
            raise ValueError(
                "a packed batch came with an attention_mask, under which documents see each "
                "other; leave it out: batches of PackedCollator have none"
            )
        return for_kernels(call)
    lengths = _lengths_of_row(model, call)
    if lengths is None:
        return None
    if ids is None or call.get("past_key_values") is not None or _differs_in_length(mask, ids):
        raise ValueError(VIRTUAL_TOKENS)
    labels = call.get("labels")
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    if labels is not None and (labels[0, starts.to(labels.device)] != IGNORE_INDEX).any():
        raise ValueError(
            "the first token of a packed document has a label, which the document before it would "
            "predict; keep the labels of PackedDataset (a collator for language modeling replaces "
            "them)"
        )
    boundaries = boundaries_of_row(torch.from_numpy(lengths))
    batch = {name: value for name, value in call.items() if name != "attention_mask"}
    return batch | {
        name: value.to(ids.device) if torch.is_tensor(value) else value
        for name, value in boundaries.items()
    }


def _lengths_of_row(model: nn.Module, call: dict[str, Any]) -> np.ndarray | None:
    """Return the lengths ``(N,)`` of the documents in the call's row, None if it is not packed.

    Raises:
        ValueError: several rows have numbered documents.
    """
    mask, position_ids = call.get("attention_mask"), call.get("position_ids")
    has_cache = call.get("past_key_values") is not None
    if has_cache and not model.training:  # `generate`
        return None
    if torch.is_tensor(mask):
        # Any number type but bool: PEFT's virtual tokens make the mask a float.
        if mask.dim() != 2 or mask.dtype == torch.bool or int(mask.max()) < 2:
            return None
        if len(mask) > 1:
            raise ValueError(
                f"a packed batch is one row, got {len(mask)} with numbered documents; pass the "
                "PackedDataset itself to Trainer, so that each micro-batch is one row"
            )
        return lengths_from_numbers(mask[0].cpu().numpy())
    if mask is not None or not torch.is_tensor(position_ids) or len(position_ids) != 1:
        return None
    # In training, positions of one document are its boundaries too.
    least = 1 if model.training and not has_cache else 2
    if position_ids.dim() != 2 or int((position_ids == 0).sum()) < least:
        return None
    return lengths_from_numbers((position_ids[0] == 0).cumsum(0).cpu().numpy())


def _differs_in_length(mask: Any, ids: Tensor) -> bool:
    return torch.is_tensor(mask) and mask.shape[-1] != ids.shape[-1]


# --- the loss -------------------------------------------------------------------------------------


def run_with_packed_loss(forward: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Run `forward` without labels, and put the loss into its output."""
    labels, num_items = call.pop("labels", None), call.pop("num_items_in_batch", None)
    output = forward(**call)
    if labels is None:
        return output
    is_tuple = isinstance(output, tuple)
    logits = output[0] if is_tuple else output.logits
    loss = next_token_loss(logits, labels, num_items)
    if is_tuple:
        return (loss, *output)
    others = {name: value for name, value in output.items() if name != "loss"}
    output_type: type[ModelOutput] = type(output)
    return output_type(loss=loss, **others)


# --- isolation ------------------------------------------------------------------------------------


@torch.compiler.disable
def _ensure_isolation(model: Any, packing: Packing, batch: dict[str, Any]) -> None:
    """Check what no earlier call has: another device, precision, mode or length."""
    scale_noise_by_document(unwrap_peft(model))  # Trainer registers its hook when it trains
    guard, documents = packing.guard, packing.documents
    longest = int(batch["max_length_q"])
    constants = length_constants(model) if longest > packing.reach else []
    crossed = [c for c in constants if packing.reach <= c < longest]
    training, precision = model.training, precision_from_model(model)
    if not crossed and guard.covers(documents, training=training, precision=precision):
        return
    if is_sharded(model):
        _check_sharded(packing, longest, crossed)
        logger.warning(
            "the model is sharded: what was checked before is relied on for "
            f"{precision.device}, {precision.dtype}, training={training}"
        )
        guard.trust(documents, training=training, precision=precision)
        return
    if crossed:
        by_length = sorted([*documents, *_documents_from_batch(model, batch)], key=len)
        documents = [by_length[0], by_length[-1]]
    guard.model = model  # a copy of an enabled model shares the state of the original
    with unwrap_forward(model, packing):
        guard.ensure(documents, training=training, precision=precision)
    if crossed:  # later checks, in other modes or precisions, include these documents
        packing.reach, packing.documents = longest, documents


def _check_sharded(packing: Packing, longest: int, crossed: list[int]) -> None:
    """Raise RuntimeError if a sharded model needs a check.

    Its forward cannot call it: other ranks would not send their part of the weights.
    """
    if crossed:
        raise RuntimeError(
            f"a document of {longest:,} tokens is beyond a length at which the model changes "
            f"({crossed[-1]:,}), the check covered {packing.reach:,} tokens, and a sharded model "
            "cannot be checked again; give the documents before: enable_packing(model, dataset)"
        )
    if not packing.guard.passed:
        raise RuntimeError(
            "no check of this model has passed, and a sharded model cannot be checked in its "
            "forward; call enable_packing(model) before Trainer, and let it return"
        )


def _documents_from_batch(model: Any, batch: dict[str, Any]) -> list[np.ndarray]:
    """Return the token ids ``(T,)`` of each document; random ones if the row came embedded."""
    boundaries = batch["cu_seq_lens_q"].cpu().numpy()
    if batch.get("input_ids") is None:
        draw = random_tokens(unwrap_peft(model), np.random.default_rng(0))
        return [draw(int(length)) for length in np.diff(boundaries)]
    return np.split(batch["input_ids"][0].cpu().numpy(), boundaries[1:-1])


def precision_from_model(model: nn.Module) -> Precision:
    """Return the device and dtype in which `model` runs now, under autocast or not."""
    parameter = next(model.parameters())
    device = parameter.device.type
    is_cast = torch.is_autocast_enabled(device)
    return Precision(device, torch.get_autocast_dtype(device) if is_cast else parameter.dtype)
