"""Packed rows in calls that say nothing of them, in a step of a trainer that is not ours.

a row of `PackedCollator`      its tokens, or a copy, whole or cut at the end
a row of `PackedDataset`       made of its documents (known_documents)
in training, without a mask,   refused while there are packed rows: its tokens may be those of
and none of these              a row, changed or embedded
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_packing.host import host_boundaries, rows_alive
from trl_packing.known_documents import any_documents_known, documents_in


def lengths_by_content(model: Any, tokens: Tensor, mask: Any) -> np.ndarray | None:
    """Return the lengths ``(N,)`` of several documents in the row, None if it is no packed one.

    tokens: `input_ids` ``(rows, T)`` or `inputs_embeds` ``(rows, T, H)``; mask: None or of 0 and 1.

    Raises ValueError if documents could see each other and nobody can tell where they are.
    """
    shape = tokens.shape[:2]
    is_near = any_documents_known() or any(ids.shape == shape for ids, _ in rows_alive())
    if not tokens.dtype.is_floating_point:
        lengths = _of_collated_row(tokens)
        if lengths is None and any_documents_known():
            lengths = _of_known_documents(model, tokens, mask)
        if lengths is not None:
            return lengths if len(lengths) > 1 else None
    is_one_row = shape[0] == 1 and shape[1] > 1
    is_trained = model.training and torch.is_grad_enabled()
    if is_near and is_trained and is_one_row and mask is None:
        raise ValueError(_message(model, tokens, "without an attention_mask"))
    return None


def _of_collated_row(tokens: Tensor) -> np.ndarray | None:
    for ids, row in rows_alive():
        if len(tokens) != 1 or ids.device != tokens.device or ids.shape[1] < tokens.shape[1]:
            continue
        if torch.equal(ids[:, : tokens.shape[1]], tokens):
            boundaries = np.array(host_boundaries(row["cu_seq_lens_q"]))
            return np.diff(np.unique(boundaries.clip(0, tokens.shape[1])))
    return None


def _of_known_documents(model: Any, tokens: Tensor, mask: Any) -> np.ndarray | None:
    """Return the lengths of the row's documents, padding behind them in the last; None: unknown."""
    is_real = np.ones(tokens.shape, dtype=bool)
    if torch.is_tensor(mask) and mask.shape == tokens.shape:
        is_real = mask.cpu().numpy() != 0
    rows = zip(tokens.cpu().numpy(), is_real, strict=True)
    found = [documents_in(ids[real]) for ids, real in rows if real.any()]
    if all(len(f.lengths) < 2 for f in found):
        return np.array(found[0].lengths) if len(found) == 1 and not found[0].rest else None
    if len(tokens) > 1 or found[0].rest or not is_real[0, : sum(found[0].lengths)].all():
        raise ValueError(_message(model, tokens, "that begin with documents of a packed row"))
    lengths = np.array(found[0].lengths)
    lengths[-1] += tokens.shape[1] - lengths.sum()
    return lengths


def _message(model: Any, tokens: Tensor, how: str) -> str:
    return (
        f"{type(model).__name__} was called on tokens of shape {tuple(tokens.shape[:2])} {how}, "
        "while there are packed rows: they may be a row whose tokens were changed, moved or "
        "embedded, so documents could see each other; call model(**inputs), or with "
        "inputs['input_ids'] whole or cut at the end; rows that are not packed have an "
        "attention_mask, or go inside `with trl_packing.other_rows():`"
    )
