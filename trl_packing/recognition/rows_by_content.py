"""Recognizes packed rows in calls without boundaries, in steps of trainers without this package.

the row in flight              whole (embedded, or with at least half of its tokens unchanged), cut
                               at the end, or one document of it; refused: other parts, embeddings
                               of another length, and in training as many tokens, all different
a row of `PackedCollator`      its tokens or a copy of them, whole or cut at the end
a row of `PackedDataset`       documents of the data set (`known_documents.py`)
any other, in training and     refused while packed rows exist: its tokens may be those of a row,
without a mask                 changed or embedded
"""

from typing import Any

import numpy as np
import torch
from torch import Tensor

from trl_packing.documents.host_row import host_boundaries, rows_alive
from trl_packing.recognition.known_documents import find_documents, has_known_documents
from trl_packing.recognition.row_in_flight import RowInFlight, row_in_flight


def lengths_by_content(model: Any, tokens: Tensor, mask: Any) -> np.ndarray | None:
    """Return the lengths ``(N,)`` of the documents in the row, None if it is not packed.

    Args:
        model: the model that is called.
        tokens: `input_ids` ``(B, T)`` or `inputs_embeds` ``(B, T, H)``.
        mask: `attention_mask` ``(B, T)`` of 0 and 1, or None.

    Raises:
        ValueError: documents could see each other, and their boundaries are unknown.
    """
    shape = tokens.shape[:2]
    if shape[1] < 2:
        return None
    in_flight = row_in_flight(model)
    lengths = None if in_flight is None else _lengths_in_flight(model, tokens, mask, in_flight)
    if lengths is None and not tokens.dtype.is_floating_point:
        lengths = _lengths_of_collated_row(tokens)
        if lengths is None and has_known_documents():
            lengths = _lengths_of_known_documents(model, tokens, mask)
    if lengths is not None:
        return lengths if len(lengths) > 1 else None
    if not (model.training and torch.is_grad_enabled()) or shape[0] > 1:
        return None
    if in_flight is not None and shape[1] == len(in_flight.ids):
        raise ValueError(in_step_message(model, tokens, "whose row has as many tokens"))
    has_packed_rows = in_flight is not None or has_known_documents()
    has_packed_rows = has_packed_rows or any(ids.shape == shape for ids, _ in rows_alive())
    if has_packed_rows and mask is None:
        raise ValueError(_message(model, tokens, "without an attention_mask"))
    return None


# --- the row in flight ----------------------------------------------------------------------------

_UNKNOWN = np.zeros(0, np.int64)  # documents of the row, of unknown lengths


def is_of_row_in_flight(model: Any, ids: Tensor, mask: Any) -> bool:
    """Whether `ids` ``(B, T)`` contain, or may contain, several documents of the row in flight."""
    row = row_in_flight(model) if ids.shape[1] > 1 else None
    found = [] if row is None else [_lengths_in_row(part, row) for _, part in _unmasked(ids, mask)]
    return any(lengths is not None and len(lengths) != 1 for lengths in found)


def _lengths_in_flight(
    model: Any, tokens: Tensor, mask: Any, row: RowInFlight
) -> np.ndarray | None:
    """Return the lengths of the documents of `row` in the call, None if it has none of them."""
    (num_rows, width), total = tokens.shape[:2], len(row.ids)
    why = f"whose row has shape (1, {total})"
    if tokens.dtype.is_floating_point:
        if num_rows == 1 and width == total:
            return np.diff(row.boundaries)
        if num_rows == 1 or width == total:
            raise ValueError(in_step_message(model, tokens, why))
        return None
    parts = _unmasked(tokens, mask)
    found = [_lengths_in_row(ids, row) for _, ids in parts]
    if all(lengths is None or len(lengths) == 1 for lengths in found):
        return found[0] if num_rows == 1 else None
    lengths = found[0]
    if num_rows > 1 or lengths is None or not len(lengths) or parts[0][0]:
        raise ValueError(in_step_message(model, tokens, why))
    lengths[-1] += width - lengths.sum()  # padding
    return lengths


def _unmasked(ids: Tensor, mask: Any) -> list[tuple[int, np.ndarray]]:
    """Return the first unmasked position of each row, and the tokens up to its last one."""
    rows = ids.cpu().numpy().astype(np.int64)
    is_seen = np.ones(rows.shape, dtype=bool)
    if torch.is_tensor(mask) and mask.shape == ids.shape:
        is_seen = mask.cpu().numpy() != 0
    ends = [np.flatnonzero(seen)[[0, -1]] if seen.any() else (0, -1) for seen in is_seen]
    return [(int(a), row[a : b + 1]) for row, (a, b) in zip(rows, ends, strict=True)]


