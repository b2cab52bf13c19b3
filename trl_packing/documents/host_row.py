"""What the host knows of a packed row, so that nobody has to ask the device.

    collator           makes a `PackedBatch`: tensors, and a `HostRow` beside them
    batch.to(device)   keeps the numbers of the row under its tensors there (`cache_values`)
    attention, head    read the numbers of a tensor (`cached_values`)

Asking a device for a number (`item`, `tolist`, a boolean index) makes the host wait until all work
that is queued is done, and the device is idle until the host has queued more.
"""

import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trl_packing.documents.labels import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class HostRow:
    """A packed row in numbers: where its documents lie, and which of their tokens are trained.

    boundaries: ``(N + 1,)`` int64, as `cu_seqlens`; the last documents may be padding.
    is_trained: ``(T,)`` bool, True on targets.
    padding: tokens at the end that belong to no document.
    max_length: what kernels are told is the longest document.
    """

    boundaries: np.ndarray
    is_trained: np.ndarray
    padding: int
    max_length: int

    @property
    def num_tokens(self) -> int:
        """Return T, padding included."""
        return len(self.is_trained)

    @property
    def lengths(self) -> np.ndarray:
        """Return the tokens of every document ``(N,)``, without the padding."""
        real = self.boundaries[self.boundaries <= self.num_tokens - self.padding]
        lengths = np.diff(real)
        return lengths[lengths > 0]


class PackedBatch(dict[str, Any]):
    """A packed micro-batch: tensors by name, and in `host` what the host knows of its row.

    `host` is None where nobody said. It goes along to another process, into pinned memory and to
    the device, and it is under the tensors there; a plain dictionary of them will do from then on.
    """

    host: HostRow | None

    def __init__(self, tensors: Mapping[str, Any], host: HostRow | None = None):
        super().__init__(tensors)
        self.host = host
        remember_row(self)

    def to(self, device: Any, non_blocking: bool = False) -> "PackedBatch":
        """Return the batch on `device`; a method of its own for accelerate, which looks for one.

        What is on the host is sent without waiting, also where nobody asked for it.
        """
        moved = {
            name: value.to(device, non_blocking=non_blocking or value.is_cpu)
            if torch.is_tensor(value)
            else value
            for name, value in self.items()
        }
        return PackedBatch(moved, self.host)

    def pin_memory(self) -> "PackedBatch":
        """Return the batch in memory from which devices read at once; data loaders ask for it."""
        pinned = {n: v.pin_memory() if torch.is_tensor(v) else v for n, v in self.items()}
        return PackedBatch(pinned, self.host)

    def __reduce__(self) -> tuple[Any, ...]:
        return PackedBatch, (dict(self), self.host)  # known in the process that unpickles it


def host_row(batch: Mapping[str, Any]) -> HostRow | None:
    """Return what the host knows of the batch's row, None if nothing came with it."""
    return getattr(batch, "host", None)


def for_kernels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch as a model takes it: with the longest document as an int, and no cache."""
    if batch.get("cu_seq_lens_q") is None:
        return dict(batch)
    longest, row = batch.get("max_length_q"), host_row(batch)
    if not isinstance(longest, int):
        boundaries = batch["cu_seq_lens_q"]
        longest = longest_document(boundaries) if row is None else row.max_length
    return dict(batch) | {"max_length_q": longest, "max_length_k": longest, "use_cache": False}


# Keys of a packed batch that say where its documents lie.
BOUNDARIES = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "seq_idx",
    "position_ids",
)


def remember_row(batch: Mapping[str, Any]) -> None:
    """Know the tokens of a packed batch again, and its numbers, as long as its tensors live."""
    if not torch.is_tensor(batch.get("cu_seq_lens_q")):
        return
    with _rows_lock:  # data loaders pin batches in a thread
        _rows_alive[batch["input_ids"]] = {k: batch[k] for k in BOUNDARIES if k in batch}
    row = host_row(batch)
    if row is not None:
        cache_row(batch["labels"], batch["cu_seq_lens_q"], row)


def rows_alive() -> list[tuple[Tensor, dict[str, Any]]]:
    """Return `input_ids` of every packed row in this process, and where its documents lie."""
    with _rows_lock:
        return list(_rows_alive.items())


_rows_alive: WeakIdKeyDictionary = WeakIdKeyDictionary()
_rows_lock = threading.Lock()


def is_cpu(tensor: Tensor) -> bool:
    """Whether the host can read `tensor` without waiting."""
    return tensor.device.type == "cpu"


def cache_values(tensor: Tensor, values: np.ndarray) -> None:
    """Remember `values` for `cached_values(tensor)`, until somebody writes into the tensor."""
    if not tensor.is_inference():  # these do not count who writes into them
        _kept[tensor] = (values, tensor._version)


def cached_values(tensor: Tensor) -> np.ndarray | None:
    """Return what was kept for `tensor`, None if nothing was or it has been written into."""
    values, version = _kept.get(tensor, (None, 0))
    return values if values is not None and tensor._version == version else None


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


_max_lengths: WeakIdKeyDictionary = WeakIdKeyDictionary()


def cache_row(labels: Tensor, cu_seqlens: Tensor, row: HostRow) -> None:
    """Remember `row` under its tensors on the device."""
    cache_values(labels, row.is_trained)
    cache_values(cu_seqlens, row.boundaries)
    _max_lengths[cu_seqlens] = row.max_length


def longest_document(cu_seqlens: Tensor) -> int:
    """Return the longest document that kernels are told of; asks the device if it must."""
    kept = _max_lengths.get(cu_seqlens)
    return int(np.diff(host_boundaries(cu_seqlens)).max()) if kept is None else kept


def host_boundaries(cu_seqlens: Tensor) -> list[int]:
    """Return the boundaries as Python ints, asking the device at most once a tensor."""
    boundaries = cached_values(cu_seqlens)
    if boundaries is None:
        boundaries = cu_seqlens.detach().cpu().numpy()
        if not is_cpu(cu_seqlens):
            cache_values(cu_seqlens, boundaries)
    return boundaries.tolist()


def is_trained(labels: Tensor) -> np.ndarray:
    """Return where `labels` are trained, bool in their shape; asks the device if it must."""
    found = cached_values(labels)
    if found is None:
        found = labels.detach().cpu().numpy() != IGNORE_INDEX
    return found.reshape(labels.shape)


def to_device(values: np.ndarray, device: torch.device | None) -> Tensor:
    """Return `values` on `device` (None: the CPU), without waiting for it."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Return when `device` has done all that is queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
