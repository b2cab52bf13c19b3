"""Where a packed row lives, and its numbers on the CPU, so that no kernel waits for a sync.

    the row            `PackedBatch`     tensors by name, boundaries among them; a batch holds them
    its numbers        `HostRow`         beside the tensors, as long as the batch lives
    of one tensor      `cached_values`   until the tensor is written to, or dies
    found by tokens    `rows_alive`      boundaries by `input_ids`, until these die
    the micro-batch    `current_row`     in attention/calls.py, until the next one is set
    the running call   `running_row`     there, until the call returns

The collator makes the batch; `batch.to(device)` caches its numbers under its tensors there, where
attention and head read them, from a plain dictionary of the tensors, too.

Reading a number from a device (`item`, `tolist`, a boolean index) makes the host wait for all
queued work; then the device is idle until the host has queued more.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.utils.weak import WeakIdKeyDictionary

from trl_packing.documents.labels import IGNORE_INDEX


@dataclass(frozen=True, eq=False)
class HostRow:
    """Numbers of a packed row of T tokens and N documents, on the CPU.

    Attributes:
        boundaries: as `cu_seqlens`, int64, of documents or, with shared prefixes, of segments.
        is_trained: ``(T,)`` bool, True on targets; as long as the labels of a divided row.
        padding: tokens at the end that belong to no document.
        lengths: tokens of each document, ``(N,)`` int64.
        num_trained: trained tokens of all documents.
        max_length: tokens of the longest document, as passed to kernels.
        sources: the source of each document, ``(N,)`` int64; None if they are not told apart.
        num_images: images of the documents.
        is_counted: Whether this rank counts the documents; one does of those that divide a row.
    """

    boundaries: np.ndarray
    is_trained: np.ndarray
    padding: int
    lengths: np.ndarray
    num_trained: int
    max_length: int
    sources: np.ndarray | None = None
    num_images: int = 0
    is_counted: bool = True

    @property
    def num_tokens(self) -> int:
        """T, padding included."""
        return int(self.boundaries[-1])


# Keys of a packed batch that hold its document boundaries.
BOUNDARIES = (
    "cu_seq_lens_q",
    "cu_seq_lens_k",
    "max_length_q",
    "max_length_k",
    "key_index",
    "seq_idx",
    "position_ids",
)
# Those whose values the host reads.
_READ_BY_HOST = {"cu_seq_lens_q", "cu_seq_lens_k", "key_index"}


class PackedBatch(dict[str, Any]):
    """A packed micro-batch: tensors by name, and in `host` the CPU copy of its row, if it has one.

    `host` goes along to other processes, pinned memory and the device. So do `parts`: rows of some
    of its documents each, which run one after another; none if the row runs as a whole.
    """

    def __init__(
        self,
        tensors: Mapping[str, Any],
        host: HostRow | None = None,
        parts: Sequence["PackedBatch"] = (),
    ):
        super().__init__(tensors)
        self.host = host
        self.parts = parts
        remember_row(self)

    def to(self, device: Any, non_blocking: bool = False) -> "PackedBatch":
        """Return the batch on `device`; accelerate calls this method if a batch has one.

        The device decides whether the copy is waited for (`send`), not `non_blocking`.
        """
        moved = {n: send(v, device) if torch.is_tensor(v) else v for n, v in self.items()}
        for name in _READ_BY_HOST & self.keys():
            cache_values(moved[name], host_values(self[name]))
        return PackedBatch(moved, self.host, [part.to(device) for part in self.parts])

    def pin_memory(self) -> "PackedBatch":
        """Return the batch in pinned memory; data loaders call this."""
        pinned = {n: v.pin_memory() if torch.is_tensor(v) else v for n, v in self.items()}
        return PackedBatch(pinned, self.host, [part.pin_memory() for part in self.parts])

    def __reduce__(self) -> tuple[Any, ...]:
        # Numbers are cached in the process that unpickles it.
        return PackedBatch, (dict(self), self.host, self.parts)


def host_row(batch: Mapping[str, Any]) -> HostRow | None:
    """Return the CPU copy of the batch's row, None if the batch has none."""
    return getattr(batch, "host", None)


def parts_of(batch: Mapping[str, Any]) -> list[Mapping[str, Any]]:
    """Return the rows of a micro-batch, which run one after another."""
    return list(getattr(batch, "parts", ())) or [batch]


def for_kernels(batch: Mapping[str, Any]) -> dict[str, Any]:
    """Return the batch as a model takes it: `max_length_q` as an int, and no key-value cache."""
    if batch.get("cu_seq_lens_q") is None:
        return dict(batch)
    queries = batch.get("max_length_q")
    if not isinstance(queries, int):
        queries = _longest(batch["cu_seq_lens_q"])
    keys = batch.get("max_length_k")
    if not isinstance(keys, int):
        keys = queries if batch.get("key_index") is None else _longest(batch["cu_seq_lens_k"])
    return dict(batch) | {"max_length_q": queries, "max_length_k": keys, "use_cache": False}