def _lengths_in_row(ids: np.ndarray, row: RowInFlight) -> np.ndarray | None:
    """Return the lengths of the row's documents in `ids`, `_UNKNOWN`, or None without any."""
    width, total = len(ids), len(row.ids)
    if width > total and (ids[:total] == row.ids).all() and (ids[total:] == ids[-1]).all():
        lengths = np.diff(row.boundaries)
        lengths[-1] += width - total
        return lengths
    places = _occurrences(ids, row.ids)
    cuts = {tuple(np.diff(np.unique(row.boundaries.clip(at, at + width)))) for at in places}
    if len(cuts) == 1:
        (cut,) = cuts
        is_known = len(cut) == 1 or set(places) <= set(row.boundaries.tolist())
        return np.array(cut) if is_known else _UNKNOWN
    if cuts or _occurrences(row.ids, ids):
        return _UNKNOWN
    if width == total and _is_similar(ids, row, 0):
        return np.diff(row.boundaries)
    return _UNKNOWN if any(_is_similar(ids, row, shift) for shift in (-1, 0, 1)) else None


def _occurrences(part: np.ndarray, whole: np.ndarray) -> list[int]:
    """Return the positions in `whole` at which `part` starts, both int64."""
    found, sought, text = [], part.tobytes(), whole.tobytes()
    at = text.find(sought) if sought else -1
    while at >= 0:
        if at % 8 == 0:
            found.append(at // 8)
        at = text.find(sought, at + 1)
    return found


def _is_similar(ids: np.ndarray, row: RowInFlight, shift: int) -> bool:
    """Whether half of `ids`, also after the first document, equals the row from `shift` on.

    This holds for rows with noise or masked tokens, but not for one document after the same prompt,
    or with padding.
    """
    ids, there = ids[max(0, -shift) :], row.ids[max(0, shift) :]
    size, first = min(len(ids), len(there)), int(row.boundaries[1]) - max(0, shift)
    same = ids[:size] == there[:size]
    return size > first and bool(same.mean() >= 0.5 and same[first:].mean() >= 0.5)


# --- rows by their documents ----------------------------------------------------------------------


def _lengths_of_collated_row(tokens: Tensor) -> np.ndarray | None:
    """Return the lengths of documents if `tokens` equal a collated row or its start, else None."""
    for ids, row in rows_alive():
        if len(tokens) != 1 or ids.device != tokens.device or ids.shape[1] < tokens.shape[1]:
            continue
        if torch.equal(ids[:, : tokens.shape[1]], tokens):
            boundaries = np.array(host_boundaries(row["cu_seq_lens_q"]))
            return np.diff(np.unique(boundaries.clip(0, tokens.shape[1])))
    return None


def _lengths_of_known_documents(model: Any, tokens: Tensor, mask: Any) -> np.ndarray | None:
    """Return the lengths of known documents, the last with padding, or None if they are unknown."""
    is_real = np.ones(tokens.shape, dtype=bool)
    if torch.is_tensor(mask) and mask.shape == tokens.shape:
        is_real = mask.cpu().numpy() != 0
    rows = zip(tokens.cpu().numpy(), is_real, strict=True)
    found = [find_documents(ids[real]) for ids, real in rows if real.any()]
    if all(len(f.lengths) < 2 for f in found):
        return np.array(found[0].lengths) if len(found) == 1 and not found[0].rest else None
    if len(tokens) > 1 or found[0].rest or not is_real[0, : sum(found[0].lengths)].all():
        raise ValueError(_message(model, tokens, "that begin with documents of a packed row"))
    lengths = np.array(found[0].lengths)
    lengths[-1] += tokens.shape[1] - lengths.sum()
    return lengths


def in_step_message(model: Any, tokens: Tensor, why: str) -> str:
    """Return the message about a call on `tokens` in a step on packed documents."""
    return (
        f"{type(model).__name__} was called on tokens of shape {tuple(tokens.shape[:2])} in a step "
        f"on packed documents, {why}, so documents could see each other; call model(**inputs), or "
        "pass inputs['input_ids'] whole, cut at the end, or one document of it; call rows that are "
        "not in the batch inside `with trl_packing.other_rows():`"
    )


def _message(model: Any, tokens: Tensor, how: str) -> str:
    return (
        f"{type(model).__name__} was called on tokens of shape {tuple(tokens.shape[:2])} {how}, "
        "while packed rows exist. They may be a row whose tokens were changed, moved or embedded, "
        "so documents could see each other; call model(**inputs), or pass inputs['input_ids'] "
        "whole or cut at the end; for rows that are not packed, pass an attention_mask, or call "
        "the model inside `with trl_packing.other_rows():`"
    )
