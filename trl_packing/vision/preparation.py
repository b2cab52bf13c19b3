"""Rows with images before they are tokenized: their settings, their template, and placeholders."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from datasets import Dataset
from transformers import ProcessorMixin

from trl_packing.config import PackingOptions
from trl_packing.data.rules import Rules
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.vision.documents import keys_of
from trl_packing.vision.placeholders import Placeholder, Placeholders, Size


def check_settings(dataset: Dataset, rules: Rules, name: str) -> None:
    """Raise ValueError for settings and columns that rows with images cannot serve."""
    options: PackingOptions = rules.options
    if SEQ_LENGTHS in dataset.column_names:
        raise ValueError(
            f"rows of the {name} dataset are packed already (seq_lengths) and have images; pass "
            "the documents"
        )
    refused = {
        "prompt_template": options.prompt_template,
        "response_template": options.response_template,
        "static_shapes": options.static_shapes,
        "append_eos": options.append_eos,
        "train_on": options.train_on if options.train_on == "every_turn" else None,
    }
    for setting, value in refused.items():
        if value:
            raise ValueError(
                f"{setting}={value!r} is not available for data sets with images; leave it out"
            )
    if not isinstance(rules.processing_class, ProcessorMixin):
        raise ValueError(
            f"the {name} dataset has images, but processing_class is a "
            f"{type(rules.processing_class).__name__}; pass the model's processor (AutoProcessor)"
        )


def template_of(processor: Any) -> str | None:
    """Return the chat template of a processor, the default one if it has several."""
    template = processor.chat_template
    return template.get("default") if isinstance(template, dict) else template


def learn(
    placeholders: Placeholders, sizes: Sequence[np.ndarray], name: str
) -> dict[Size, Placeholder]:
    """Return the placeholders by size. Raises ValueError naming the row of a refused size."""
    found: dict[Size, int] = {}
    for row, of_row in enumerate(sizes):
        for size in keys_of(of_row):
            found.setdefault(size, row)
    try:
        placeholders.learn(found)
    except ValueError:
        for size, row in found.items():
            try:
                placeholders.learn([size])
            except ValueError as error:
                raise ValueError(
                    f"row {row} of the {name} dataset has an image of {size[1]} × {size[0]} "
                    f"pixels, which the processor refuses ({error}); remove the row or resize it"
                ) from error
    return {size: placeholders.of(size) for size in found}
