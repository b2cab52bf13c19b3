"""The methods that compute the loss of a step: ours, or a user's in a subclass or on the trainer.

compute_loss     ours         weights each token, and is passed the number of trained tokens
                 a user's     is passed what TRL passes it, and may call ours
training_step    ours         calls `compute_loss`
                 a user's     may call either of ours, or compute another loss
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from accelerate.logging import get_logger
from torch import nn
from torch.nn.modules import module as torch_module
from transformers import PreTrainedModel
from trl import SFTTrainer

from trl_packing.attention.calls import allows_other_rows, current_row

logger = get_logger(__name__)


class UserLoss:
    """Knows whether a user's method computes the loss of a run.

    Args:
        trainer: its methods are read at each call, because a user may set others.
        ours: the class whose methods are ours.
    """

    def __init__(self, trainer: SFTTrainer, ours: type[SFTTrainer]):
        self.trainer = trainer
        self.ours = ours
        self._watched_steps, self._has_warned = 4, False

    def is_ours(self) -> bool:
        """Return whether `compute_loss` is ours."""
        found = getattr(self.trainer.compute_loss, "__func__", None)
        return found is self.ours.compute_loss and not self.is_between()

    def is_between(self) -> bool:
        """Return whether a class between ours and `SFTTrainer` computes the loss."""
        classes = type(self.trainer).__mro__
        behind = classes[classes.index(self.ours) + 1 :]
        owner = next((c for c in behind if "compute_loss" in vars(c)), SFTTrainer)
        return owner is not SFTTrainer

    def step_is_ours(self) -> bool:
        """Return whether a user's `training_step`, if there is one, takes its loss from ours."""
        step = getattr(self.trainer.training_step, "__func__", self.trainer.training_step)
        names = getattr(getattr(step, "__code__", None), "co_names", ())
        calls_ours = not {"compute_loss", "training_step"}.isdisjoint(names)
        return self.is_ours() and (step is self.ours.training_step or calls_ours)

    def hides_count(self, takes_count: bool) -> bool:
        """Return whether `compute_loss` is a user's, which gets no number of items from TRL.

        Args:
            takes_count: whether the model class takes the number of trained tokens of a step.
        """
        takes_count = takes_count or self.trainer.compute_loss_func is not None
        return not (self.is_ours() or takes_count)

    @contextmanager
    def watch_other_models(self) -> Iterator[None]:
        """Warn once if a user's loss calls another model on the row, without its boundaries.

        The first micro-batches are watched, by a hook on all modules.
        """
        if not self._watched_steps or self.step_is_ours() or self.trainer.args.torch_compile:
            yield
            return
        self._watched_steps -= 1
        hook = torch_module.register_module_forward_hook(self._look, with_kwargs=True)
        try:
            yield
        finally:
            hook.remove()
            # workaround: torch 2.13 leaves the id of a removed hook, and torch.compile warns of it
            torch_module._global_forward_hooks_with_kwargs.pop(hook.id, None)

    def _look(self, module: nn.Module, args: Any, arguments: dict[str, Any], _output: Any) -> None:
        row = None if self._has_warned else current_row()
        if row is None or allows_other_rows() or not isinstance(module, PreTrainedModel):
            return
        ids = arguments.get("input_ids", args[0] if args else None)
        if not torch.is_tensor(ids) or ids.shape[:2] != row["input_ids"].shape:
            return
        is_told = arguments.get("position_ids") is not None and arguments.get("use_cache") is False
        if is_told or _is_packed(module) or any(module is m for m in self.trainer.model.modules()):
            return
        self._has_warned = True
        logger.warning_once(
            f"{type(module).__name__}, which is not the model of this run, was called on a packed "
            "row without the boundaries of its documents: they see each other there. Call it with "
            "**inputs, or call trl_packing.enable_packing on it before train()"
        )


def _is_packed(module: nn.Module) -> bool:
    """Whether packed calls of `module` are known: a copy of the run's model, or an enabled one."""
    forward = vars(module).get("forward")
    while forward is not None:
        if getattr(forward, "__globals__", {}).get("__name__", "").startswith("trl_packing"):
            return True
        forward = getattr(forward, "__wrapped__", None)
    return False
