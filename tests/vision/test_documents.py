"""Tokens, labels and patches of documents: as processor, collator and tower make them."""

import numpy as np
import pytest
import torch
from architectures import tiny_processors, tiny_vision
from datasets import Dataset
from helpers.combinations import fast
from helpers.vision import image_dataset, noise, tiny_processor, tiny_vision_model, vision_trainer
from PIL import Image as PillowImage
from trl.trainer.sft_trainer import DataCollatorForVisionLanguageModeling

from trl_packing.vision.documents import keys_of
from trl_packing.vision.images import ImageError
from trl_packing.vision.sizes import feature_id, patch_size_of, placeholders_of
from trl_packing.vision.support import FAMILIES

NAME = "qwen2_5_vl"
NAMES = (NAME, "llava_next", "llava_onevision", "idefics3", "mistral3", "gemma3")
MODES = ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16")
#: Heights of 1 and 3 pixels look like channels.
SIZES = (
    *((1, 1), (1, 3), (3, 1), (3, 3), (1, 30), (30, 1), (3, 30), (30, 3)),
    *((8, 8), (20, 90), (64, 24), (33, 47), (300, 200)),
)

# GLM-4V's processor reads tensors in a way that NumPy deprecates (transformers 5.23).
pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def in_mode(mode):
    image = noise(30, 44, 0)
    if mode == "I;16":
        return PillowImage.fromarray(np.asarray(image)[:, :, 0].astype(np.uint16) * 256)
    return image.convert("L").convert(mode) if mode == "LA" else image.convert(mode)


# --- tokens and patches ---------------------------------------------------------------------------


@pytest.mark.parametrize("name", NAMES)
def test_placeholders_follow_from_sizes(name):
    """Every size and mode, not the few of the run that the trainer verifies."""
    processor = tiny_processor(name)
    rows = [[image] for image in (*map(in_mode, MODES), *(noise(*size, 0) for size in SIZES))]
    for images in [*rows, [noise(20, 30, 0), noise(50, 30, 1)]]:
        keys = keys_of(np.array([image.size[::-1] for image in images]))
        found = placeholders_of(processor, dict.fromkeys(keys, ""))
        text = processor.image_token * len(images)
        ids = processor(images=[images], text=[text], add_special_tokens=False)["input_ids"][0]
        expected = sum(np.asarray(ids) == feature_id(processor))
        assert sum(sum(found[key].runs) for key in keys) == expected


def test_a_processor_without_arithmetic_is_measured():
    processor, measured = tiny_processor(NAME), tiny_processor(NAME)
    type(measured)._get_num_multimodal_tokens = property()  # `hasattr` is False
    sizes = [(20 + n, 40 + n, 1) for n in range(60)]
    places = dict.fromkeys(sizes, "")
    assert placeholders_of(processor, places) == placeholders_of(measured, places)


