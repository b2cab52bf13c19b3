"""Keeps the boundaries of documents out of vision towers.

transformers passes all unknown arguments of a call on to the tower. Its attention would then take
the boundaries of the text for those of its patches, if it runs by FlashAttention.
"""

from typing import Any

from torch import nn
from transformers import PreTrainedModel

from trl_packing.attention.model_facts import unwrap_peft
from trl_packing.documents.host_row import BOUNDARIES

_DROPPED = frozenset(BOUNDARIES) - {"position_ids"}  # a tower may have positions of its own


def hide_boundaries(model: Any) -> None:
    """Call the vision towers of `model` without the boundaries of documents, from now on."""
    base = unwrap_peft(model)
    config = getattr(base.config, "vision_config", None)
    for module in base.modules():
        is_tower = isinstance(module, PreTrainedModel) and module.config is config
        if is_tower and _drop_boundaries not in module._forward_pre_hooks.values():
            module.register_forward_pre_hook(_drop_boundaries, with_kwargs=True)


def _drop_boundaries(
    _module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    return args, {name: value for name, value in kwargs.items() if name not in _DROPPED}
