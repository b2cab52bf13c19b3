"""The loss of a call on a packed row: the mean over trained tokens, as Trainer divides it."""

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trl_packing.documents.labels import IGNORE_INDEX


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


def next_token_loss(logits: Tensor, labels: Tensor, num_items: Any = None) -> Tensor:
    """Return Σ −log p over the trained tokens / `num_items`, by default their number; a scalar.

    Args:
        logits: ``(rows, T, vocabulary)``.
        labels: ``(rows, T)``, `IGNORE_INDEX` on tokens that are not trained.
        num_items: the divisor, which may count the trained tokens of other micro-batches too.
    """
    targets = labels[:, 1:].to(logits.device)
    is_trained = targets != IGNORE_INDEX
    total = nn.functional.cross_entropy(
        logits[:, :-1][is_trained].float(), targets[is_trained], reduction="sum"
    )
    count = is_trained.sum() if num_items is None else torch.as_tensor(num_items)
    return total / count.to(total.device).clamp(min=1)
