"""Warns of a user's loss that calls another model on a packed row, without its boundaries."""

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel

from trl_packing.attention.calls import allows_other_rows, current_row

logger = get_logger(__name__)


@dataclass(eq=False)
class OtherModels:
    """Watches the first micro-batches of a user's loss, by a hook on modules other than `model`."""

    model: nn.Module
    _watched_steps: int = 4

    @contextmanager
    def watch(self) -> Iterator[None]:
        """Warn once if another model is called on the current row inside the block."""
        if not self._watched_steps:
            yield
            return
        hook = torch_module.register_module_forward_hook(self._look, with_kwargs=True)
        try:
            yield
        finally:
            self._watched_steps = max(self._watched_steps - 1, 0)
            hook.remove()
            # workaround: torch 2.13 leaves the id of a removed hook, and torch.compile warns of it
            torch_module._global_forward_hooks_with_kwargs.pop(hook.id, None)

    def _look(self, module: nn.Module, args: Any, arguments: dict[str, Any], _output: Any) -> None:
        row = current_row() if self._watched_steps else None
        if row is None or allows_other_rows() or not isinstance(module, PreTrainedModel):
            return
        ids = arguments.get("input_ids", args[0] if args else None)
        if not torch.is_tensor(ids) or ids.shape[:2] != row["input_ids"].shape:
            return
        is_told = arguments.get("position_ids") is not None and arguments.get("use_cache") is False
        # A copy of the run's model, or an enabled one, has a way of packed calls.
        if is_told or hasattr(module.forward, "packed_way") or module in self.model.modules():
            return
        self._watched_steps = 0
        logger.warning_once(
            f"{type(module).__name__}, which is not the model of this run, was called on a packed "
            "row without boundaries: documents see each other. Call it with **inputs, or call "
            "trl_packing.enable_packing on it before train()"
        )
