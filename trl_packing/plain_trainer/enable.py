"""Packing for plain `transformers.Trainer`: teaches a model to recognize packed rows.

The forward of an enabled model finds the documents of a single row by one of these:

    attention_mask   1 1 1 2 2        rows of `PackedDataset`, stacked by Trainer's own collators
    cu_seq_lens_q    0 3 5            batches of `PackedCollator`
    position_ids     0 1 2 0 1        batches of transformers' `DataCollatorWithFlattening`

In training, the model takes calls with boundaries only. Their loss is the mean over the trained
tokens of the step, also if the model's class ignores `num_items_in_batch`. Other calls are
unchanged: evaluation of padded rows, `generate`, and those inside `other_rows`.
"""

import inspect
import math
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import nn

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.calls import (
    Call,
    Forward,
    complete_call,
    has_cache,
    other_rows,
    settle_first,
)
from trl_packing.attention.model_facts import (
    invokes_adapter,
    length_constants,
    requires,
    restore_implementation,
    temporarily,
    text_config,
    unwrap_peft,
)
from trl_packing.attention.neftune import scale_noise_by_document
from trl_packing.attention.ranks import is_sharded
from trl_packing.config import ISOLATION_CHECKS
from trl_packing.data.limits import limits_of
from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.isolation.guard import REACH, IsolationGuard, Precision, representative_documents
from trl_packing.isolation.preserve import preserve_state
from trl_packing.isolation.probes import random_tokens
from trl_packing.loss.next_token import next_token_loss
from trl_packing.plain_trainer.dataset import PackedDataset, enabled_models
from trl_packing.versions import warn_of_untested_versions

warn_of_untested_versions()


_VIRTUAL_TOKENS = (
    "virtual tokens (prompt and prefix tuning), a cache or inputs_embeds belong to one document, "
    "and a packed row has several; use PackedSFTTrainer"
)
_TOLERANCE = 1e-3  # between the two losses: the model's dtype may round its native loss
_NUM_TOKENS = 17


def enable_packing(
    model: nn.Module,
    dataset: Any = None,
    *,
    attention: str = "auto",
    isolation_check: str = "error",
) -> AttentionChoice:
    """Make `model` isolate the documents of packed rows in any trainer; return the backend.

    Call it before `Trainer` is created, on the model that `Trainer` is given. The model is saved as
    if packing had not been enabled. `eval_loss` remains a mean of the means of micro-batches.

    Args:
        model: a decoder of transformers, which PEFT may wrap.
        dataset: the data that it will train on: a `PackedDataset`, or token ids of some documents.
            Without one, the check covers 1,024 tokens, and a document beyond a length at which the
            model changes is checked when it is first used.
        attention: as in `PackedSFTConfig`.
        isolation_check: as in `PackedSFTConfig`. The check runs here, and again in the first packed
            call on another device, in another precision or in another mode.

    Raises:
        TypeError: `model` is not a transformers model.
        ValueError: the model or a setting cannot be packed exactly.
        RuntimeError: the model cannot run packed documents, or they leak into each other with
            every backend that may be used.
    """
    base = unwrap_peft(model)
    _check_model(model, base)
    if isolation_check not in ISOLATION_CHECKS:
        choices = ", ".join(ISOLATION_CHECKS)
        raise ValueError(f"isolation_check={isolation_check!r} is unknown; choose one of {choices}")
    if isolation_check != "off":
        _check_loss(model, base)  # before the model is changed: if refused, it stays as it was
    limits = limits_of(base)
    if isinstance(dataset, PackedDataset):
        limits.check(dataset.documents.dataset, "training")
        chosen = representative_documents(dataset.lengths)
        documents = [dataset.documents[i]["input_ids"] for i in chosen]
    else:
        documents = [np.asarray(document, np.int64) for document in dataset or ()]
        for number, document in enumerate(documents):
            limits.check_document({"input_ids": document}, f"document {number}")
    # Not ours: no forward waits for other ranks, and here they need not all be present.
    guard = IsolationGuard(
        model, attention=attention, isolation_check=isolation_check, is_ours=False
    )
    earlier = getattr(base, "enabled_packing", None)
    # Whether the native loss is divided by `num_items_in_batch`, as Trainer decides.
    divides = getattr(base, "accepts_loss_kwargs", None)
    if earlier:
        divides = earlier.divides_by_count
    elif divides is None:
        parameters = inspect.signature(base.forward).parameters.values()
        divides = any(p.kind is p.VAR_KEYWORD for p in parameters)
    reach = max([REACH, *map(len, documents)])
    base.enabled_packing = packing = EnabledPacking(guard, documents, reach, bool(divides))
    # Trainer then counts the targets of a step, and `_run_with_packed_loss` divides by them.
    base.accepts_loss_kwargs = True
    with temporarily(packing, is_checking=True):
        guard.ensure(documents, training=True, precision=_precision(model))
    restore_implementation(base)  # packed calls set it
    settle_first(model, None)  # `EnabledPacking` checks it from now on
    for module in (base, getattr(base, "base_model", base)):
        module.trains_packed_rows = True  # in training, calls without boundaries are refused
    enabled_models.add(model)
    return guard.attention


