"""Tokens, labels and images of documents: as TRL's collator makes them, and cut around images."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.vision import NAMES, image_dataset, noise, tiny_processor, tiny_vision_model
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling
from vision.test_run import trainer_of

from trl_packing.data.overflow import Overflow, pieces_of
from trl_packing.data.whole_images import ImageSpans, keep_images_whole, split_around
from trl_packing.vision.documents import keys_of
from trl_packing.vision.placeholders import Placeholders

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
        assert sum(placeholder.num_features for placeholder in found) == expected


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

DOCUMENTS = [
    [0, 0, 1, 1, 1, 1, 0, 0, 2, 2, 0],
    [0, 0, 0, 0, 0],
    [1, 1, 1, 1, 1, 1, 1, 1, 0, 0],
    [0, 1, 1, 0, 1, 1, 0, 0],  # tiles of one image, with text between them
]
IMAGE_IDS = (np.concatenate(DOCUMENTS), np.cumsum([0, *map(len, DOCUMENTS)]))


@pytest.mark.parametrize("policy", ["truncate", "truncate_start", "truncate_prompt", "split"])
@pytest.mark.parametrize("capacity", range(1, 12))
def test_no_piece_holds_a_part_of_an_image(policy, capacity):
    overflow, lengths = Overflow(policy, capacity), np.diff(IMAGE_IDS[1])
    by_length = pieces_of(lengths, overflow, np.array([4, 0, 8, 3]))
    spans = ImageSpans(IMAGE_IDS)
    kept = keep_images_whole(by_length, IMAGE_IDS, overflow)
    for number, start, stop in zip(*map(np.ndarray.tolist, kept[:3]), strict=True):
        assert 0 <= stop - start <= capacity
        for first, end in spans.of(number):
            assert end <= start or stop <= first or start <= first < end <= stop


def test_cuts_by_length_alone_would_go_through_images():
    pieces = pieces_of(np.diff(IMAGE_IDS[1]), Overflow("truncate", 5), np.zeros(4, int))
    assert pieces.stops.tolist() == [5, 5, 5, 5]
    whole = keep_images_whole(pieces, IMAGE_IDS, Overflow("truncate", 5))
    assert whole.stops.tolist() == [2, 5, 0, 1]


def test_an_overlap_is_refused_where_it_might_begin_in_an_image():
    """Long documents without images are cut, and short ones with images stay as they are."""
    lengths, prompts = np.diff(IMAGE_IDS[1]), np.zeros(4, int)
    for capacity in (10, 5):
        overflow = Overflow("overlap", capacity)
        with pytest.raises(ValueError, match="'overlap' cannot cut a document with images"):
            keep_images_whole(pieces_of(lengths, overflow, prompts), IMAGE_IDS, overflow)
    overflow = Overflow("overlap", 11)
    kept = keep_images_whole(pieces_of(lengths, overflow, prompts), IMAGE_IDS, overflow)
    assert kept.stops.tolist() == [11, 5, 10, 8]
    text = np.concatenate([np.zeros(30, int), DOCUMENTS[3]]), np.array([0, 30, 38])
    pieces = pieces_of(np.diff(text[1]), overflow, prompts[:2])
    kept = keep_images_whole(pieces, text, overflow)
    assert [n.tolist() for n in kept[:3]] == [n.tolist() for n in pieces[:3]]
    assert kept.rows.tolist() == [0, 0, 0, 1]


def test_split_keeps_every_token_but_those_of_images_that_do_not_fit():
    assert split_around(11, 5, [(2, 6), (8, 10)]) == [(0, 2), (2, 7), (7, 11)]
    assert split_around(10, 5, [(0, 8)]) == [(8, 10)]


def test_a_row_of_several_images_is_not_cut_if_that_changes_the_others(tmp_path):
    processor = tiny_processor("llava_onevision")
    model = tiny_vision_model("llava_onevision", processor)
    with pytest.raises(ValueError, match="row 1 of the train dataset has 94 tokens and several"):
        trainer_of(model, processor, tmp_path, max_length=80)
    trainer_of(model, processor, tmp_path, max_length=80, overflow="drop")


def test_overflow_is_counted_and_trained(tmp_path):
    processor = tiny_processor("qwen2_5_vl")
    model = tiny_vision_model("qwen2_5_vl", processor)
    dataset = image_dataset(form="messages")
    trainer = trainer_of(model, processor, tmp_path, dataset, max_length=90, overflow="split")
    counts = trainer._run_data.counts["train"]
    assert counts.adds_up()
    assert counts.after.documents > counts.before.documents
    trainer.train()
