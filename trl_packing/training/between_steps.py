"""The model between steps: with the settings it was loaded with, and the weights that are used.

    inside a step      TRL's output_router_logits=True    the weights at which gradients are taken
    between steps      the setting the model came with    saved, or after an epoch: averaged weights

With `output_router_logits=True`, `generate` of a padded batch fails, also after loading. A
schedule-free optimizer trains other weights than those it is used for, and `Trainer` switches to
the latter only to evaluate (transformers 5.24); its `training_step` switches back.
"""

from contextlib import AbstractContextManager
from typing import Any

from transformers import TrainerCallback

from trl_packing.attention.model_facts import text_config
from trl_packing.attention.state import temporarily

_OF_EXPERTS = ("output_router_logits", "router_aux_loss_coef")


class BetweenSteps(TrainerCallback):
    """Keeps what a step needs out of the model that is saved and asked between steps."""

    def on_init_end(
        self, args: Any, state: Any, control: Any, model: Any = None, **kwargs: Any
    ) -> None:
        """Remember the settings of experts; TRL writes its own behind this."""
        self._config = text_config(model)
        self._loaded = self._settings(_OF_EXPERTS)

    def begin(self) -> None:
        """Remember TRL's settings of experts, and set those the model was loaded with."""
        self._of_steps = self._settings(self._loaded)
        for name, value in self._loaded.items():
            setattr(self._config, name, value)

    def in_step(self) -> AbstractContextManager[None]:
        """Set what a step needs inside the block."""
        return temporarily(self._config, **self._of_steps)

    def on_epoch_end(
        self, args: Any, state: Any, control: Any, optimizer: Any = None, **kwargs: Any
    ) -> None:
        """Switch before the best model is loaded, whose weights must not be switched again."""
        use_averaged_weights(optimizer)

    def _settings(self, names: Any) -> dict[str, Any]:
        return {name: getattr(self._config, name) for name in names if hasattr(self._config, name)}


def use_averaged_weights(optimizer: Any) -> None:
    """Write the averaged weights of a schedule-free optimizer into its model."""
    if callable(getattr(optimizer, "eval", None)):
        optimizer.eval()
