"""The image files of a run: sizes from their headers, pixels only when a micro-batch is made.

    rows of data sets    train 0 1 2   eval 0 1
    numbers in the run         0 1 2        3 4      the column `image_row` of prepared documents

Files stay where they are: bytes in the user's data set, or paths. A worker maps the data again.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any

import numpy as np
import pyarrow as pa
from datasets import Dataset, Image, LargeList, List

from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW, row_name

if TYPE_CHECKING:  # only runs with images need Pillow
    from PIL import Image as PillowImage

_ORIENTATION = 0x0112  # EXIF tag; values from 5 exchange width and height

File = dict[str, Any]  # its `bytes`, or its `path`


class ImageError(ValueError):
    """An image that cannot be read, or a row whose images do not fit its text."""


class ImageStore:
    """The images of all data sets of a run, by row."""

    def __init__(self) -> None:
        # By the number of its first row in the run: the files of each row of a data set (a dict of
        # one column, or an empty one), and its name.
        self._sources: dict[int, tuple[Any, str]] = {}
        self._sizes: list[np.ndarray] = []

    def take(self, dataset: Dataset, name: str) -> Dataset:
        """Return `dataset` with numbers in the column `image_row` in place of its images.

        Its column `image` has an image or null, `images` a list of them. Messages call it `name`.

        Raises:
            ValueError: it has both columns, or tokens, or the column holds no images.
            ImageError: an image is missing or cannot be read, naming the row.
        """
        columns = dataset.column_names
        first = len(self._sizes)
        found = [column for column in IMAGE_COLUMNS if column in columns]
        if len(found) == 2 or (found and (found == columns or "input_ids" in columns)):
            raise ValueError(
                f"the {name} dataset has the columns {columns}; give 'image' or 'images' beside "
                "text or messages, not tokens"
            )
        files: Any = _files_of(dataset, found[0], name) if found else [{}] * len(dataset)
        self._sources[first] = (files, name)
        for row, of_row in enumerate(map(_files, files)):
            where = f"in {row_name(row, name)}"
            sizes = [_size(file, f"image {at} {where}") for at, file in enumerate(of_row)]
            self._sizes.append(np.array(sizes, np.int64).reshape(-1, 2))
        rows = np.arange(first, len(self._sizes))
        return dataset.remove_columns(found).add_column(IMAGE_ROW, rows)

    def sizes(self, row: int) -> np.ndarray:
        """Return height and width of each image of a row, ``(images, 2)`` int64."""
        return self._sizes[row]

    def load(self, row: int) -> list["PillowImage.Image"]:
        """Return the images of a row, as `datasets` decodes them. ImageError names a bad one."""
        files, _, number = self._place_of(row)
        images = []
        for at, given in enumerate(_files(files[number])):
            with _reading(given, f"image {at} in {self.name_of(row)}") as file:
                images.append(Image().decode_example(file))
        return images

    def name_of(self, row: int) -> str:
        """Return the words by which messages name a row."""
        _, name, number = self._place_of(row)
        return row_name(number, name)

    def _place_of(self, row: int) -> tuple[Any, str, int]:
        """Return the files and the name of the data set that has a row, and its number there."""
        first = max(first for first in self._sources if first <= row)
        return *self._sources[first], row - first


def _files_of(dataset: Dataset, column: str, name: str) -> Dataset:
    """Return one column, each of its images as a dict of bytes and path."""
    kind = dataset.features[column]
    file = Image(decode=False)
    whole = List(file) if isinstance(kind, (List, LargeList)) else file
    try:
        return dataset.select_columns([column]).with_format(None).cast_column(column, whole)
    except (TypeError, ValueError, pa.ArrowException) as error:
        raise ValueError(
            f"{column!r} of the {name} dataset holds {kind}; images are PIL images, paths or "
            "bytes, one or a list of them in each row"
        ) from error


def _files(row: dict[str, Any]) -> list[File | None]:
    """Return the files of a row: an image, or a list of them, or null."""
    found = next(iter(row.values()), None)
    return found if isinstance(found, list) else [found] * (found is not None)


@contextmanager
def _reading(file: File | None, where: str) -> Iterator[File]:
    """Name the image in errors of reading it, and raise one if it is missing."""
    from PIL.Image import DecompressionBombError

    if file is None or (file["bytes"] is None and file["path"] is None):
        raise ImageError(f"{where} is missing (null); remove it, or the row")
    try:
        yield file
    # Damaged EXIF data raise the last two.
    except (OSError, SyntaxError, DecompressionBombError, ValueError, struct.error) as error:
        raise ImageError(
            f"{where} cannot be read ({str(error)[:200]}); give a file, or remove the row"
        ) from error


def _size(given: File | None, where: str) -> tuple[int, int]:
    """Return height and width as they are after the EXIF orientation is applied; from a header."""
    from PIL import Image as PillowImage

    with _reading(given, where) as file:
        read = file["path"] if file["bytes"] is None else BytesIO(file["bytes"])
        with PillowImage.open(read) as opened:
            width, height = opened.size
            # TIFF's size is turned already. PNG's own method would decode the whole image.
            turns = opened.format != "TIFF"
            turns = turns and PillowImage.Image.getexif(opened).get(_ORIENTATION, 1) >= 5
    return (width, height) if turns else (height, width)
