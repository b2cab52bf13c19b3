"""The packed row that is trained or evaluated, for model calls that do not say where it is cut.

    trainer      set_current_row(batch)                  before each micro-batch
    user's loss  model(input_ids=inputs["input_ids"])    says nothing of documents
    the model    complete_call(model, call)             the same call with the row's boundaries

A call is of a row if its tokens are in the row's memory, the whole row or a part of it that begins
with a document; or if it is as long as the current row (its tokens changed, or embedded). Any other
call while a row is current raises ValueError: of other tokens nobody can tell whether they are the
row's. `other_rows` lets such calls through, and so does a cache with tokens (`generate`).

A trainer that is not ours does not say which row is current: the row is then looked for in its loop
(row_in_flight), and told by what is in it (rows_by_content).
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from trl_packing.documents.boundaries import boundaries_of_row, document_ids_from_lengths
from trl_packing.documents.host_row import (
    BOUNDARIES,
    cached_values,
    host_boundaries,
    longest_document,
    remember_row,
    rows_alive,
)
from trl_packing.recognition.rows_by_content import (
    in_step_message,
    is_of_row_in_flight,
    lengths_by_content,
)

_current: Mapping[str, Any] | None = None
_lets_others_through = False


def set_current_row(batch: Mapping[str, Any] | None) -> None:
    """Say which micro-batch is trained or evaluated from now on; None, or a padded one: no row."""
    global _current
    is_packed = batch is not None and torch.is_tensor(batch.get("cu_seq_lens_q"))
    _current = batch if is_packed else None
    if batch is not None:
        remember_row(batch)


def replace_current_row(batch: Mapping[str, Any]) -> None:
    """Make `batch` the current row in place of another, such as its copy on the CPU.

    Outside of steps there is no current row, and the tokens of `batch` are only remembered.
    """
    if _current is None:
        remember_row(batch)
    else:
        set_current_row(batch)


@contextmanager
def restore_current_row() -> Iterator[None]:
    """Put back the row that was current before, also when a step inside raises."""
    before = _current
    try:
        yield
    finally:
        set_current_row(before)


class AnnouncedBatches(list[Any]):
    """Micro-batches of an optimizer step, each of them the current row when it is its turn.

    For trainers whose `training_step` and `compute_loss` are anybody's.
    """

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            set_current_row(batch)
            yield batch


class AnnouncedLoader:
    """A data loader whose batches are the current row until the next one is read, and else itself.

    For trainers whose `prediction_step` is anybody's, inside `restore_current_row`.
    """

    def __init__(self, dataloader: Any):
        self._dataloader = dataloader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        # Nothing to undo when the generator dies: the garbage collector may close one that an error
        # left behind at any time, also within a later step.
        for batch in self._dataloader:
            set_current_row(batch)
            yield batch
        set_current_row(None)


@contextmanager
def other_rows() -> Iterator[None]:
    """Call a model of `PackedSFTTrainer` in your loss on rows that are not the batch's.

    Each row ``(rows, T)`` of such a call is one document, as in any model, whatever it holds, and
    also of the batch. Raises nothing.

    Example:
        >>> with other_rows():
        ...     pass  # replayed = model(input_ids=ids, attention_mask=mask)
    """
    global _lets_others_through
    before, _lets_others_through = _lets_others_through, True
    try:
        yield
    finally:
        _lets_others_through = before


@torch.compiler.disable
def complete_call(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    """Return the call as one on a packed row if its tokens are of one, else as it came.

    Args:
        model: named in the message.
        call: the arguments of its forward by name.

    Raises:
        ValueError: the call is of a packed row in part or beside other tokens, or has a mask under
            which documents see each other.
    """
    if call.get("cu_seq_lens_q") is None:
        if _lets_others_through:
            return call
        boundaries = _boundaries_of(model, call)
        if boundaries is None:
            return call
        positions = _positions(model, call.get("position_ids"), boundaries)
        call = call | boundaries | {"position_ids": positions}
    return _as_packed(model, call)


# --- whose tokens they are ------------------------------------------------------------------------


def _boundaries_of(model: Any, call: dict[str, Any]) -> dict[str, Any] | None:
    tokens = call.get("input_ids")
    tokens = call.get("inputs_embeds") if tokens is None else tokens
    if not torch.is_tensor(tokens) or tokens.dim() < 2:
        return None
    ids, row = _row_in_memory(tokens)
    if ids is None and _current is not None and tokens.shape[:2] == _current["input_ids"].shape:
        ids, row = tokens, {k: _current[k] for k in BOUNDARIES if k in _current}
    if ids is None:
        mask, is_embedded = call.get("attention_mask"), tokens.dtype.is_floating_point
        if call.get("past_key_values") is not None:
            if not is_embedded and _current is None and is_of_row_in_flight(model, tokens, mask):
                raise ValueError(in_step_message(model, tokens, _CACHE))
            return None
        if _current is None:
            lengths = lengths_by_content(model, tokens, mask)
            return None if lengths is None else _boundaries_on(tokens.device, lengths)
        raise ValueError(
            in_step_message(model, tokens, f"whose row is {_shape(_current['input_ids'])}")
        )
    if call.get("past_key_values") is not None:
        raise ValueError(in_step_message(model, tokens, _CACHE))
    if tokens.shape[:2] == ids.shape[:2]:
        return row
    return _boundaries_of_part(model, tokens, ids, row)


def _row_in_memory(tokens: Tensor) -> tuple[Any, dict[str, Any]]:
    """Return the `input_ids` and boundaries of the row whose memory `tokens` are in."""
    if tokens.dtype.is_floating_point:
        return None, {}
    memory = tokens.untyped_storage().data_ptr()
    for ids, row in rows_alive():
        if ids is tokens or (ids.untyped_storage().data_ptr() == memory and memory):
            return ids, row
    return None, {}


def _boundaries_of_part(
    model: Any, tokens: Tensor, ids: Tensor, row: dict[str, Any]
) -> dict[str, Any]:
    """Return the boundaries of a part of a row that begins with a document."""
    start = int(tokens.storage_offset() - ids.storage_offset())
    end = start + int(tokens.shape[1])
    whole = host_boundaries(row["cu_seq_lens_q"])
    is_slice = len(tokens) == 1 and tokens.dim() == 2 and tokens.stride(1) == 1
    if not is_slice or start not in whole or end > whole[-1] or end == start:
        raise ValueError(in_step_message(model, tokens, f"of a row that is {_shape(ids)}"))
    return _boundaries_on(tokens.device, np.diff(np.unique(np.array(whole).clip(start, end))))


def _boundaries_on(device: torch.device, lengths: np.ndarray) -> dict[str, Any]:
    made = boundaries_of_row(torch.from_numpy(lengths))
    return {n: value.to(device) if torch.is_tensor(value) else value for n, value in made.items()}


def _positions(model: Any, given: Any, boundaries: dict[str, Any]) -> Any:
    """Return the given `position_ids` if they begin anew in every document, else the row's."""
    restarting = boundaries["position_ids"]
    if not torch.is_tensor(given) or given is restarting or given.dim() != 2:
        return restarting if given is None else given
    if given.shape != restarting.shape:
        raise ValueError(
            in_step_message(model, given, f"with position_ids of {_shape(restarting)} tokens")
        )
    counted = torch.arange(given.shape[1], device=given.device, dtype=given.dtype)
    if torch.equal(given[0], counted):  # of rows that are one document each
        return restarting
    if bool((given[restarting.to(given.device) == 0] == 0).all()):
        return given
    raise ValueError(
        in_step_message(model, given, "with position_ids that do not begin anew in each")
    )


