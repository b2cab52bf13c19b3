"""What the host knows of a packed row, so that nobody has to ask the device.

    collator           makes a `HostRow` beside the tensors; it stays on the host
    _prepare_inputs    takes it out of the batch, and keeps it under the row's tensors (`keep`)
    attention, head    read the numbers of a tensor from it (`known`)

Asking a device for a number (`item`, `tolist`, a boolean index) makes the host wait until all work
that is queued is done, and the device is idle until the host has queued more.
"""

from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trl_packing.labels import IGNORE_INDEX

# The key of a batch. No key of Hugging Face's, and not for the model.
HOST_ROW = "host_row"


@dataclass(frozen=True, eq=False)
class HostRow:
    """A packed row in numbers: where its documents lie, and which of their tokens are trained.

    boundaries: ``(N + 1,)`` int64, as `cu_seqlens`; the last documents may be padding.
    is_trained: ``(T,)`` bool, True on targets.
    padding: tokens at the end that belong to no document.
    """

    boundaries: np.ndarray
    is_trained: np.ndarray
    padding: int

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


def on_host(tensor: Tensor) -> bool:
    """Whether the host can read `tensor` without waiting."""
    return tensor.device.type == "cpu"


def keep(tensor: Tensor, values: np.ndarray) -> None:
    """Remember `values` for `known(tensor)`, until somebody writes into the tensor."""
    if not tensor.is_inference():  # these do not count who writes into them
        _kept[tensor] = (values, tensor._version)


def known(tensor: Tensor) -> np.ndarray | None:
    """Return what was kept for `tensor`, None if nothing was or it has been written into."""
    values, version = _kept.get(tensor, (None, 0))
    return values if values is not None and tensor._version == version else None


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()


def keep_row(labels: Tensor, cu_seqlens: Tensor, row: HostRow) -> None:
    """Remember `row` under its tensors on the device."""
    keep(labels, row.is_trained)
    keep(cu_seqlens, row.boundaries)


def host_boundaries(cu_seqlens: Tensor) -> list[int]:
    """Return the boundaries as Python ints, asking the device at most once a tensor."""
    boundaries = known(cu_seqlens)
    if boundaries is None:
        boundaries = cu_seqlens.detach().cpu().numpy()
        if not on_host(cu_seqlens):
            keep(cu_seqlens, boundaries)
    return boundaries.tolist()


def is_trained(labels: Tensor) -> np.ndarray:
    """Return where `labels` are trained, bool in their shape; asks the device if it must."""
    found = known(labels)
    if found is None:
        found = labels.detach().cpu().numpy() != IGNORE_INDEX
    return found.reshape(labels.shape)


def sent(values: np.ndarray, device: torch.device | None) -> Tensor:
    """Return `values` on `device` (None: the CPU), without waiting for it."""
    return torch.from_numpy(values).to(device, non_blocking=True)


def wait_for(device: torch.device) -> None:
    """Return when `device` has done all that is queued."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
