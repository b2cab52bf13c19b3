"""Image files: sizes from headers equal sizes of decoded images; bad files name their row."""

import io

import numpy as np
import pytest
from datasets import Dataset, Features, Image, List, Value
from helpers.vision import noise
from PIL import Image as PillowImage

from trl_packing.documents.labels import IMAGE_ROW
from trl_packing.vision.images import ImageError, ImageStore


def encoded(image, kind="PNG", **options):
    file = io.BytesIO()
    image.save(file, kind, **options)
    return file.getvalue()


def turned(kind, orientation=6):
    exif = PillowImage.Exif()
    exif[0x0112] = orientation
    return encoded(noise(20, 30, 1), kind, exif=exif)


BYTES = {
    "PNG": encoded(noise(20, 30, 0)),
    **{f"turned {kind}": turned(kind) for kind in ("JPEG", "PNG", "TIFF")},
    **{f"orientation {value}": turned("JPEG", value) for value in (3, 5)},
    "gray": encoded(noise(5, 6, 0).convert("L")),
}


@pytest.mark.parametrize("kind", BYTES)
def test_header_has_the_size_of_the_decoded_image(kind):
    dataset = Dataset.from_dict({"images": [[BYTES[kind]], []], "text": ["a", "b"]})
    store = ImageStore()
    numbered = store.take(dataset, "train")
    assert numbered[IMAGE_ROW] == [0, 1]
    assert "images" not in numbered.column_names
    (image,) = store.load(0)
    assert store.sizes(0).tolist() == [list(image.size[::-1])]
    assert store.load(1) == []
    assert store.sizes(1).shape == (0, 2)


def test_images_are_those_that_datasets_decodes():
    images = [[noise(8, 9, 0), noise(5, 4, 1)], [noise(6, 6, 2)]]
    dataset = Dataset.from_dict(
        {"images": images, "text": ["a", "b"]},
        features=Features({"images": List(Image()), "text": Value("string")}),
    ).select([1, 0])
    store = ImageStore()
    store.take(dataset, "train")
    for row, expected in enumerate(dataset["images"]):
        for found, image in zip(store.load(row), expected, strict=True):
            assert np.array_equal(np.asarray(found), np.asarray(image))


def test_rows_of_several_data_sets_have_numbers_of_their_own(tmp_path):
    path = tmp_path / "one.png"
    texts = {"text": ["a"] * 2}
    path.write_bytes(BYTES["PNG"])
    store = ImageStore()
    store.take(Dataset.from_dict({"image": [str(path)] * 2, **texts}), "train")
    numbered = store.take(Dataset.from_dict({"image": [BYTES["gray"], None], **texts}), "eval")
    assert numbered[IMAGE_ROW] == [2, 3]
    assert [store.sizes(row).tolist() for row in (1, 2, 3)] == [[[20, 30]], [[5, 6]], []]
    assert store.name_of(3) == "row 1 of the eval dataset"


def test_headers_alone_are_read_before_training():
    cut = BYTES["PNG"][:-100]  # the header is whole, the pixels are not
    store = ImageStore()
    store.take(Dataset.from_dict({"images": [[BYTES["PNG"]], [cut]], "text": ["a"] * 2}), "train")
    with pytest.raises(ImageError, match="image 0 in row 1 of the train dataset cannot be read"):
        store.load(1)


DAMAGED = b"\x89PNG\r\n\x1a\n" + b"\0" * 9


@pytest.mark.parametrize("file", [b"no image", DAMAGED, None, "/nowhere/at_all.png"])
def test_bad_files_name_their_row(file):
    kind = Value("string") if isinstance(file, str) else Value("binary")
    kinds = Features({"images": List(kind), "text": Value("string")})
    dataset = Dataset.from_dict({"images": [[], [file]], "text": ["a", "b"]}, features=kinds)
    with pytest.raises(ImageError, match="image 0 in row 1 of the train dataset"):
        ImageStore().take(dataset, "train")


def test_a_column_without_images_is_refused():
    with pytest.raises(ValueError, match="PIL images, paths or bytes"):
        ImageStore().take(Dataset.from_dict({"images": [[1, 2]], "text": ["a"]}), "train")
    both = Dataset.from_dict({"images": [[]], "image": [BYTES["PNG"]]})
    with pytest.raises(ValueError, match="'image' or 'images' beside text"):
        ImageStore().take(both, "train")
