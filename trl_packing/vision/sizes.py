"""The text that stands for an image of a given size, as the model's processor writes it.

    size 56 × 84      <|image_pad|> × 6                        a run, as long as arithmetic says
    size 512 × 512    <fake><row_1_col_1><image> × 64 <fake> … rows of tiles (Idefics3, Pixtral, …)

A processor without arithmetic is run once for each size on a blank image. Patches are positions of
the vision tower.
"""

import math
import re
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, NamedTuple

#: Height and width of an image, and how many images its row has, up to 2: LLaVA-OneVision cuts an
#: image into tiles only if it is alone in its row.
Size = tuple[int, int, int]

#: Pixels of a side of a patch where the config does not say it.
_PATCH_SIZE = 14

_TRIALS: tuple[Size, ...] = (
    *((112, 168, 1), (112, 168, 2), (300, 224, 1), (640, 427, 1)),
    *((96, 480, 1), (1000, 1000, 1)),  # other grids of tiles
    *((70, 210, 1), (210, 126, 1)),  # odd numbers of patches
)


class Placeholder(NamedTuple):
    """The text of an image, with every run of feature tokens written as one token."""

    text: str
    runs: tuple[int, ...]  # feature tokens of each
    patches: int


def placeholder_token(processor: Any) -> str:
    """Return the text that chat templates write for an image."""
    return getattr(processor, "image_placeholder_token", None) or processor.image_token


def feature_id(processor: Any) -> int:
    """Return the id of the tokens whose embeddings come from an image."""
    own = processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    return int(next((token for token in processor.image_token_ids if token is not None), own))


def placeholders_of(
    processor: Any, places: Mapping[Size, str], patch_size: int = _PATCH_SIZE
) -> dict[Size, Placeholder]:
    """Return the placeholder of each size.

    Args:
        processor: of a vision-language model.
        places: where images of each size are, for messages.
        patch_size: pixels of a side of a patch of its tower.

    Raises:
        ValueError: the processor refuses a size.
    """
    if not places:
        return {}
    make = _arithmetic(processor, patch_size)
    found = {}
    for size, place in places.items():
        try:
            found[size] = make(size)
        except ValueError as error:
            raise ValueError(
                f"{place}: an image of {size[1]} × {size[0]} pixels is refused: {error}"
            ) from error
    return found


def _arithmetic(processor: Any, patch_size: int) -> Callable[[Size], Placeholder]:
    """Return what makes placeholders: arithmetic if it agrees with the pixels of all trials."""
    measured = partial(_measured, processor, patch_size)
    try:
        trials = [*map(measured, _TRIALS)]
        factor = trials[0].patches // _calculated(processor, 1, _TRIALS[0]).patches
        calculated = partial(_calculated, processor, factor)
        return calculated if [*map(calculated, _TRIALS)] == trials else measured
    except Exception:  # some processors have no arithmetic, or one that needs more than sizes
        return measured


def _calculated(processor: Any, factor: int, size: Size) -> Placeholder:
    """Return one run of tokens; patches are a multiple of what the processor calls so."""
    token = processor.tokenizer.convert_ids_to_tokens(feature_id(processor))
    found = processor._get_num_multimodal_tokens(image_sizes=[[*size[:2]]])
    patches = factor * int(found["num_image_patches"][0])
    return Placeholder(token, (int(found["num_image_tokens"][0]),), patches)


def _measured(processor: Any, patch_size: int, size: Size) -> Placeholder:
    """Return what the processor writes for a blank image."""
    height, width, images = size
    token = processor.tokenizer.convert_ids_to_tokens(feature_id(processor))
    options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
    blanks = [[gray_image(height, width)] * images]
    output, (text, *_) = processor._process_images(blanks, **options["images_kwargs"])
    run = re.compile(f"(?:{re.escape(token)})+")
    runs = tuple(len(found) // len(token) for found in run.findall(text))
    if not runs:
        raise ValueError(f"it writes no {token} for an image, but {text[:80]!r}")
    pixels = next((output[name] for name in output if name.startswith("pixel_values")), ())
    patches = _num_patches(pixels, patch_size) // images
    return Placeholder(run.sub(lambda _: token, text), runs, patches)


def gray_image(height: int, width: int) -> Any:
    """Return a PIL image of one gray."""
    from PIL import Image as PillowImage

    return PillowImage.new("RGB", (width, height), (127, 127, 127))


def patch_size_of(config: Any) -> int:
    """Return the pixels of a side of a patch."""
    size = getattr(getattr(config, "vision_config", None), "patch_size", None) or _PATCH_SIZE
    return size[0] if isinstance(size, (list, tuple)) else size


def _num_patches(pixels: Any, patch_size: int) -> int:
    """Return the patches in the pixels that an image processor has made."""
    if isinstance(pixels, (list, tuple)):
        return sum(_num_patches(part, patch_size) for part in pixels)
    shape: tuple[int, ...] = tuple(pixels.shape)  # (images, [tiles,] channels, height, width)
    if len(shape) > 3 or (len(shape) == 3 and shape[0] == 3):
        height, width = shape[-2:]
        return math.prod(shape[:-3]) * (height // patch_size) * (width // patch_size)
    return math.prod(shape[:-1])  # patches are rows of values
