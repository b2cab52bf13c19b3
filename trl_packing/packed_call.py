"""A call of a model on a packed row: how it is told from others, and its exact loss.

    attention_mask   1 1 1 2 2        rows of `PackedDataset`, stacked by Trainer's own collators
    cu_seq_lens_q    0 3 5            batches of `PackedCollator`
    position_ids     0 1 2 0 1        batches of transformers' `DataCollatorWithFlattening`

Each says where the documents of the only row are. The call is then made as `PackedCollator` would
have it: boundaries, no mask, no cache.
"""

from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from transformers.utils import ModelOutput

from trl_packing.collator import boundaries_of_row, lengths_from_numbers
from trl_packing.host import for_kernels
from trl_packing.labels import IGNORE_INDEX

VIRTUAL_TOKENS = (
    "a packed row holds several documents, but virtual tokens (prompt and prefix tuning), a cache "
    "or inputs_embeds are for one; train such a model with PackedSFTTrainer"
)


@torch.compiler.disable
def packed_batch(model: nn.Module, call: dict[str, Any]) -> dict[str, Any] | None:
    """Return the call as a packed one, None if it is not."""
    mask, ids = call.get("attention_mask"), call.get("input_ids")
    if call.get("cu_seq_lens_q") is not None:
        if mask is not None:
            raise ValueError(
                "a packed batch came with an attention_mask, under which documents see each "
                "other; leave it out: PackedCollator makes none"
            )
        return for_kernels(call)
    lengths = lengths_of_row(model, call)
    if lengths is None:
        return None
    if ids is None or call.get("past_key_values") is not None or _has_other_length(mask, ids):
        raise ValueError(VIRTUAL_TOKENS)
    labels = call.get("labels")
    starts = torch.from_numpy(np.cumsum(lengths) - lengths)
    if labels is not None and (labels[0, starts.to(labels.device)] != IGNORE_INDEX).any():
        raise ValueError(
            "the first token of a packed document has a label, which the document before it would "
            "predict; keep the labels of PackedDataset (a collator for language modeling makes "
            "its own)"
        )
    boundaries = boundaries_of_row(torch.from_numpy(lengths))
    batch = {name: value for name, value in call.items() if name != "attention_mask"}
    return batch | {
        name: value.to(ids.device) if torch.is_tensor(value) else value
        for name, value in boundaries.items()
    }


def lengths_of_row(model: nn.Module, call: dict[str, Any]) -> np.ndarray | None:
    """Return the lengths of several documents in the call's row, None if it is no packed one."""
    mask, position_ids = call.get("attention_mask"), call.get("position_ids")
    generates = call.get("past_key_values") is not None and not model.training
    if generates:
        return None
    if torch.is_tensor(mask):
        # Of any number type: PEFT's virtual tokens make floats of it.
        if mask.dim() != 2 or mask.dtype == torch.bool or int(mask.max()) < 2:
            return None
        if len(mask) > 1:
            raise ValueError(
                f"a packed batch is one row, got {len(mask)} with numbered documents; give Trainer "
                "the PackedDataset itself, whose micro-batches are one row"
            )
        return lengths_from_numbers(mask[0].cpu().numpy())
    if mask is not None or not torch.is_tensor(position_ids) or len(position_ids) != 1:
        return None
    if position_ids.dim() != 2 or int((position_ids == 0).sum()) < 2:
        return None
    return lengths_from_numbers((position_ids[0] == 0).cumsum(0).cpu().numpy())


def _has_other_length(mask: Any, ids: Tensor) -> bool:
    return torch.is_tensor(mask) and mask.shape[-1] != ids.shape[-1]


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
