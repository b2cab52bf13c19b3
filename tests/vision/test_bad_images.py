"""Images that a processor treats in another way, or refuses: one sentence that names the row."""

import numpy as np
import pytest
from datasets import Dataset
from helpers.vision import NAMES, noise, tiny_processor, tiny_vision_model
from PIL import Image as PillowImage

from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.images import ImageError, ImageStore
from trl_packing.vision.sizes import Placeholders

NAME = "qwen2_5_vl"
MODES = ("1", "L", "LA", "P", "RGBA", "CMYK", "YCbCr", "HSV", "I;16")
#: Heights of 1 and 3 pixels look like channels.
SIZES = ((1, 1), (1, 3), (3, 1), (3, 3), (1, 30), (30, 1), (3, 30), (30, 3))

pytestmark = pytest.mark.filterwarnings("ignore:__array__ implementation")


def in_mode(mode):
    image = noise(30, 44, 0)
    if mode == "I;16":
        return PillowImage.fromarray(np.asarray(image)[:, :, 0].astype(np.uint16) * 256)
    return image.convert("L").convert(mode) if mode == "LA" else image.convert(mode)


@pytest.mark.parametrize("name", NAMES)
def test_modes_and_thin_images_have_the_planned_number_of_tokens(name):
    processor = tiny_processor(name)
    placeholders = Placeholders(processor)
    images = [*map(in_mode, MODES), *(noise(*size, 0) for size in SIZES)]
    placeholders.learn((*image.size[::-1], 1) for image in images)
    for image in images:
        output = processor(images=[[image]], text=[processor.image_token], add_special_tokens=False)
        found = (np.asarray(output["input_ids"][0]) == placeholders.feature_id).sum()
        assert found == sum(placeholders.of((*image.size[::-1], 1)).runs), (image.mode, image.size)


def test_a_processor_without_arithmetic_is_measured_behind_a_progress_bar(capsys):
    processor, measured = tiny_processor(NAME), tiny_processor(NAME)
    type(measured)._get_num_multimodal_tokens = property()  # `hasattr` is False
    sizes = [(20 + n, 40 + n, 1) for n in range(60)]
    found = []
    for one in (processor, measured):
        placeholders = Placeholders(one)
        placeholders.learn(sizes)
        found.append([placeholders.of(size) for size in sizes])
        shows_bar = "Measuring image sizes" in capsys.readouterr().err
        assert shows_bar == (one is measured)
    assert found[0] == found[1]


def test_a_processor_that_refuses_a_mode_names_the_row():
    processor = tiny_processor(NAME)
    processor.image_processor.do_convert_rgb = False
    model = tiny_vision_model(NAME, processor)
    store = ImageStore()
    images = [[noise(30, 44, 0)], [in_mode("RGBA")]]
    store.take(Dataset.from_dict({"images": images, "text": ["a", "b"]}), "train")
    batches = ImageBatches(store, processor, model)
    ids = np.array([processor.image_token_id] * 4)
    documents = [
        {"input_ids": ids, "image_row": row, "image_ids": np.ones(4, int)} for row in range(2)
    ]
    message = r"refuses the images \(mode RGBA\) of row 1 of the train dataset: .*convert or remove"
    with pytest.raises(ImageError, match=message):
        batches.tensors(documents, [ids, ids])


def test_an_image_as_large_as_a_bomb_names_its_row(monkeypatch):
    dataset = Dataset.from_dict({"image": [noise(9, 9, 0), noise(90, 90, 0)], "text": ["a", "b"]})
    monkeypatch.setattr(PillowImage, "MAX_IMAGE_PIXELS", 1000)
    with pytest.raises(ImageError, match=r"image 0 in row 1 of the train dataset .*exceeds limit"):
        ImageStore().take(dataset, "train")


# --- videos and audio -----------------------------------------------------------------------------


def rows(part=None, **columns):
    parts = [{"type": "text", "text": "a"}] + ([part] if part else [])
    plain = [{"role": "user", "content": [{"type": "text", "text": "a"}]}]
    made = {"messages": [plain, [{"role": "user", "content": parts}]]}
    return Dataset.from_dict(made | columns)


@pytest.mark.parametrize("columns", [{"images": [[], []]}, {}], ids=["images", "no images"])
@pytest.mark.parametrize(
    ("others", "message"),
    [
        *(
            ({"part": {"type": name, "text": None}}, f": a message has a part of type '{name}'")
            for name in ("video", "audio", "video_url")
        ),
        ({"videos": [[], ["a.mp4"]]}, " has 'videos'"),
        ({"audio": [None, "a.wav"]}, " has 'audio'"),
    ],
)
def test_videos_and_audio_are_refused_by_name(columns, others, message, trainer_of):
    with pytest.raises(ValueError, match="row 1 of the train dataset" + message):
        trainer_of(rows(**columns, **others))
    trainer_of(rows(**columns, videos=[[], []], audio=[None, None]))
