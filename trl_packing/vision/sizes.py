"""The text that stands for an image of a given size, as the model's processor writes it.

    size 56 × 84      <|image_pad|> × 6                        a run, as long as arithmetic says
    size 512 × 512    <fake><row_1_col_1><image> × 64 <fake> … rows of tiles (Idefics3, Pixtral, …)

A processor with arithmetic for runs is asked for lengths. Any other processor is run once for each
size on a blank image. Either way the text depends on the size alone, and for some processors
(LLaVA-OneVision) on whether the row has other images. Patches are positions of the vision tower.
"""

import math
import re
from collections.abc import Iterable, Sequence
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np

#: Height and width of an image, and how many images its row has, up to 2.
Size = tuple[int, int, int]

#: Pixels of a side of a patch where the config does not say it.
_PATCH_SIZE = 14

_TRIALS: tuple[Size, ...] = (
    *((112, 168, 1), (300, 224, 1), (640, 427, 1)),
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
    known = [token for token in processor.image_token_ids if token is not None]
    return int(
        known[0] if known else processor.tokenizer.convert_tokens_to_ids(processor.image_token)
    )


class Placeholders:
    """Placeholders of a processor by image size.

    Args:
        processor: of a vision-language model.
        patch_size: pixels of a side of a patch of its tower.
    """

    def __init__(self, processor: Any, patch_size: int = _PATCH_SIZE):
        self.processor = processor
        self.patch_size = patch_size
        self.token = placeholder_token(processor)
        self.feature_id = feature_id(processor)
        self.feature_token: str = processor.tokenizer.convert_ids_to_tokens(self.feature_id)
        options = processor._merge_kwargs(tokenizer_init_kwargs=processor.tokenizer.init_kwargs)
        self._options = options["images_kwargs"]
        self._known: dict[Size, Placeholder] = {}

    def learn(self, sizes: Iterable[Size]) -> None:
        """Find the placeholders of images of these sizes; ValueError if one is refused."""
        new = sorted(set(map(self._key, sizes)) - self._known.keys())
        if self._amounts is not None:
            name, factor = self._amounts
            numbers = self._named("num_image_tokens", new), self._named(name, new)
            for size, length, amount in zip(new, *numbers, strict=True):
                self._known[size] = Placeholder(self.feature_token, (length,), factor * amount)
            return
        self._known |= {size: self._measured(size) for size in new}

    def of(self, size: Size) -> Placeholder:
        """Return the placeholder of an image of a size that was learned."""
        return self._known[self._key(size)]

    def _key(self, size: Size) -> Size:
        return size if self._counts_images else (*size[:2], 1)

    @cached_property
    def _counts_images(self) -> bool:
        """Whether an image has another placeholder beside a second image of its row."""
        height, width, _ = _TRIALS[0]
        return self._measured((height, width, 1)) != self._measured((height, width, 2))

    @cached_property
    def _amounts(self) -> tuple[str, int] | None:
        """The name of numbers of which patches are a multiple, and the factor; None if unknown.

        An image is then one run of tokens, and both agree with the pixels of all trial images.
        """
        if not hasattr(self.processor, "_get_num_multimodal_tokens") or self._counts_images:
            return None
        try:
            measured = [self._measured(size) for size in _TRIALS]
            lengths = self._named("num_image_tokens", _TRIALS)
        except Exception:  # arithmetic of some processors needs more than sizes
            return None
        if [image[:2] for image in measured] != [(self.feature_token, (n,)) for n in lengths]:
            return None
        patches = [image.patches for image in measured]
        for name in ("num_image_patches", "num_image_tokens"):
            found = self._named(name, _TRIALS)
            factor = patches[0] // max(found[0], 1)
            if [factor * amount for amount in found] == patches:
                return name, factor
        return None

    def _named(self, name: str, sizes: Sequence[Size]) -> list[int]:
        if not sizes:
            return []
        pairs = [[*size[:2]] for size in sizes]
        found = self.processor._get_num_multimodal_tokens(image_sizes=pairs)
        return [int(amount) for amount in found[name]]

    def _measured(self, size: Size) -> Placeholder:
        from PIL import Image as PillowImage

        height, width, images = size
        blank = PillowImage.fromarray(np.full((height, width, 3), 127, np.uint8))
        made, (text, *_) = self.processor._process_images([[blank] * images], **self._options)
        run = re.compile(f"(?:{re.escape(self.feature_token)})+")
        runs = [len(found) // len(self.feature_token) for found in run.findall(text)]
        if not runs:
            raise ValueError(f"it writes no {self.feature_token} for an image, but {text[:80]!r}")
        pixels = next((made[name] for name in made if name.startswith("pixel_values")), ())
        patches = _num_patches(pixels, self.patch_size) // images
        return Placeholder(run.sub(lambda _: self.feature_token, text), tuple(runs), patches)


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
