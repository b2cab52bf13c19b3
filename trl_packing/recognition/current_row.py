"""The packed row of the current micro-batch, for model calls that do not name its boundaries.

    trainer      set_current_row(batch)                  before each micro-batch
    user's loss  model(input_ids=inputs["input_ids"])    names no documents
    the model    complete_call(model, call)              the same call with the row's boundaries

Trainers without this package do not set the current row: the model that they train takes the
boundaries in its call, or refuses it.
"""

from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch

from trl_packing.documents.host_row import remember_row

_current: Mapping[str, Any] | None = None
_allows_other_rows = False


def current_row() -> Mapping[str, Any] | None:
    """Return the packed micro-batch that is trained or evaluated now, None without one."""
    return _current


def allows_other_rows() -> bool:
    """Whether the code runs inside `other_rows`."""
    return _allows_other_rows


def set_current_row(batch: Mapping[str, Any] | None) -> None:
    """Set the micro-batch that is trained or evaluated from now on.

    Args:
        batch: a micro-batch. After None or a padded batch, no row is current.
    """
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
    """Restore the current row at the end of the block, also after an error."""
    before = _current
    try:
        yield
    finally:
        set_current_row(before)


@contextmanager
def use_current_row(batch: Mapping[str, Any] | None) -> Iterator[None]:
    """Make `batch` the current row inside the block, and restore the one before at its end."""
    with restore_current_row():
        set_current_row(batch)
        yield


class AnnouncedBatches(list[Any]):
    """Micro-batches of an optimizer step; iteration makes each one the current row.

    For trainers whose `training_step` and `compute_loss` may be overridden.
    """

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            set_current_row(batch)
            yield batch


class AnnouncedLoader:
    """A data loader that makes each batch the current row until it reads the next one.

    All other attributes are those of the wrapped loader. For trainers whose `prediction_step` may
    be overridden, inside `restore_current_row`.
    """

    def __init__(self, dataloader: Any):
        self._dataloader = dataloader

    def __getattr__(self, name: str) -> Any:
        return getattr(self._dataloader, name)

    def __len__(self) -> int:
        return len(self._dataloader)

    def __iter__(self) -> Iterator[Any]:
        # No cleanup when the generator is closed: after an error, the garbage collector may close
        # it at any time, even during a later step.
        for batch in self._dataloader:
            set_current_row(batch)
            yield batch
        set_current_row(None)


@contextmanager
def other_rows() -> Iterator[None]:
    """Allow calls in your loss on rows that are not in the batch.

    Inside the block, each row of ``(B, T)`` tokens is one document, as in any model, even if it
    contains tokens of the batch, and no call is refused.

    Examples:
        >>> with other_rows():
        ...     pass  # replayed = model(input_ids=ids, attention_mask=mask)
    """
    global _allows_other_rows
    before, _allows_other_rows = _allows_other_rows, True
    try:
        yield
    finally:
        _allows_other_rows = before
