"""Tiny vision-language models and processors of `architectures`, and rows with images for them.

processor = tiny_processor("qwen2_5_vl")            # around the tokenizer of `helpers.tiny`
model = tiny_vision_model("qwen2_5_vl", processor)  # random weights, ids of that tokenizer
dataset = image_dataset()                           # several sizes; some rows have no image
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
from architectures import tiny_processors, tiny_vision
from datasets import Dataset
from harness import make_trainer
from PIL import Image

from helpers.one_step import ONE_STEP
from helpers.tiny import tiny_tokenizer
from trl_packing.attention.model_facts import temporarily
from trl_packing.vision import support
from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.support import FAMILIES as FAMILIES


def tiny_processor(name: str) -> Any:
    """Return a processor of the family `name`."""
    return tiny_processors.tiny_processor(name, tiny_tokenizer(chat=True))


def tiny_vision_model(name: str, processor: Any, **changes: Any) -> Any:
    """Return a tiny model of the family `name` for the tokens of `processor`."""
    size = len(processor.tokenizer)
    return tiny_vision.tiny_vision_model(name, processor, vocab_size=size, **changes)


def tiny_vlm(name: str = "llava") -> tuple[Any, Any]:
    """Return a tiny model of the family `name` and its processor."""
    processor = tiny_processor(name)
    return tiny_vision_model(name, processor), processor


def vision_trainer(
    model: Any, processor: Any, folder: Any, dataset: Any = None, **options: Any
) -> Any:
    """Return a packed trainer of one step on `dataset`, by default `image_dataset()`."""
    settings = {"max_length": 320, "packing": True} | ONE_STEP | options
    names = {"compute_metrics", "peft_config", "eval_dataset"} & settings.keys()
    given = {"tokenizer": processor, "arguments": {name: settings.pop(name) for name in names}}
    given["evaluated"] = given["arguments"].pop("eval_dataset", None)
    rows = image_dataset() if dataset is None else dataset
    return make_trainer(folder, rows, copy.deepcopy(model), **given, **settings)


def noise(height: int, width: int, seed: int) -> Image.Image:
    """Return an image of random pixels."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def image_dataset(rows: int = 8, form: str = "prompt_completion") -> Dataset:
    """Return rows with one, two or no images of different sizes.

    `form`: "prompt_completion" or "messages".
    """
    made = []
    for row in range(rows):
        number = (1, 2, 0, 1)[row % 4]
        images = [noise(20 + 8 * (row + n), 36 + 4 * n, 7 * row + n) for n in range(number)]
        parts = [{"type": "image", "text": None} for _ in images]
        question = {"type": "text", "text": f"Question {row}: what is this?" + " And?" * row}
        answer = {"type": "text", "text": f"Answer {row} is short." + " Yes." * (row % 3)}
        user = {"role": "user", "content": [*parts, question]}
        assistant = {"role": "assistant", "content": [answer]}
        if form == "messages":
            made.append({"images": images, "messages": [user, assistant]})
        else:
            made.append({"images": images, "prompt": [user], "completion": [assistant]})
    return Dataset.from_list(made)


def texts(rows: int = 6) -> Dataset:
    """Return prompts and completions without images, as messages with plain texts."""
    made = []
    for row in range(rows):
        prompt = [{"role": "user", "content": f"How many are {row} and {row + 1}?" + " Say." * row}]
        completion = [{"role": "assistant", "content": f"They are {2 * row + 1}."}]
        made.append({"prompt": prompt, "completion": completion})
    return Dataset.from_list(made)


@contextmanager
def images_of_others() -> Iterator[None]:
    """Give documents of a row the images of others: those of several are in the wrong order."""
    right = ImageBatches.tensors

    def swapped(self, documents, input_ids):
        made = right(self, documents, input_ids)
        if "pixel_values" in made and len(documents) > 1:
            made["pixel_values"] = made["pixel_values"].flip(0)
        return made

    with temporarily(ImageBatches, tensors=swapped):
        yield


def pack_no_images(monkeypatch: Any) -> None:
    """Send all runs with images to TRL's path."""
    monkeypatch.setattr(support, "FAMILIES", ())
