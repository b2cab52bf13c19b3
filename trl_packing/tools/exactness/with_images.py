"""The documents with images by which `trl-packing verify` checks a vision-language model.

the command names data with images    short documents of its first rows
it names a model alone                noise of two sizes, in a prompt each
"""

from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import ProcessorMixin

from trl_packing.attention.backends import PADDED
from trl_packing.isolation.check import CheckResult, Refusal, attempt
from trl_packing.packing.collator import PackedCollator
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import (
    TrainerCall,
    TrainingCommand,
    config_from_settings,
    processing_class_of,
)
from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.choice import has_images
from trl_packing.vision.families import FAMILIES
from trl_packing.vision.guard import documents_to_check
from trl_packing.vision.image_check import check_images
from trl_packing.vision.tower import hide_boundaries

_ROWS = 64  # of the data set, among which the documents are chosen
_SIZES = ((224, 336), (168, 112))  # height and width of noise, in pixels


@dataclass(frozen=True, eq=False)
class ImageProbes:
    """Documents with images, and how a row is made of them.

    Attributes:
        documents: with `input_ids`, and `images` of each row of the user; some have none.
        collator: makes the rows.
        source: where the documents come from, in words.
    """

    documents: list[dict[str, Any]]
    collator: PackedCollator
    source: str

    @classmethod
    def of(cls, model: Any, name_or_model: Any, args: Any, command: TrainingCommand) -> Any:
        """Return the probes for a model; None if no rows with images are packed for its type.

        Args:
            model: on its device.
            name_or_model: as the command names it.
            args: the settings of the run.
            command: names the data, if it does.

        Raises:
            ValueError: the rows cannot be prepared.
            OSError: the model has no processor.
        """
        if model.config.model_type not in FAMILIES:
            return None
        call, source = None, "of the data"
        if command.names_data:
            call = command.call
        if call is None or not has_images(call.train_dataset):
            processor = call and call.processing_class
            processor = processor or processing_class_of(name_or_model, args)
            call, source = _noise(model, processor), "of noise"
        rows = _first(call.train_dataset)
        run = PreviewedRun.from_call(replace(call, model=model, train_dataset=rows))
        found = documents_to_check(run.documents()[0], run.images.store)
        if not found:
            raise ValueError(f"none of the first {_ROWS} rows of the data set has an image")
        hide_boundaries(model)
        images = ImageBatches(run.images.store, run.preparation.processing_class, model)
        pad = run.preparation.eos.tokenizer.pad_token_id
        return cls(found, PackedCollator(pad, images=images), source)

    def check(self, model: Any, attention: str, *, gradients: bool = False) -> CheckResult:
        """Return whether documents with images affect each other by an installed backend."""
        if attention in PADDED:
            return Refusal("padded rows hold the tokens in another order than the images")
        return attempt(
            lambda: check_images(
                model,
                self.documents,
                collator=self.collator,
                training=True,
                attention=attention,
                gradients=gradients,
            )
        )


def _first(rows: Any) -> Any:
    """Return the first rows of a data set, or of each of a dictionary; a stream as it is."""
    if isinstance(rows, dict):
        return {name: _first(of_source) for name, of_source in rows.items()}
    # A stream is refused by name later.
    return rows.select(range(min(len(rows), _ROWS))) if isinstance(rows, Dataset) else rows


def _noise(model: Any, processor: Any) -> TrainerCall:
    """Return the arguments of a run on two images of noise."""
    from PIL import Image as PillowImage

    if not isinstance(processor, ProcessorMixin):
        raise ValueError(
            f"{type(processor).__name__} is no processor, which images need; save the model's "
            "processor in its folder"
        )
    rng = np.random.default_rng(0)
    prompt = f"{processor.image_token} Say what this is."
    rows = [
        {
            "images": [PillowImage.fromarray(rng.integers(0, 256, (*size, 3), np.uint8))],
            "prompt": prompt,
            "completion": f" It is picture {number}.",
        }
        for number, size in enumerate(_SIZES)
    ]
    args = config_from_settings(["--max_length", "16384"])
    return TrainerCall(model, args, Dataset.from_list(rows), processor)
