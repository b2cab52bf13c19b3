"""Packing for plain `transformers.Trainer`: teaches a model to recognize packed rows.

    enable_packing(model)                                      this module
    dataset = make_supervised_dset(tokenizer, data_path, ...)  supervised.py, dataset.py
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.train()

A call of the model on a packed row then runs without a mask and without a cache, by the fastest
attention backend that isolates documents on this model (`IsolationGuard`). Its loss is the mean
over the trained tokens of the step, also if the model's class ignores `num_items_in_batch`. Other
calls are unchanged.
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
from torch import nn

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.implementation import restore_implementation
from trl_packing.config import ISOLATION_CHECKS
from trl_packing.isolation.guard import IsolationGuard, Precision
from trl_packing.isolation.probes import random_tokens
from trl_packing.isolation.sample import representative_documents
from trl_packing.models.forward import unbind_forward
from trl_packing.models.introspection import length_constants, unwrap_peft
from trl_packing.models.neftune import announce_documents, scale_noise_by_document
from trl_packing.models.sharding import is_sharded
from trl_packing.plain_trainer.dataset import PackedDataset, enabled_models
from trl_packing.plain_trainer.forward import run_with_packed_loss
from trl_packing.plain_trainer.requirements import (
    check_documents,
    check_loss,
    check_model,
    divides_by_count,
)
from trl_packing.recognition.calls import complete_call
from trl_packing.recognition.current_row import other_rows
from trl_packing.recognition.packed_batch import packed_batch
from trl_packing.versions import warn_of_untested_versions

logger = logging.getLogger(__name__)

warn_of_untested_versions()

_REACH = 1024  # tokens of the longest probe if no data set is given


def enable_packing(
    model: nn.Module,
    dataset: Any = None,
    *,
    attention: str = "auto",
    isolation_check: str = "error",
) -> AttentionChoice:
    """Make `model` isolate the documents of packed rows in any trainer; return the backend.

    Call it before `Trainer` is created, on the model that `Trainer` is given (PEFT's, if it is
    wrapped). The model is saved as if packing had not been enabled.

    Plain Trainer's `eval_loss` remains a mean of the means of micro-batches. `PackedSFTTrainer`
    reports the mean over all tokens.

    Args:
        model: a decoder of transformers, which PEFT may wrap.
        dataset: the data that it will train on: a `PackedDataset`, or token ids of some documents.
            The check is then as long as the longest document. Without a data set, the check covers
            1,024 tokens, and a document beyond a length at which the model changes is checked when
            it is first used.
        attention: as in `PackedSFTConfig`.
        isolation_check: as in `PackedSFTConfig`. The check runs here. It is repeated in the first
            packed call on another device, in another precision or in another mode, since Trainer
            sets these later.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model or a setting cannot be packed exactly.
        RuntimeError: the model cannot run packed documents, or they leak into each other with
            every backend that may be used.
    """
    base = unwrap_peft(model)
    check_model(model, base)
    if isolation_check not in ISOLATION_CHECKS:
        raise ValueError(
            f"isolation_check={isolation_check!r} is not known; choose one of "
            f"{', '.join(ISOLATION_CHECKS)}"
        )
    if isolation_check != "off":
        check_loss(model, base)  # before the model is changed: if refused, it stays as it was
    documents = _documents_from_dataset(dataset)
    check_documents(base, dataset, documents)
    guard = IsolationGuard(
        model,
        attention=attention,
        isolation_check=isolation_check,
        fused_head=False,
        agree=False,  # no forward waits for other ranks, and here they need not all be present
        max_length=_REACH,
        modes_share_lengths=False,
    )
    packing = _Packing(
        guard, documents, max([_REACH, *map(len, documents)]), divides_by_count(base)
    )
    _wrap_forward(model, packing)
    # Trainer then counts the targets of a step, and `run_with_packed_loss` divides by them.
    base.accepts_loss_kwargs = True
    with _unwrap_forward(model, packing):
        guard.ensure(documents, training=True, precision=_precision(model))
    restore_implementation(base)  # packed calls set it
    enabled_models.add(model)
    return guard.attention


@dataclass
class _Packing:
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


def _documents_from_dataset(dataset: Any) -> list[np.ndarray]:
    if dataset is None:
        return []
    if isinstance(dataset, PackedDataset):
        return [dataset.token_ids(i) for i in representative_documents(dataset.lengths)]
    return [np.asarray(document, dtype=np.int64) for document in dataset]


# --- the forward of an enabled model --------------------------------------------------------------


def packing_of(model: nn.Module) -> _Packing | None:
    """Return the state that `enable_packing` keeps on `model`, if it was called."""
    return getattr(vars(model).get("forward"), "packing", None)


def _wrap_forward(model: nn.Module, packing: _Packing) -> None:
    """Make `model` recognize packed rows. An earlier wrapper of ours is replaced."""
    earlier = packing_of(model)
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
def _unwrap_forward(model: Any, packing: _Packing) -> Iterator[None]:
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


def _run(self: Any, packing: _Packing, *args: Any, **kwargs: Any) -> Any:
    names = list(inspect.signature(type(self).forward).parameters)[1:]
    call = dict(zip(names, args, strict=False)) | kwargs
    batch = packed_batch(self, call)
    if batch is None:  # maybe a packed row whose boundaries the user's loss left out
        completed = complete_call(self, call)
        batch = None if completed is call else packed_batch(self, completed)
    if batch is not None:
        _ensure_isolation(self, packing, batch)
        with announce_documents(boundaries=batch["cu_seq_lens_q"]):
            return run_with_packed_loss(_inner_forward(self, packing), batch)
    with other_rows():  # the model's calls of its parts or embeddings are not on packed rows
        if call.get("num_items_in_batch") is not None and not packing.divides_by_count:
            return run_with_packed_loss(_inner_forward(self, packing), call)
        return _inner_forward(self, packing)(*args, **kwargs)


def _inner_forward(model: Any, packing: _Packing) -> Callable[..., Any]:
    return functools.partial(packing.inner_forward or type(model).forward, model)


# --- isolation ------------------------------------------------------------------------------------


@torch.compiler.disable
def _ensure_isolation(model: Any, packing: _Packing, batch: dict[str, Any]) -> None:
    """Check what no earlier call has: another device, precision, mode or length."""
    scale_noise_by_document(unwrap_peft(model))  # Trainer registers its hook when it trains
    guard, documents = packing.guard, packing.documents
    longest = int(batch["max_length_q"])
    constants = length_constants(model) if longest > packing.reach else []
    crossed = [c for c in constants if packing.reach <= c < longest]
    training, precision = model.training, _precision(model)
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
    with _unwrap_forward(model, packing):
        guard.ensure(documents, training=training, precision=precision)
    if crossed:  # later checks, in other modes or precisions, include these documents
        packing.reach, packing.documents = longest, documents


def _check_sharded(packing: _Packing, longest: int, crossed: list[int]) -> None:
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


def _precision(model: nn.Module) -> Precision:
    """Return the device and dtype in which `model` runs now, under autocast or not."""
    parameter = next(model.parameters())
    device = parameter.device.type
    is_cast = torch.is_autocast_enabled(device)
    return Precision(device, torch.get_autocast_dtype(device) if is_cast else parameter.dtype)
