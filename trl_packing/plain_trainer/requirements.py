"""Checks that a model can be enabled: a decoder, with the loss of the next token."""

import inspect
import math
from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import nn

from trl_packing.attention.model_facts import invokes_adapter, requires, text_config
from trl_packing.attention.state import preserve_state
from trl_packing.data.limits import limits_of
from trl_packing.isolation.probes import random_tokens
from trl_packing.loss.next_token import next_token_loss
from trl_packing.plain_trainer.dataset import PackedDataset
from trl_packing.plain_trainer.forward import VIRTUAL_TOKENS

_TOLERANCE = 1e-3  # between the two losses: the model's dtype may round its native loss
_NUM_TOKENS = 17


def check_model(model: Any, base: Any) -> None:
    """Raise an error for a model that cannot be packed exactly.

    Args:
        model: the model that the user has given.
        base: the model inside PEFT's.

    Raises:
        TypeError: `base` is not a transformers model.
        ValueError: it is one that cannot be packed.
    """
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
    if getattr(text_config(base), "output_router_logits", False):
        raise ValueError(
            "output_router_logits=True adds the balance of experts to the loss, which depends on "
            "the documents of a micro-batch; set model.config.output_router_logits = False, or "
            "train with PackedSFTTrainer"
        )
    if getattr(getattr(model, "active_peft_config", None), "is_prompt_learning", False):
        raise ValueError(VIRTUAL_TOKENS)
    if invokes_adapter(model):
        raise ValueError(
            "alora_invocation_tokens activate the adapter once in each row, and a packed row has "
            "several documents; train it with PackedSFTTrainer"
        )


def check_documents(base: Any, dataset: Any, documents: Sequence[np.ndarray]) -> None:
    """Raise ValueError for ids, labels and lengths beyond the limits of the model `base`."""
    limits = limits_of(base)
    if isinstance(dataset, PackedDataset):
        dataset.check(limits)
        return
    for number, document in enumerate(documents):
        limits.check_document({"input_ids": document}, f"document {number}")


@torch.no_grad()
def check_loss(model: Any, base: Any) -> None:
    """Raise ValueError if the native loss of `model` is not that of the next token."""
    ids = torch.from_numpy(random_tokens(base, np.random.default_rng(0))(_NUM_TOKENS))[None]
    batch: dict[str, Any] = {"input_ids": ids, "use_cache": False}
    if requires(base, "position_ids"):
        batch["position_ids"] = torch.arange(_NUM_TOKENS)[None]
    device = next(model.parameters()).device
    batch = {k: v.to(device) if torch.is_tensor(v) else v for k, v in batch.items()}
    with preserve_state(model, training=True):
        output = model(**batch, labels=batch["input_ids"], return_dict=True)
        packed = float(next_token_loss(output.logits, batch["input_ids"]))
    if not math.isfinite(packed):
        return  # not a question of the loss: the isolation check says so
    native = float("nan") if output.loss is None else float(output.loss)
    if not abs(native - packed) <= _TOLERANCE * max(1.0, packed):
        raise ValueError(
            f"{type(base).__name__} has another loss ({native:.4f}) than that of the next token "
            f"({packed:.4f}); train it with PackedSFTTrainer, or with a compute_loss_func of your "
            "own and isolation_check='off'"
        )


def divides_by_count(base: Any) -> bool:
    """Return whether the native loss of `base` is divided by `num_items_in_batch`.

    This is how Trainer finds out.
    """
    accepts = getattr(base, "accepts_loss_kwargs", None)
    if accepts is not None:
        return bool(accepts)
    parameters = inspect.signature(base.forward).parameters.values()
    return any(p.kind is p.VAR_KEYWORD for p in parameters)