_CACHE = "with a cache, which is for one document"


def _shape(tokens: Tensor) -> str:
    return str(tuple(tokens.shape[:2]))


# --- the call of a packed row ---------------------------------------------------------------------


def _as_packed(model: Any, call: dict[str, Any]) -> dict[str, Any]:
    boundaries = call["cu_seq_lens_q"]
    mask = call.get("attention_mask")
    if mask is not None:
        if not _keeps_apart(mask, boundaries):
            raise ValueError(
                f"{type(model).__name__} was called with an attention_mask on packed documents, "
                "under which they would see each other, or which hides tokens; leave it out: "
                "documents are kept apart without one"
            )
        if not _is_finished(mask):
            call = call | {"attention_mask": None}
    if call.get("past_key_values") is None:
        call = call | {"use_cache": False}
    if not isinstance(call.get("max_length_q"), int):
        longest = longest_document(boundaries)
        call = call | {"max_length_q": longest, "max_length_k": longest}
    for name, places in (("labels", boundaries[:-1]), ("shift_labels", boundaries[1:] - 1)):
        labels = call.get(name)
        if torch.is_tensor(labels) and labels.dim() == 2 and cached_values(labels) is None:
            call = call | {name: _without_targets_at(labels, places)}
    return call


def _without_targets_at(labels: Tensor, places: Tensor) -> Tensor:
    """Return `labels` ``(1, T)``, untrained where one document would predict the next one."""
    # One more column for the boundaries of empty documents, which are T.
    wide = pad(labels, (0, 1)).index_fill(1, places.to(labels.device).long().clamp(min=0), -100)
    return wide[:, :-1]


def _is_finished(mask: Any) -> bool:
    return torch.is_tensor(mask) and mask.dim() == 4


def _keeps_apart(mask: Any, boundaries: Tensor) -> bool:
    """Whether documents are apart under `mask`: one of ones says nothing, and is left out."""
    if not torch.is_tensor(mask):
        return False
    lengths = torch.from_numpy(np.diff(host_boundaries(boundaries)))
    if mask.dim() == 2:
        return bool(mask[:, : int(lengths[lengths > 0][:-1].sum()) + 1].all())
    if mask.dim() != 4:
        return False
    ids = document_ids_from_lengths(lengths[lengths > 0]).to(mask.device)
    is_open = mask if mask.dtype == torch.bool else mask > torch.finfo(mask.dtype).min / 2
    return not bool((is_open & (ids[:, None] != ids[None])).any())