def _check_model(model: Any, base: Any) -> None:
    """Raise an error for a model that is not packed exactly; `base` is the model inside PEFT's."""
    config: Any = getattr(base, "config", None)
    name = type(base).__name__
    if not isinstance(base, nn.Module) or config is None:
        raise TypeError(f"enable_packing takes a transformers model, got {name}")
    adapter = getattr(model, "active_peft_config", None)
    takes_mask = "attention_mask" in inspect.signature(base.forward).parameters
    balances = getattr(text_config(base), "output_router_logits", False)
    for fault, why in (
        (getattr(config, "is_encoder_decoder", False), "it is an encoder-decoder"),
        (not takes_mask, "it takes no attention_mask, in which Trainer passes documents on"),
        (balances, "output_router_logits=True adds the balance of a micro-batch to the loss"),
        (getattr(adapter, "is_prompt_learning", False), "virtual tokens belong to one document"),
        (invokes_adapter(model), "alora_invocation_tokens activate the adapter once in each row"),
    ):
        if fault:
            raise ValueError(f"{name} cannot be enabled: {why}; use PackedSFTTrainer")


@torch.no_grad()
def _check_loss(model: Any, base: Any) -> None:
    """Raise ValueError if the native loss of `model` is not that of the next token."""
    drawn = random_tokens(base)
    device = next(model.parameters()).device
    ids = torch.from_numpy(drawn(_NUM_TOKENS))[None].to(device)
    batch: Call = {"input_ids": ids, "use_cache": False}
    if requires(base, "position_ids"):
        batch["position_ids"] = torch.arange(_NUM_TOKENS, device=device)[None]
    with preserve_state(model, training=True):
        output = model(**batch, labels=batch["input_ids"], return_dict=True)
        packed = float(next_token_loss(output.logits, batch["input_ids"]))
    native = float("nan") if output.loss is None else float(output.loss)
    # Logits that are not finite are no question of the loss: the isolation check says so.
    if math.isfinite(packed) and not abs(native - packed) <= _TOLERANCE * max(1.0, packed):
        raise ValueError(
            f"{type(base).__name__} has another loss ({native:.4f}) than that of the next token "
            f"({packed:.4f}); use PackedSFTTrainer, or compute_loss_func with isolation_check='off'"
        )


@dataclass(eq=False)
class EnabledPacking:
    """What `enable_packing` keeps on a model: copies of the model share it, and pickles lose it."""

    guard: IsolationGuard
    documents: list[np.ndarray]  # token ids ``(T,)`` of those to check
    reach: int  # tokens of the longest document that the check covers
    divides_by_count: bool  # the native loss is divided by `num_items_in_batch`
    is_checking: bool = False

    def __deepcopy__(self, memo: Any) -> "EnabledPacking":
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        return type(None), ()

    def run(self, model: Any, forward: Forward, call: Call) -> Any:
        """Run a call of `model` by `forward`, with boundaries and loss if it is on a packed row."""
        if call.get("key_index") is not None:
            raise ValueError(
                f"{type(model).__name__} was called on a row with shared prefixes (key_index); use "
                "PackedSFTTrainer, or shares_prefixes=False in PackedCollator"
            )
        # Without numbers, maybe a row in memory or of our trainer; others are refused in training.
        packed = complete_call(model, _with_boundaries(model, call))
        if packed.get("cu_seq_lens_q") is not None:
            self._ensure_isolation(model, packed)
            return _run_with_packed_loss(forward, packed)
        with other_rows():  # the model's calls of its parts or embeddings are not on packed rows
            if call.get("num_items_in_batch") is not None and not self.divides_by_count:
                return _run_with_packed_loss(forward, call)
            return forward(**call)

    @torch.compiler.disable
    def _ensure_isolation(self, model: Any, batch: Call) -> None:
        """Check what no earlier call has: another device, precision, mode or length."""
        scale_noise_by_document(model)  # Trainer registers its hook when it trains
        guard = self.guard
        documents = self.documents
        longest = int(batch["max_length_q"])
        constants = length_constants(model) if longest > self.reach else []
        crosses = any(self.reach <= c < longest for c in constants)
        mode: dict[str, Any] = {"training": model.training, "precision": _precision(model)}
        if not crosses and guard.covers(documents, **mode):
            return
        # Other ranks would not send their part of the weights.
        if guard.checks and is_sharded(model):
            if crosses or not guard.passed:
                raise RuntimeError(
                    f"no check of this model has passed on documents of {longest:,} tokens, and it "
                    "is sharded by now; call enable_packing(model, dataset) before Trainer"
                )
            guard.trust(documents, **mode)
            return
        if crosses:
            draw = random_tokens(model)
            documents = [*documents[:1], draw(longest)]
        guard.model = model  # it may be a copy
        with temporarily(self, is_checking=True):
            guard.ensure(documents, **mode)
        if crosses:  # later checks, in other modes or precisions, include these documents
            self.reach, self.documents = longest, documents


