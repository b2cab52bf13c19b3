"""The model between steps: with the setting it was loaded with, and the weights that are used.

    inside a step      TRL's output_router_logits=True    the weights at which gradients are taken
    between steps      the setting the model came with    saved, or after an epoch: averaged weights

With `output_router_logits=True`, `generate` of a padded batch fails, also after loading. A
schedule-free optimizer trains other weights than those it is used for, and `Trainer` switches to
the latter only to evaluate (transformers 5.24); its `training_step` switches back.
"""

from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerCallback

from trl_packing.attention.model_facts import temporarily, text_config


class BetweenSteps(TrainerCallback):
    """Keeps what a step needs out of the model that is saved and asked between steps."""

    def on_init_end(self, *_: Any, model: Any = None, **kwargs: Any) -> None:
        """Remember the setting of the model as it was loaded; TRL sets its own behind this."""
        self._config = text_config(model)
        self._loaded = getattr(self._config, "output_router_logits", None)

    def begin(self) -> None:
        """Remember TRL's setting for the steps, and restore the one the model was loaded with."""
        self._of_steps = {}
        if self._loaded is not None:
            self._of_steps = {"output_router_logits": self._config.output_router_logits}
            self._config.output_router_logits = self._loaded

    def in_step(self) -> AbstractContextManager[None]:
        """Set what a step needs inside the block."""
        return temporarily(self._config, **self._of_steps)

    def on_epoch_end(self, *_: Any, optimizer: Any = None, **kwargs: Any) -> None:
        """Switch before the best model is loaded, whose weights must not be switched again."""
        use_averaged_weights(optimizer)


def use_averaged_weights(optimizer: Any) -> None:
    """Write the averaged weights of a schedule-free optimizer into its model."""
    if hasattr(optimizer, "eval"):
        optimizer.eval()
