"""Tokens, labels and images of documents: as TRL's collator makes them, whole or dropped."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.vision import NAMES, image_dataset, noise, tiny_processor, tiny_vision_model
from helpers.vision import vision_trainer as trainer_of
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
    trainer = trainer_of(tiny_vision_model(name, processor), processor, tmp_path, dataset)
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
def test_a_bad_row_is_named(message, tmp_path):
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor)
    with pytest.raises(ValueError, match=message):
        trainer_of(model, processor, tmp_path, row(**BAD_ROWS[message]))


# --- overflow -------------------------------------------------------------------------------------


@pytest.mark.parametrize("overflow", ["truncate", "truncate_prompt", "split", "overlap", "drop"])
def test_a_document_with_images_is_whole_or_dropped_and_counted(overflow, tmp_path):
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor)
    rows = image_dataset(form="messages")
    whole = trainer_of(model, processor, tmp_path, rows).train_dataset
    has_images = [max(ids) > 0 for ids in whole["image_ids"]]
    lengths = [len(ids) for ids in whole["input_ids"]]
    capacity = sorted(n for n, has in zip(lengths, has_images, strict=True) if has)[2]
    options = {"max_length": capacity, "overflow": overflow}
    trainer = trainer_of(model, processor, tmp_path, rows, **options)
    kept = [
        ids
        for ids, length, has in zip(whole["input_ids"], lengths, has_images, strict=True)
        if has and length <= capacity
    ]
    found = [d["input_ids"] for d in trainer.train_dataset if max(d["image_ids"]) > 0]
    assert found == kept
    assert len(kept) < sum(has_images), "the control: some are too long"
    counts = trainer._run_data.counts["train"]
    dropped = sum(has_images) - len(kept)
    said = f"({dropped} documents with images dropped)" if overflow != "drop" else ": dropped"
    assert said in str(counts)
    trainer.train()
