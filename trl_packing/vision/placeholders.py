"""The text that stands for an image of a given size, as the model's processor writes it.

    size 56 × 84      <|image_pad|> × 6                        a run, as long as arithmetic says
    size 512 × 512    <fake><row_1_col_1><image> × 64 <fake> … rows of tiles (Idefics3, Pixtral, …)

A processor with arithmetic for runs is asked for lengths. Any other processor is run once for each
size on a blank image. Either way the text depends on the size alone, which `documents.py` verifies
on the run's own rows.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from PIL import Image as PillowImage
from tqdm.auto import tqdm

logger = get_logger(__name__)

Size = tuple[int, int]  # height, width

_PROGRESS = 50  # sizes from which measuring them shows a progress bar


@dataclass(frozen=True)
class Placeholder:
    """The text of an image, with every run of feature tokens written as one token.

    Attributes:
        text: replaces the placeholder of a chat template.
        runs: feature tokens of each run in `text`.
    """

    text: str
    runs: tuple[int, ...]

    @property
    def num_features(self) -> int:
        """Tokens whose embeddings come from the image."""
        return sum(self.runs)


class Placeholders:
    """Placeholders of a processor by image size.

    Args:
        processor: of a vision-language model.

    Attributes:
        token: the placeholder that chat templates write for an image.
        feature_id: id of the tokens whose embeddings come from the image.
        feature_token: the same as text.
    """

    def __init__(self, processor: Any):
        self.processor = processor
        self.token: str = processor.image_token
        ids = [token for token in processor.image_token_ids if token is not None]
        self.feature_id = int(ids[0])
        self.feature_token: str = processor.tokenizer.convert_ids_to_tokens(self.feature_id)
        self._known: dict[Size, Placeholder] = {}

    def learn(self, sizes: Iterable[Size]) -> None:
        """Find the placeholders of images of these sizes, height and width.

        Raises:
            ValueError: the processor refuses an image of some size.
        """
        new = sorted(set(sizes) - self._known.keys())
        if self._has_arithmetic:
            for size, length in zip(new, self._lengths(new), strict=True):
                self._known[size] = Placeholder(self.feature_token, (length,))
            return
        words = "Measuring image sizes"
        for size in tqdm(new, desc=words, disable=len(new) < _PROGRESS):
            self._known[size] = self._measured(size)

    def of(self, size: Size) -> Placeholder:
        """Return the placeholder of an image of a size that was learned."""
        return self._known[size]

    @cached_property
    def _has_arithmetic(self) -> bool:
        """Whether images are runs, as long as the processor's arithmetic says, in three trials."""
        if not hasattr(self.processor, "_get_num_multimodal_tokens"):
            return False
        trials = [(112, 168), (300, 224), (640, 427)]
        try:
            measured = [self._measured(size) for size in trials]
            expected = [Placeholder(self.feature_token, (n,)) for n in self._lengths(trials)]
        except Exception:  # arithmetic of some processors needs more than sizes
            return False
        return measured == expected

    def _lengths(self, sizes: list[Size]) -> list[int]:
        if not sizes:
            return []
        found = self.processor._get_num_multimodal_tokens(image_sizes=[[*size] for size in sizes])
        return [int(length) for length in found["num_image_tokens"]]

    def _measured(self, size: Size) -> Placeholder:
        height, width = size
        blank = PillowImage.fromarray(np.full((height, width, 3), 127, np.uint8))
        images_kwargs = self.images_kwargs()
        _, (text, *_) = self.processor._process_images([[blank]], **images_kwargs)
        run = re.compile(f"(?:{re.escape(self.feature_token)})+")
        runs = [len(found) // len(self.feature_token) for found in run.findall(text)]
        return Placeholder(run.sub(lambda _: self.feature_token, text), tuple(runs))

    def images_kwargs(self) -> dict[str, Any]:
        """Return the arguments with which the processor processes images by default."""
        tokenizer = self.processor.tokenizer
        merged = self.processor._merge_kwargs(
            tokenizer_init_kwargs=tokenizer.init_kwargs, return_tensors="pt"
        )
        return merged["images_kwargs"]