class TowerPositions:
    """Counts the positions of the vision tower of a model: outputs of its layer of pixels."""

    def __init__(self, model):
        self.calls = []
        of_pixels = [module for name, module in model.named_modules() if reads_pixels(name, module)]
        assert of_pixels
        for module in of_pixels:
            module.register_forward_hook(self.count)

    def count(self, module, _, output):
        width = getattr(module, "out_channels", None) or module.out_features
        self.calls.append(output.numel() // width)


def reads_pixels(name, module):
    if isinstance(module, torch.nn.Linear):
        return name.endswith("patch_embedder.input_proj")  # gemma4
    return isinstance(module, (torch.nn.Conv2d, torch.nn.Conv3d)) and module.in_channels == 3


@pytest.mark.parametrize("name", fast(FAMILIES, {NAME, "llava_next", "mistral3"}))
def test_patches_by_size_are_those_of_the_tower(name):
    processor = tiny_processors.tiny_processor(name)
    model = tiny_vision.tiny_vision_model(name, processor).eval()
    tower = TowerPositions(model)
    patch_size = patch_size_of(model.config)
    collate = DataCollatorForVisionLanguageModeling(processor)
    for row in image_dataset().select([0, 3, 4]):
        batch = collate([row])
        tower.calls.clear()
        with torch.no_grad():
            model(**batch)
        (key,) = keys_of(np.array([image.size[::-1] for image in row["images"]]))
        assert placeholders_of(processor, {key: ""}, patch_size)[key].patches == sum(tower.calls)


@pytest.mark.parametrize("form", ["prompt_completion", "messages"])
@pytest.mark.parametrize("name", [NAME, "gemma3", "idefics3"])
def test_documents_are_those_of_trls_collator(name, form, tmp_path):
    processor = tiny_processor(name)
    dataset = image_dataset(form=form)
    trainer = vision_trainer(tiny_vision_model(name, processor), processor, tmp_path, dataset)
    completion_only = form == "prompt_completion"
    collate = DataCollatorForVisionLanguageModeling(processor, completion_only_loss=completion_only)
    for row, document in zip(dataset, trainer.train_dataset, strict=True):
        expected = collate([row])
        assert document["input_ids"] == expected["input_ids"][0].tolist()
        assert document["labels"] == expected["labels"][0].tolist()


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


# --- counts and limits ----------------------------------------------------------------------------


@pytest.mark.parametrize("options", [{}, {"overflow": "split", "max_length": 90}])
def test_the_report_counts_the_images_of_its_documents(options, trainer_of, processor):
    trainer = trainer_of(shuffle_dataset=True, **options)
    feature = processor.tokenizer.convert_tokens_to_ids("<|image_pad|>")
    tokens = sum(ids.count(feature) for ids in trainer.train_dataset["input_ids"])
    images = [len({*ids} - {0}) for ids in trainer.train_dataset["image_ids"]]
    counts = trainer.packing_report.images
    documents = len(images) - images.count(0)
    assert (counts.images, counts.documents) == (sum(images), documents)
    assert (counts.tokens, counts.patches) == (tokens, 4 * tokens)  # 2 × 2 patches are one token
    assert counts.images == 8 or options
    assert f"images       {counts.images} in {documents} document" in str(trainer.packing_report)


def test_reasoning_that_the_template_leaves_out_is_counted(trainer_of):
    def with_reasoning(row):
        *before, answer = row["messages"]
        return {"messages": [*before, {**answer, "reasoning_content": "It looks so."}]}

    rows = image_dataset(form="messages")
    words = "8 documents with reasoning that the chat template leaves out"
    for given, is_counted in ((rows.map(with_reasoning), True), (rows, False)):
        report = " ".join(str(trainer_of(given).packing_report).split())
        assert (words in report) == is_counted


@pytest.mark.slow
def test_the_tower_never_computes_more_than_max_patches(trainer_of):
    most = {}
    for limit in (200, None):
        options = {"max_steps": -1, "num_train_epochs": 1, "per_device_train_batch_size": 1}
        options |= {"max_length": 1000, "isolation_check": "off", "max_patches": limit}
        trainer = trainer_of(image_dataset(32), **options)
        tower = TowerPositions(trainer.model)
        trainer.train()
        most[limit] = max(tower.calls)
        assert most[limit] == trainer.packing_report.images.most_patches
    assert most[200] <= 200 < most[None]


# --- refused --------------------------------------------------------------------------------------


def rows(**values):
    given = {"images": [[noise(9, 9, 0)]] * 2, "text": ["<|image_pad|> a", "<|image_pad|> b"]}
    return {"dataset": Dataset.from_dict(given | values)}


def chats(part, first=None, **columns):
    """Return two conversations, of which the second has the part."""
    text = {"type": "text", "text": "a"}
    made = [[{"role": "user", "content": content}] for content in (first or [text], [text, part])]
    return {"dataset": Dataset.from_dict({"messages": made, **columns}, on_mixed_types="use_json")}


PAYLOAD = {"type": "image", "text": None, "path": "a.png"}
REFUSALS = {
    "row 1 of the train .* 2 image placeholders .* 1 images": rows(
        text=["<|image_pad|>", "<|image_pad|>" * 2]
    ),
    "row 1 of the train .* 300 × 1 pixels .*aspect ratio": rows(
        images=[[noise(9, 9, 0)], [noise(1, 300, 0)]]
    ),
    "beside text or messages, not tokens": rows(input_ids=[[1, 2]] * 2),
    "row 1 of the train .*part of type 'image' with .*column 'images'": chats(
        PAYLOAD, images=[[], [noise(9, 9, 0)]]
    ),
    "row 1 of the train .* part of type 'video'": chats({"type": "video", "text": None}),
    "row 1 of the train .* part of type 'audio'": chats({"type": "audio"}, first="as JSON"),
    "row 1 of the train .* of type 'video_url'": {
        "dataset": chats({"type": "video_url"})["dataset"].to_iterable_dataset()
    },
    "has 'videos'.*remove the column": rows(videos=[[], ["a.mp4"]]),
    "append_eos": {"append_eos": True},
    "patches, but max_patches=8; raise max_patches": {"max_patches": 8},
    "max_patches=0 must be at least 1": {"max_patches": 0},
}


@pytest.mark.parametrize("message", REFUSALS)
def test_what_cannot_be_trained_is_refused_by_name(message, trainer_of):
    with pytest.raises(ValueError, match=message):
        trainer_of(**REFUSALS[message])


def test_a_processor_that_refuses_a_mode_names_the_rows(trainer_of, processor, monkeypatch):
    images = [[noise(30, 44, 0)], [in_mode("RGBA")]]
    trainer = trainer_of(**rows(images=images, text=["<|image_pad|> a"] * 2))
    monkeypatch.setattr(processor.image_processor, "do_convert_rgb", False)
    message = "refuses images of row 0 of the train dataset, row 1 .*convert or remove"
    with pytest.raises(ImageError, match=message):
        trainer.data_collator(list(trainer.train_dataset))