def _run_with_packed_loss(forward: Forward, call: Call) -> Any:
    """Run `forward` without labels, and put the loss into its output."""
    others = dict(call)
    labels = others.pop("labels", None)
    count = others.pop("num_items_in_batch", None)
    output = forward(**others)
    if labels is None:
        return output
    loss = {"loss": next_token_loss(output.logits, labels, count)}
    return type(output)(**loss | {k: v for k, v in output.items() if k != "loss"})


@torch.compiler.disable
def _with_boundaries(model: nn.Module, call: Call) -> Call:
    """Return the call with boundaries, if its mask or its positions number documents."""
    mask = call.get("attention_mask")
    ids = call.get("input_ids")
    numbers = None if call.get("cu_seq_lens_q") is not None else _document_numbers(model, call)
    if numbers is None:
        return call
    lengths = lengths_from_numbers(numbers.cpu().numpy())
    if ids is None or has_cache(call):
        raise ValueError(_VIRTUAL_TOKENS)
    if torch.is_tensor(mask) and mask.shape[-1] != ids.shape[-1]:
        raise ValueError(_VIRTUAL_TOKENS)
    labels = call.get("labels")
    starts = np.cumsum(lengths) - lengths
    if labels is not None and (labels[0, starts.tolist()] != IGNORE_INDEX).any():
        raise ValueError(
            "the first token of a packed document has a label, which the document before it would "
            "predict; use a collator that keeps the labels of PackedDataset"
        )
    changed = {name: value for name, value in call.items() if name != "attention_mask"}
    for name, value in boundaries_of_row(torch.from_numpy(lengths)).items():
        changed[name] = value.to(ids.device) if torch.is_tensor(value) else value
    return changed


def _document_numbers(model: nn.Module, call: Call) -> torch.Tensor | None:
    """Return the document of each token of the call's row ``(T,)``, None if it is not packed."""
    mask = call.get("attention_mask")
    position_ids = call.get("position_ids")
    is_continued = has_cache(call)
    if is_continued and not model.training:  # `generate`
        return None
    if torch.is_tensor(mask):
        # Any number type but bool: PEFT's virtual tokens make the mask a float.
        if mask.dim() != 2 or mask.dtype == torch.bool or int(mask.max()) < 2:
            return None
        if len(mask) > 1:
            raise ValueError(
                f"a packed batch is one row, got {len(mask)} with numbered documents; pass the "
                "PackedDataset itself to Trainer"
            )
        return mask[0]
    if mask is not None or not torch.is_tensor(position_ids) or position_ids.dim() != 2:
        return None
    # In training, positions of one document are its boundaries too.
    least = 1 if model.training and not is_continued else 2
    starts = position_ids == 0
    return starts[0].cumsum(0) if len(starts) == 1 and int(starts.sum()) >= least else None


def _precision(model: nn.Module) -> Precision:
    """Return the device and dtype in which `model` runs now, under autocast or not."""
    parameter = next(model.parameters())
    device = parameter.device.type
    is_cast = torch.is_autocast_enabled(device)
    return device, torch.get_autocast_dtype(device) if is_cast else parameter.dtype
