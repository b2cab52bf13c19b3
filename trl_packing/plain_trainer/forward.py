"""The exact loss of a call on a packed row: one mean over trained tokens, as Trainer divides it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trl_packing.documents.labels import IGNORE_INDEX


def with_own_loss(forward: Callable[..., Any], call: dict[str, Any]) -> Any:
    """Run `forward` without labels, and put the loss into what it returns."""
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
    make: type[ModelOutput] = type(output)
    return make(loss=loss, **others)


def next_token_loss(logits: Tensor, labels: Tensor, num_items: Any = None) -> Tensor:
    """Return Σ −log p over the trained tokens / `num_items`, by default their number; a scalar.

    logits: ``(rows, T, vocabulary)``; labels: ``(rows, T)``, `IGNORE_INDEX` on what is not trained.
    """
    targets = labels[:, 1:].to(logits.device)
    is_trained = targets != IGNORE_INDEX
    total = nn.functional.cross_entropy(
        logits[:, :-1][is_trained].float(), targets[is_trained], reduction="sum"
    )
    count = is_trained.sum() if num_items is None else torch.as_tensor(num_items)
    return total / count.to(total.device).clamp(min=1)
