"""Time of a vision tower, in tokens of the text model that take as long.

    a position in a layer        24 · width² operations forward      text, and tower
    a pair of positions there     4 · width                          all pairs of an image or tile

    Qwen2.5-VL 7B     a patch takes as long as 0.15 tokens; four of them are a token of an image

Both parts are treated as shaped like a Llama, as in the cost of attention (packing/sampler.py).
`trl-packing plan` therefore finds the same costs from a config as the trainer from its model. A
frozen tower takes less time than this: no gradient is computed.
"""

from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_packing.models.introspection import layer_values

#: Pixels of a side of a patch where the config does not say it.
_PATCH_SIZE = 14


@dataclass(frozen=True)
class TowerCost:
    """Costs of patches in tokens of the text model.

    Attributes:
        per_patch: of matrices.
        per_pair: of attention, for a pair of patches that see each other.
        window: patches that a patch sees at most; None for all of its image.
        share_windowed: share of the layers to which the window applies.
    """

    per_patch: float = 0.0
    per_pair: float = 0.0
    window: int | None = None
    share_windowed: float = 0.0

    @classmethod
    def of(cls, config: Any) -> "TowerCost":
        """Return the costs of a vision-language model; none if its config does not name sizes."""
        text, vision = config.get_text_config(), getattr(config, "vision_config", None)
        width = _number(vision, "embed_dim", "hidden_size")
        layers = _number(vision, "depth", "num_hidden_layers")
        text_widths = layer_values(text, "hidden_size")
        text_layers = _number(text, "num_hidden_layers")
        if not (width and layers and text_widths and text_layers):
            return cls()
        token = 24 * max(text_widths) ** 2 * text_layers
        window, share = _window(vision, layers)
        return cls(24 * width**2 * layers / token, 4 * width * layers / token, window, share)

    def of_images(self, patches: np.ndarray) -> np.ndarray:
        """Return the cost of each image in tokens, ``(images,)`` float64.

        Args:
            patches: of each image, ``(images,)``.
        """
        patches = patches.astype(np.float64)
        seen = patches
        if self.window is not None:
            windowed = self.share_windowed * np.minimum(patches, self.window)
            seen = windowed + (1 - self.share_windowed) * patches
        return patches * (self.per_patch + self.per_pair * seen)


def patch_size_of(config: Any) -> int:
    """Return the pixels of a side of a patch."""
    return _number(getattr(config, "vision_config", None), "patch_size") or _PATCH_SIZE


def _window(vision: Any, layers: int) -> tuple[int | None, float]:
    """Return the patches that a patch sees at most, and in which share of the layers."""
    patch = _number(vision, "patch_size") or _PATCH_SIZE
    full, window = getattr(vision, "fullatt_block_indexes", None), _number(vision, "window_size")
    if full is not None and window:  # Qwen2.5-VL
        return (window // patch) ** 2, 1 - len(full) / layers
    size = _number(vision, "image_size")
    if size and not hasattr(vision, "spatial_merge_size"):  # tiles of one size
        return (size // patch) ** 2, 1.0
    return None, 0.0


def _number(config: Any, *names: str) -> int | None:
    """Return the first of these fields that a config has; of a list, its first entry."""
    value = next((v for n in names if (v := getattr(config, n, None)) is not None), None)
    return value[0] if isinstance(value, (list, tuple)) else value
