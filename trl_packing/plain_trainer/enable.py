"""Packing for plain `transformers.Trainer`: the model is told what a packed row is.

    enable_packing(model)                                      this module
    dataset = make_supervised_dset(tokenizer, data_path, ...)  supervised_dataset, packed_dataset
    trainer = Trainer(model, args, train_dataset=dataset)
    trainer.train()

A packed call of the model (packed_call) then runs without a mask and without a cache, by the
fastest attention that keeps the documents apart on this very model (exact_way), and its loss is the
mean over the step's tokens, whatever the class makes of `num_items_in_batch`. Every other call is
as it was.
"""

import functools
import inspect
import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import MethodType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.attention.backends import AttentionChoice, resolve_attention
from trl_packing.attention.implementation import restore_implementation
from trl_packing.config import ISOLATION_CHECKS
from trl_packing.data.model_limits import limits_of
from trl_packing.isolation.fallback import install_first, install_first_exact, with_fallbacks
from trl_packing.isolation.messages import why_not_exact
from trl_packing.isolation.probes import random_tokens
from trl_packing.models.forward import unbind_forward
from trl_packing.models.introspection import length_constants, requires, unwrap_peft
from trl_packing.models.neftune import announce_documents, scale_noise_by_document
from trl_packing.models.sharding import is_sharded
from trl_packing.models.state import preserve_state
from trl_packing.plain_trainer.dataset import PackedDataset, enabled_models
from trl_packing.plain_trainer.forward import next_token_loss, with_own_loss
from trl_packing.recognition.current_row import complete_call, other_rows
from trl_packing.recognition.packed_batch import VIRTUAL_TOKENS, packed_batch
from trl_packing.versions import warn_of_untested_versions

logger = logging.getLogger(__name__)

warn_of_untested_versions()

_REACH = 1024  # tokens of the longest probe, if it is not told which documents come
_LOSS_TOLERANCE = 1e-3  # of the model's own loss, which its dtype may round otherwise


def enable_packing(
    model: nn.Module,
    dataset: Any = None,
    *,
    attention: str = "auto",
    isolation_check: str = "error",
) -> AttentionChoice:
    """Let `model` keep the documents of packed rows apart in any trainer; return how it does.

    Call it before `Trainer` is made, on the model that it is given (PEFT's, if it is wrapped).
    Nothing of it is in what the model saves.

    dataset: what it will train on, a `PackedDataset` or token ids of some documents: the check is
        then as long as the longest of them. Without, it reaches up to 1,024 tokens, and a document
        beyond a length at which the model changes is checked when it comes.
    attention, isolation_check: as in `PackedSFTConfig`. The check runs here, and once more in the
        first packed call on another device, in another precision or mode, as Trainer sets them.

    Plain Trainer's `eval_loss` stays what it is, a mean of the means of micro-batches;
    `PackedSFTTrainer` reports the one over all tokens.

    Raises TypeError for what is no model, ValueError for models and settings that cannot be packed
    exactly, RuntimeError if documents see each other whichever way they are run.
    """
    base = unwrap_peft(model)
    _check_model(base)
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(VIRTUAL_TOKENS)
    if isolation_check not in ISOLATION_CHECKS:
        raise ValueError(
            f"isolation_check={isolation_check!r} is not known; choose one of "
            f"{', '.join(ISOLATION_CHECKS)}"
        )
    if isolation_check != "off":
        _check_loss(model, base)  # first: a model that is refused stays as it came
    documents = _some_documents(dataset)
    _check_readable(base, dataset, documents)
    packing = _Packing(
        attention,
        isolation_check,
        documents,
        reach=max([_REACH, *map(len, documents)]),
        class_takes_count=_takes_count(base),
    )
    before = _packing_of(model)
    if before is None:
        packing.below = _forward_taken_off(model)
    else:
        vars(model).pop("forward")
        packing.below, packing.class_takes_count = before.below, before.class_takes_count
    _put_on_top(model, packing)
    # Trainer then counts the targets of a step, whatever the class says: `with_own_loss` divides.
    base.accepts_loss_kwargs = True
    _take_exact_way(model, packing, _kind(model, training=True), documents)
    restore_implementation(base)  # packed calls set it
    enabled_models.add(model)
    assert packing.way is not None
    return packing.way


@dataclass
class _Packing:
    """What `enable_packing` keeps on a model."""

    attention: str
    isolation_check: str
    documents: list[np.ndarray]
    reach: int  # tokens of the longest document that is covered by the check
    class_takes_count: bool  # whether its own loss divides by `num_items_in_batch`
    below: Callable[..., Any] | None = None  # forward of the instance, unbound, under ours
    way: AttentionChoice | None = None
    checked: set[tuple[Any, ...]] = field(default_factory=set)


