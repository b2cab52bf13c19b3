"""Recognizes a model call on a packed row, and adds the boundaries that kernels take.

    attention_mask   1 1 1 2 2        rows of `PackedDataset`, stacked by Trainer's own collators
    cu_seq_lens_q    0 3 5            batches of `PackedCollator`
    position_ids     0 1 2 0 1        batches of transformers' `DataCollatorWithFlattening`

Each of these locates the documents of a single row. The call is then completed as a batch of
`PackedCollator`: boundaries, no mask, no cache.
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
from trl_packing.documents.host_row import for_kernels
from trl_packing.documents.labels import IGNORE_INDEX

VIRTUAL_TOKENS = (
    "a packed row has several documents, but virtual tokens (prompt and prefix tuning), a cache or "
    "inputs_embeds belong to one document; train such a model with PackedSFTTrainer"
)


@torch.compiler.disable
def packed_batch(model: nn.Module, call: dict[str, Any]) -> dict[str, Any] | None:
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
    lengths = lengths_of_row(model, call)
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


def lengths_of_row(model: nn.Module, call: dict[str, Any]) -> np.ndarray | None:
    """Return the lengths ``(N,)`` of the documents in the call's row, None if it is not packed.

    Raises:
        ValueError: several rows have numbered documents.
    """
    mask, position_ids = call.get("attention_mask"), call.get("position_ids")
    generates = call.get("past_key_values") is not None and not model.training
    if generates:
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
    if position_ids.dim() != 2 or int((position_ids == 0).sum()) < 2:
        return None
    return lengths_from_numbers((position_ids[0] == 0).cumsum(0).cpu().numpy())


def _differs_in_length(mask: Any, ids: Tensor) -> bool:
    return torch.is_tensor(mask) and mask.shape[-1] != ids.shape[-1]
