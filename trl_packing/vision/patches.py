"""Patches of images: positions of the vision tower, from the output of a processor or from sizes.

    pixel_values    (patches, values of a patch)                 Qwen-VL, GLM-4V
                    (images, [tiles,] channels, height, width)   all others

A processor names patches, tiles or tokens of an image of any size. A rule is found that multiplies
one of these numbers; it must agree with the pixels of all trial images.
"""

import math
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

from transformers.image_processing_utils import select_best_resolution

#: Pixels of a side of a patch where the config does not say it.
_PATCH_SIZE = 14

#: Heights and widths of images, and how many images their rows have (placeholders.Size).
Sizes = Sequence[tuple[int, int, int]]

Rule = Callable[[Sizes], list[int]]


def patch_size_of(config: Any) -> int:
    """Return the pixels of a side of a patch."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", None) or _PATCH_SIZE
    return size[0] if isinstance(size, (list, tuple)) else size


def num_patches(made: Mapping[str, Any], patch_size: int) -> int:
    """Return the patches in the pixels that an image processor has made; 0 if it made none.

    Args:
        made: its output.
        patch_size: pixels of a side of a patch.
    """
    name = next((name for name in made if name.startswith("pixel_values")), None)
    return 0 if name is None else _num_patches(made[name], patch_size)


def _num_patches(pixels: Any, patch_size: int) -> int:
    if isinstance(pixels, (list, tuple)):
        return sum(_num_patches(part, patch_size) for part in pixels)
    shape: tuple[int, ...] = tuple(pixels.shape)
    if len(shape) > 3 or (len(shape) == 3 and shape[0] == 3):
        height, width = shape[-2:]
        return math.prod(shape[:-3]) * (height // patch_size) * (width // patch_size)
    return math.prod(shape[:-1])  # patches are rows of values


def patch_rule(
    processor: Any, images_kwargs: Mapping[str, Any], patches: Mapping[tuple[int, int, int], int]
) -> Rule | None:
    """Return a rule from sizes of images to their patches that agrees with trials; None if none is.

    Args:
        processor: of a vision-language model.
        images_kwargs: arguments with which it processes images.
        patches: of trial images, by size.
    """
    sizes = list(patches)
    for amounts in (
        partial(_named, processor, "num_image_patches"),
        partial(_named, processor, "num_image_tokens"),
        partial(_by_image_processor, processor, images_kwargs),
        partial(_tiles_of_pinpoints, processor),
    ):
        try:
            found = amounts(sizes)
        except Exception:  # arithmetic of some processors needs more than sizes
            continue
        factor, left = divmod(patches[sizes[0]], max(found[0], 1))
        if not left and [factor * n for n in found] == list(patches.values()):
            return partial(_multiplied, amounts, factor)
    return None


def _multiplied(amounts: Rule, factor: int, sizes: Sizes) -> list[int]:
    return [factor * amount for amount in amounts(sizes)]


def _named(processor: Any, name: str, sizes: Sizes) -> list[int]:
    found = processor._get_num_multimodal_tokens(image_sizes=[[*size[:2]] for size in sizes])
    return [int(amount) for amount in found[name]]


def _by_image_processor(
    processor: Any, images_kwargs: Mapping[str, Any], sizes: Sizes
) -> list[int]:
    count = processor.image_processor.get_number_of_image_patches
    return [int(count(height, width, dict(images_kwargs))) for height, width, _ in sizes]


def _tiles_of_pinpoints(processor: Any, sizes: Sizes) -> list[int]:
    """Return the tiles of LLaVA-NeXT and its relatives: a grid, and the image as a whole."""
    pinpoints = processor.image_processor.image_grid_pinpoints
    side = min(min(pinpoint) for pinpoint in pinpoints)
    best = [select_best_resolution(size[:2], pinpoints) for size in sizes]
    return [1 + (height // side) * (width // side) for height, width in best]