def _check_model(base: Any) -> None:
    config: Any = getattr(base, "config", None)
    if not isinstance(base, nn.Module) or config is None:
        raise TypeError(
            f"enable_packing takes a transformers model, got {type(base).__name__}; load it first, "
            "and call enable_packing(model) before Trainer(model, ...)"
        )
    if getattr(config, "is_encoder_decoder", False):
        raise ValueError(f"{type(base).__name__} is an encoder-decoder: only decoders are packed")
    if "attention_mask" not in inspect.signature(base.forward).parameters:
        raise ValueError(
            f"{type(base).__name__} takes no attention_mask, by which Trainer would pass on where "
            "the documents of a row are; train it with PackedSFTTrainer"
        )
    if getattr(config.get_text_config(), "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True adds the balance of experts to the loss, which depends on "
            "what shares a micro-batch; set model.config.output_router_logits = False, or train "
            "with PackedSFTTrainer"
        )


def _takes_count(base: Any) -> bool:
    """Whether the class divides its loss by `num_items_in_batch`, as Trainer would find out."""
    says = getattr(base, "accepts_loss_kwargs", None)
    if says is not None:
        return bool(says)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)


def _some_documents(dataset: Any) -> list[np.ndarray]:
    """Return the shortest, a middling and the longest document."""
    if dataset is None:
        return []
    if isinstance(dataset, PackedDataset):
        order = np.argsort(dataset.lengths, kind="stable")
        chosen = sorted({int(order[i]) for i in (0, len(order) // 2, -1)})
        return [dataset.token_ids(i) for i in chosen]
    return [np.asarray(document, dtype=np.int64) for document in dataset]


def _check_readable(base: Any, dataset: Any, documents: Sequence[np.ndarray]) -> None:
    """Raise ValueError for ids, labels and lengths that the model would fail on."""
    limits = limits_of(base)
    if isinstance(dataset, PackedDataset):
        dataset.check(limits)
        return
    for number, document in enumerate(documents):
        limits.check_document({"input_ids": document}, f"document {number}")


# --- the forward of an enabled model --------------------------------------------------------------


def _forward_taken_off(model: nn.Module) -> Callable[..., Any] | None:
    """Take the forward of the instance off and return it as a function of the model."""
    forward = vars(model).pop("forward", None)
    return None if forward is None else unbind_forward(forward, model)


def _put_on_top(model: nn.Module, packing: _Packing) -> None:
    # In a closure, not on the model: pickled, the model shall need nothing of ours.
    @functools.wraps(type(model).forward)  # Trainer and `generate` read the signature
    def forward(self: nn.Module, *args: Any, **kwargs: Any) -> Any:
        return _forward(self, packing, *args, **kwargs)

    forward.packing = packing  # type: ignore[attr-defined]
    model.forward = MethodType(forward, model)


def _packing_of(model: nn.Module) -> _Packing | None:
    return getattr(vars(model).get("forward"), "packing", None)


def _forward(self: Any, packing: _Packing, *args: Any, **kwargs: Any) -> Any:
    names = list(inspect.signature(type(self).forward).parameters)[1:]
    named = dict(zip(names, args, strict=False)) | kwargs
    batch = packed_batch(self, named)
    if batch is None:  # maybe a row of ours whose boundaries a loss of the user's left out
        completed = complete_call(self, named)
        batch = None if completed is named else packed_batch(self, completed)
    if batch is not None:
        _check_once(self, packing, batch)
        with announce_documents(boundaries=batch["cu_seq_lens_q"]):
            return with_own_loss(_below(self, packing), batch)
    with other_rows():  # its own calls, of parts of it or of its embeddings, are no packed ones
        if named.get("num_items_in_batch") is not None and not packing.class_takes_count:
            return with_own_loss(_below(self, packing), named)
        return _below(self, packing)(*args, **kwargs)


def _below(model: Any, packing: _Packing) -> Callable[..., Any]:
    return functools.partial(packing.below or type(model).forward, model)


# --- what is exact --------------------------------------------------------------------------------


def _kind(model: nn.Module, *, training: bool) -> tuple[Any, ...]:
    """Return what a check holds for: the kind of device, the precision and the mode."""
    parameter = next(model.parameters())
    return parameter.device.type, _precision(parameter), training


def _precision(parameter: Tensor) -> torch.dtype:
    device = parameter.device.type
    is_cast = torch.is_autocast_enabled(device)
    return torch.get_autocast_dtype(device) if is_cast else parameter.dtype


@torch.compiler.disable
def _check_once(model: Any, packing: _Packing, batch: dict[str, Any]) -> None:
    """Check what the calls before did not: another device, precision, mode or length."""
    scale_noise_by_document(unwrap_peft(model))  # Trainer registers its hook when it trains
    kind, longest = _kind(model, training=model.training), int(batch["max_length_q"])
    constants = length_constants(model) if longest > packing.reach else []
    crossed = [c for c in constants if packing.reach <= c < longest]
    if kind in packing.checked and not crossed:
        return
    if packing.isolation_check == "off" and kind[:2] in {known[:2] for known in packing.checked}:
        return
    if is_sharded(model):
        # A forward inside its forward would gather weights that other ranks do not send.
        if crossed:
            raise RuntimeError(
                f"a document of {longest:,} tokens is beyond a length at which the model changes "
                f"({crossed[-1]:,}), the check went up to {packing.reach:,}, and the model is "
                "sharded by now; tell it what comes: enable_packing(model, dataset)"
            )
        if not packing.checked:
            raise RuntimeError(
                "no check of this model has passed, and none can be made in a forward of a sharded "
                "model; call enable_packing(model) before Trainer, and let it return"
            )
        logger.warning(f"the model is sharded: what was checked before is relied on for {kind}")
        packing.checked.add(kind)
        return
    documents = packing.documents
    if crossed:
        both = sorted([*documents, *_documents_of(model, batch)], key=len)
        documents = [both[0], both[-1]]
    _take_exact_way(model, packing, kind, documents)
    if crossed:  # another kind, or another way, is checked on them again
        packing.reach, packing.documents = longest, documents


def _documents_of(model: Any, batch: dict[str, Any]) -> list[np.ndarray]:
    boundaries = batch["cu_seq_lens_q"].cpu().numpy()
    if batch.get("input_ids") is None:  # embedded: the check is about their lengths
        draw = random_tokens(unwrap_peft(model), np.random.default_rng(0))
        return [draw(int(length)) for length in np.diff(boundaries)]
    return np.split(batch["input_ids"][0].cpu().numpy(), boundaries[1:-1])


def _take_exact_way(
    model: Any, packing: _Packing, kind: tuple[Any, ...], documents: Sequence[np.ndarray]
) -> None:
    """Install the first way that keeps documents apart. Raises RuntimeError if there is none."""
    device, dtype, training = kind
    base = unwrap_peft(model)
    choice = resolve_attention(base, packing.attention, device=device, dtype=dtype)
    ways = with_fallbacks(choice) if packing.attention == "auto" else [choice]
    if packing.isolation_check == "off":
        with _without_ours(model, packing):
            packing.way, *_ = install_first(model, ways)
        packing.checked.add(kind)
        return
    try:
        with _without_ours(model, packing):
            way, found = install_first_exact(
                model, ways, documents, agree=False, training=training, max_length=_REACH
            )
    except BaseException:
        packing.checked.clear()  # of another way than the one that is installed now
        raise
    if packing.way is None or way.backend != packing.way.backend:
        packing.checked.clear()
        logger.info(f"{type(base).__name__} runs packed rows by {way}")
    packing.way = way
    if found:
        packing.checked.add(kind)
        return
    named = packing.attention != "auto"
    message = why_not_exact(base, way, found, named=named)
    if found.verdict == "leaks":
        message = (
            f"{type(base).__name__} does not keep the documents of a packed row apart: {message}"
        )
    if found.verdict in ("leaks", "refused") and packing.isolation_check == "error":
        raise RuntimeError(message)
    packing.checked.add(kind)
    logger.warning(message)


@contextmanager
def _without_ours(model: Any, packing: _Packing) -> Iterator[None]:
    """Take what lies on the model's forward away, ours and what came after, and put it back.

    `install_attention` wraps the forward, and finds its own wrapper again only if it is the last.
    """
    on_top = vars(model).pop("forward")
    if packing.below is not None:
        model.forward = MethodType(packing.below, model)
    try:
        yield
    finally:
        packing.below = _forward_taken_off(model)
        model.forward = on_top


@torch.no_grad()
def _check_loss(model: Any, base: Any) -> None:
    """Raise ValueError if the model's own loss is not that of the next token: ours would be."""
    ids = torch.from_numpy(random_tokens(base, np.random.default_rng(0))(17))[None]
    batch: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if requires(base, "position_ids"):
        batch["position_ids"] = torch.arange(17)[None]
    device = next(model.parameters()).device
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    with preserve_state(model, training=True):
        output = model(**batch, labels=batch["input_ids"], return_dict=True)
        ours = float(next_token_loss(output.logits, batch["input_ids"]))
    own = float("nan") if output.loss is None else float(output.loss)
    if not abs(own - ours) <= _LOSS_TOLERANCE * max(1.0, ours):
        raise ValueError(
            f"{type(base).__name__} has another loss ({own:.4f}) than that of the "
            f"next token ({ours:.4f}); train it with PackedSFTTrainer, or with a "
            "compute_loss_func of your own and isolation_check='off'"
        )
