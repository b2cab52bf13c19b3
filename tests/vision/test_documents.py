"""Tokens, labels and images of documents: as TRL's collator makes them, whole or dropped."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.vision import (
    NAMES,
    image_dataset,
    noise,
    tiny_processor,
    tiny_vision_model,
    vision_trainer,
)
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.vision.documents import keys_of
from trl_packing.vision.sizes import Placeholders

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_follow_from_sizes(name):
    """Every size, not the few of the run that the trainer verifies."""
    processor = tiny_processor(name)
    placeholders = Placeholders(processor)
    rows = [[noise(h, w, h)] for h, w in ((8, 8), (20, 90), (64, 24), (33, 47), (300, 200))]
    rows.append([noise(20, 30, 0), noise(50, 30, 1)])
    for images in rows:
        sizes = np.array([image.size[::-1] for image in images])
        placeholders.learn(keys_of(sizes))
        found = [placeholders.of(size) for size in keys_of(sizes)]
        text = processor.image_token * len(images)
        ids = processor(images=[images], text=[text], add_special_tokens=False)["input_ids"][0]
        expected = sum(np.asarray(ids) == placeholders.feature_id)
        assert sum(sum(placeholder.runs) for placeholder in found) == expected


@pytest.mark.parametrize("form", ["prompt_completion", "messages"])
@pytest.mark.parametrize("name", ["qwen2_5_vl", "gemma3", "idefics3"])
def test_documents_are_those_of_trls_collator(name, form, tmp_path):
    processor, dataset = tiny_processor(name), image_dataset(form=form)
    trainer = vision_trainer(tiny_vision_model(name, processor), processor, tmp_path, dataset)
    completion_only = form == "prompt_completion"
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=completion_only)
    for row, document in zip(dataset, trainer.train_dataset, strict=True):
        expected = collate([row])
        assert document["input_ids"] == expected["input_ids"][0].tolist()
        assert document["labels"] == expected["labels"][0].tolist()


def row(**values):
    given = {"images": [[noise(9, 9, 0)]] * 2, "text": ["<|image_pad|> a", "<|image_pad|> b"]}
    return Dataset.from_dict(given | values)


BAD_ROWS = {
    "row 1 .* 2 image placeholders .* 1 images": {"text": ["<|image_pad|>", "<|image_pad|>" * 2]},
    "row 1 .* refuses .*aspect ratio": {"images": [[noise(9, 9, 0)], [noise(1, 300, 0)]]},
    "image 0 in row 1 of the train dataset cannot be read": {"images": [[], [b"x"]]},
}


@pytest.mark.parametrize("message", BAD_ROWS)
def test_a_bad_row_is_named(message, trainer_of):
    with pytest.raises(ValueError, match=message):
        trainer_of(row(**BAD_ROWS[message]))


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["truncate", "truncate_prompt", "split", "overlap", "drop"])
def test_a_document_with_images_is_whole_or_dropped_and_counted(overflow, trainer_of):
    def with_images(trainer):
        return [d["input_ids"] for d in trainer.train_dataset if max(d["image_ids"]) > 0]

    rows = image_dataset(form="messages")
    whole = with_images(trainer_of(rows))
    capacity = sorted(map(len, whole))[2]
    trainer = trainer_of(rows, max_length=capacity, overflow=overflow)
    kept = [ids for ids in whole if len(ids) <= capacity]
    assert with_images(trainer) == kept
    dropped = len(whole) - len(kept)
    assert dropped > 0, "the control: some are too long"
    said = f"({dropped} documents with images dropped)" if overflow != "drop" else ": dropped"
    assert said in " ".join(str(trainer.packing_report).split())
    trainer.train()