def for_counting(batch: Mapping[str, Any]) -> Mapping[str, Any]:
    """Return the batch as transformers counts its tokens: those of all documents, and padding."""
    row = host_row(batch)  # by token id, EOS may be padding, and a shared prefix counts once
    if row is None:
        return batch
    real = int(row.lengths.sum()) if row.is_counted else 0
    tokens = torch.empty(real + row.padding if row.is_counted else 0, device="meta")
    return {**batch, "input_ids": tokens, "attention_mask": torch.tensor(real)}


_rows_alive: WeakIdKeyDictionary = WeakIdKeyDictionary()


def remember_row(batch: Mapping[str, Any]) -> None:
    """Know the tokens of a packed batch again, and its numbers, as long as its tensors live."""
    boundaries = batch.get("cu_seq_lens_q")
    row = host_row(batch)
    if not torch.is_tensor(boundaries):
        return
    _rows_alive[batch["input_ids"]] = {k: batch[k] for k in BOUNDARIES if k in batch}
    if row is None:
        return
    cache_values(batch["labels"], row.is_trained)
    cache_values(boundaries, row.boundaries, row.max_length)
    for name in _READ_BY_HOST & batch.keys():
        if batch[name].is_cpu and cached_values(batch[name]) is None:
            cache_values(batch[name], batch[name].numpy())


def rows_alive() -> list[tuple[Tensor, dict[str, Any]]]:
    """Return `input_ids` of every packed row in this process, and its boundaries by key."""
    # Copied in one step, because data loaders pin batches in a thread. A lock would be inherited,
    # held, by a worker that is forked meanwhile.
    rows = _rows_alive.data.copy()
    return [(ids, row) for key, row in rows.items() if (ids := key()) is not None]


def _longest(cu_seqlens: Tensor) -> int:
    """Return the tokens of the longest document as passed to kernels; syncs if not cached."""
    kept = _known(cu_seqlens)
    if kept is None or kept.longest is None:
        return int(np.diff(host_values(cu_seqlens)).max())
    return kept.longest


class _Kept(NamedTuple):
    values: np.ndarray
    version: int  # of the tensor that had these values
    longest: int | None  # tokens of the longest document, if the values are boundaries


_kept: WeakIdKeyDictionary = WeakIdKeyDictionary()
# CUDA copies more bytes than these from memory that is not pinned while the host waits.
_LARGEST_STAGED = 64 * 1024


def is_cpu(tensor: Tensor) -> bool:
    """Whether `tensor` is on the CPU, where reading it needs no sync; tests replace this."""
    return tensor.device.type == "cpu"


def cache_values(tensor: Tensor, values: np.ndarray, longest: int | None = None) -> None:
    """Keep `values` for `cached_values(tensor)`, until the tensor is written to."""
    if not tensor.is_inference():  # inference tensors do not count writes
        _kept[tensor] = _Kept(values, tensor._version, longest)


def _known(tensor: Tensor) -> _Kept | None:
    kept = _kept.get(tensor)
    return kept if kept is not None and kept.version == tensor._version else None


def cached_values(tensor: Tensor) -> np.ndarray | None:
    """Return the values cached for `tensor`; None without any, or if it was written to."""
    kept = _known(tensor)
    return None if kept is None else kept.values


def host_boundaries(cu_seqlens: Tensor) -> list[int]:
    """Return the boundaries as Python ints, with at most one sync per tensor."""
    return host_values(cu_seqlens).tolist()


def host_values(tensor: Tensor) -> np.ndarray:
    """Return the values of `tensor`, with at most one sync per tensor."""
    values = cached_values(tensor)
    if values is None:
        values = tensor.detach().cpu().numpy()
        if not is_cpu(tensor):
            cache_values(tensor, values)
    return values


def is_trained(labels: Tensor) -> np.ndarray:
    """Return where `labels` are trained, bool in their shape; syncs if not cached."""
    found = cached_values(labels)
    if found is None:
        found = labels.detach().cpu().numpy() != IGNORE_INDEX
    return found.reshape(labels.shape)


def send(tensor: Tensor, device: Any) -> Tensor:
    """Return `tensor` on `device`, without waiting for the transfer where that is safe."""
    return tensor.to(device, non_blocking=keeps_source(torch.device(device)))


def keeps_source(device: torch.device) -> bool:
    """Whether a copy to `device` keeps its source until it is read; tests replace this.

    MPS reads it later, when its memory may hold other values (pytorch/pytorch#189690).
    """
    return device.type == "cuda"


def to_device(values: np.ndarray, device: torch.device | None) -> Tensor:
    """Return `values` on `device` (None: the CPU), on CUDA without waiting for the transfer."""
    tensor = torch.from_numpy(values)
    if device is None:
        return tensor
    if device.type == "cuda" and tensor.nbytes > _LARGEST_STAGED:
        tensor = tensor.pin_memory()
    return send(tensor, device)


def wait_for(device: torch.device) -> None:
    """Wait until `device` has finished all queued work."""
    if device.type != "cpu":
        torch.accelerator.synchronize(device)
