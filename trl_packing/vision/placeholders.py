"""The text that stands for an image of a given size, as the model's processor writes it.

    size 56 × 84      <|image_pad|> × 6                        a run, as long as arithmetic says
    size 512 × 512    <fake><row_1_col_1><image> × 64 <fake> … rows of tiles (Idefics3, Pixtral, …)

A processor with arithmetic for runs is asked for lengths. Any other processor is run once for each
size on a blank image. Either way the text depends on the size alone, and for some processors
(LLaVA-OneVision) on whether the row has other images. A few rows are verified with their pixels.
"""

import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from tqdm.auto import tqdm

from trl_packing.vision.patches import Rule, num_patches, patch_rule

logger = get_logger(__name__)

#: Height and width of an image, and how many images its row has, up to 2.
Size = tuple[int, int, int]

_TRIALS: tuple[Size, ...] = (
    *((112, 168, 1), (300, 224, 1), (640, 427, 1)),
    *((96, 480, 1), (1000, 1000, 1)),  # other grids of tiles
    *((70, 210, 1), (210, 126, 1)),  # odd numbers of patches
)
_PROGRESS = 50  # sizes from which measuring them shows a progress bar


@dataclass(frozen=True)
class Placeholder:
    """The text of an image, with every run of feature tokens written as one token.

    Attributes:
        text: replaces the placeholder of a chat template.
        runs: feature tokens of each run in `text`.
        patches: positions of the vision tower.
    """

    text: str
    runs: tuple[int, ...]
    patches: int = 0

    @property
    def num_features(self) -> int:
        """Tokens whose embeddings come from the image."""
        return sum(self.runs)


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

    Attributes:
        token: the placeholder that chat templates write for an image.
        feature_id: id of the tokens whose embeddings come from the image.
        feature_token: the same as text.
    """

    def __init__(self, processor: Any, patch_size: int = 14):
        self.processor = processor
        self.patch_size = patch_size
        self.token = placeholder_token(processor)
        self.feature_id = feature_id(processor)
        self.feature_token: str = processor.tokenizer.convert_ids_to_tokens(self.feature_id)
        self._known: dict[Size, Placeholder] = {}

    def learn(self, sizes: Iterable[Size]) -> None:
        """Find the placeholders of images of these sizes.

        Raises:
            ValueError: the processor refuses an image of some size.
        """
        new = sorted(set(map(self._key, sizes)) - self._known.keys())
        rule = self._patch_rule
        if rule is not None:
            numbers = zip(new, self._lengths(new), rule(new), strict=True)
            for size, length, patches in numbers:
                self._known[size] = Placeholder(self.feature_token, (length,), patches)
            return
        words = "Measuring image sizes"
        for size in tqdm(new, desc=words, disable=len(new) < _PROGRESS):
            self._known[size] = self._measured(size)

    def _key(self, size: Size) -> Size:
        return size if self.counts_images else (*size[:2], 1)

    def of(self, size: Size) -> Placeholder:
        """Return the placeholder of an image of a size that was learned."""
        return self._known[self._key(size)]

    @cached_property
    def counts_images(self) -> bool:
        """Whether an image has another placeholder beside a second image of its row."""
        height, width, _ = _TRIALS[0]
        return self._measured((height, width, 1)) != self._measured((height, width, 2))

    @cached_property
    def _patch_rule(self) -> Rule | None:
        """Patches by size, if the processor's arithmetic is right in all trials; else None.

        Then an image is one run of tokens, as long as that arithmetic says.
        """
        if not hasattr(self.processor, "_get_num_multimodal_tokens") or self.counts_images:
            return None
        try:
            measured = {size: self._measured(size) for size in _TRIALS}
            lengths = self._lengths(_TRIALS)
        except Exception:  # arithmetic of some processors needs more than sizes
            return None
        found = [(image.text, image.runs) for image in measured.values()]
        if found != [(self.feature_token, (length,)) for length in lengths]:
            return None
        patches = {size: image.patches for size, image in measured.items()}
        return patch_rule(self.processor, self.images_kwargs(), patches)

    def _lengths(self, sizes: Sequence[Size]) -> list[int]:
        if not sizes:
            return []
        found = self.processor._get_num_multimodal_tokens(
            image_sizes=[[*size[:2]] for size in sizes]
        )
        return [int(length) for length in found["num_image_tokens"]]

    def _measured(self, size: Size) -> Placeholder:
        from PIL import Image as PillowImage

        height, width, images = size
        blank = PillowImage.fromarray(np.full((height, width, 3), 127, np.uint8))
        images_kwargs = self.images_kwargs()
        made, (text, *_) = self.processor._process_images([[blank] * images], **images_kwargs)
        patches = num_patches(made, self.patch_size) // images
        run = re.compile(f"(?:{re.escape(self.feature_token)})+")
        runs = [len(found) // len(self.feature_token) for found in run.findall(text)]
        if not runs:
            raise ValueError(f"it writes no {self.feature_token} for an image, but {text[:80]!r}")
        return Placeholder(run.sub(lambda _: self.feature_token, text), tuple(runs), patches)

    def images_kwargs(self) -> dict[str, Any]:
        """Return the arguments with which the processor processes images by default."""
        tokenizer = self.processor.tokenizer
        merged = self.processor._merge_kwargs(tokenizer_init_kwargs=tokenizer.init_kwargs)
        return merged["images_kwargs"]
