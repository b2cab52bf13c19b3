"""Small pictures of images of every kind, without anything else of their files."""

import base64
from io import BytesIO

import numpy as np
import pytest
from PIL import Image, PngImagePlugin

from trl_packing.vision.thumbnails import thumbnail


def shown(image: Image.Image) -> Image.Image:
    return Image.open(BytesIO(base64.b64decode(thumbnail(image).partition(",")[2])))


@pytest.mark.parametrize("mode", ["RGB", "L", "1", "P", "CMYK", "I;16", "LA", "RGBA", "F"])
def test_every_kind_of_image_becomes_a_small_picture(mode):
    image = Image.new("RGB", (640, 320), "red").convert("L").convert("F").convert("L")
    image = image.convert("RGB").convert(mode) if mode != "I;16" else Image.new(mode, (640, 320))
    small = shown(image)
    assert (small.mode, small.size) == ("RGB", (160, 80))


@pytest.mark.parametrize(("size", "expected"), [((1, 1), (1, 1)), ((3, 5000), (1, 160))])
def test_narrow_images_keep_a_pixel(size, expected):
    assert shown(Image.new("RGB", size)).size == expected


def test_transparent_parts_are_white():
    image = Image.new("RGBA", (40, 20), (255, 0, 0, 0))
    image.paste((0, 0, 255, 255), (0, 0, 20, 20))
    pixels = np.asarray(shown(image)).astype(int)
    assert np.abs(pixels[:, 30:] - 255).max() < 8
    assert np.abs(pixels[:, :10] - (0, 0, 255)).max() < 8


def test_nothing_else_of_a_file_is_in_the_page():
    made, notes = BytesIO(), PngImagePlugin.PngInfo()
    notes.add_text("comment", "secret <script>")
    Image.new("RGB", (9, 9)).save(made, "PNG", pnginfo=notes)
    assert b"secret" in made.getvalue()
    image = Image.open(made)
    image.load()
    encoded = thumbnail(image).partition(",")[2]
    assert b"secret" not in base64.b64decode(encoded)
