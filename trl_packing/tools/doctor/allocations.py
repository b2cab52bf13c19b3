"""Counts the bytes of tensors while code runs, also of tensors without numbers (fake tensors).

with Allocations() as memory:
    model(...)
memory.peak    the most bytes that were in use at once
"""

import weakref
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves


class Allocations(TorchDispatchMode):
    """Counts the bytes of all storages that operations make inside the block.

    Attributes:
        alive: bytes that are in use now.
        peak: the most bytes that were in use at once.
    """

    def __init__(self) -> None:
        super().__init__()
        self.alive = self.peak = 0
        self._sizes: dict[int, int] = {}
        self._assumes_equal = False

    def add(self, *tensors: Tensor) -> None:
        """Count tensors that existed before."""
        for tensor in tensors:
            storage = tensor.untyped_storage()
            key = id(storage)  # torch keeps one object for each storage
            if key not in self._sizes:
                self._sizes[key] = storage.nbytes()
                self.alive += storage.nbytes()
                self.peak = max(self.peak, self.alive)
                weakref.finalize(storage, self._release, key)

    def _release(self, key: int) -> None:
        self.alive -= self._sizes.pop(key)

    @contextmanager
    def equal_gradients(self) -> Iterator[None]:
        """Answer yes inside the block, where the loss head asks whether all gradients are equal."""
        self._assumes_equal = True
        try:
            yield
        finally:
            self._assumes_equal = False

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if self._assumes_equal and func is torch.ops.aten._local_scalar_dense.default:
            return True
        result = func(*args, **(kwargs or {}))
        self.add(*(leaf for leaf in tree_leaves(result) if isinstance(leaf, Tensor)))
        return result
