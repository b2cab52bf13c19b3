"""The image files of a run: sizes from their headers, pixels only when a micro-batch is made.

    rows of data sets    train 0 1 2   eval 0 1
    numbers in the run         0 1 2        3 4      the column `image_row` of prepared documents

Prepared documents hold numbers, and the files stay where they are: bytes in the Arrow file of the
user's data set, or paths. A worker maps the file again; nothing is copied. `datasets.Image` reads
the columns and decodes the files.
"""

import struct
from collections.abc import Iterator
from contextlib import contextmanager
from io import BytesIO
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset, Image, LargeList, List

from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW

if TYPE_CHECKING:  # only runs with images need Pillow
    from PIL import Image as PillowImage

_ORIENTATION = 0x0112  # EXIF tag; values from 5 exchange width and height
_NO_SIZES = np.zeros((0, 2), np.int64)

File = dict[str, Any]  # its `bytes`, or its `path`


class ImageError(ValueError):
    """An image that cannot be read, or a row whose images do not fit its text."""


class Source(NamedTuple):
    """The images of a data set."""

    files: Dataset | None  # one column, of files or of lists of them; None if no row has an image
    name: str  # for messages
    first: int  # number of its first row in the run


class ImageStore:
    """The images of all data sets of a run, by row."""

    def __init__(self) -> None:
        self._sources: list[Source] = []
        self._sizes: list[np.ndarray] = []

    def take(self, dataset: Dataset, name: str) -> Dataset:
        """Return `dataset` with numbers in the column `image_row` in place of its images.

        Args:
            dataset: with a column `image` (an image, or null) or `images` (a list of them); without
                either, no row has images.
            name: of the data set, for messages.

        Raises:
            ValueError: it has both columns, or tokens, or the column holds no images.
            ImageError: an image is missing or cannot be read, naming the row.
        """
        found = [column for column in IMAGE_COLUMNS if column in dataset.column_names]
        columns = dataset.column_names
        if len(found) == 2 or (found and (found == columns or "input_ids" in columns)):
            raise ValueError(
                f"the {name} dataset has the columns {columns}; give 'image' or 'images' beside "
                "text or messages, not tokens"
            )
        files, sizes, first = None, [_NO_SIZES] * len(dataset), len(self._sizes)
        if found:
            try:
                files = _files_of(dataset, found[0])
            except (TypeError, ValueError, pa.ArrowException) as error:
                raise ValueError(
                    f"{found[0]!r} of the {name} dataset holds {dataset.features[found[0]]}; "
                    "images are PIL images, paths or bytes, one or a list of them in each row"
                ) from error
            sizes = []
            for row, values in enumerate(files):
                of_row = [_size(file, at, row, name) for at, file in enumerate(_files(values))]
                sizes.append(np.array(of_row, np.int64) if of_row else _NO_SIZES)
        self._sources.append(Source(files, name, first))
        self._sizes += sizes
        rows = np.arange(first, first + len(sizes))
        return dataset.remove_columns(found).add_column(IMAGE_ROW, rows)

    def sizes(self, row: int) -> np.ndarray:
        """Return height and width of each image of a row, ``(images, 2)`` int64."""
        return self._sizes[row]

    def load(self, row: int, chosen: np.ndarray | None = None) -> list["PillowImage.Image"]:
        """Return the images of a row, or those `chosen`, as `datasets` decodes them.

        Raises ImageError naming the row, if one cannot be decoded.
        """
        source = self._source_of(row)
        files = [] if source.files is None else _files(source.files[row - source.first])
        images = []
        for at in range(len(files)) if chosen is None else chosen.tolist():
            with _reading(files[at], at, row - source.first, source.name) as file:
                images.append(Image().decode_example(file))
        return images

    def name_of(self, row: int) -> str:
        """Return the words by which messages name a row."""
        source = self._source_of(row)
        return f"row {row - source.first} of the {source.name} dataset"

    def _source_of(self, row: int) -> Source:
        return next(source for source in reversed(self._sources) if source.first <= row)


def _files_of(dataset: Dataset, column: str) -> Dataset:
    """Return one column, each of its images as a dict of bytes and path."""
    kind, file = dataset.features[column], Image(decode=False)
    whole = List(file) if isinstance(kind, (List, LargeList)) else file
    return dataset.select_columns([column]).with_format(None).cast_column(column, whole)


def _files(row: dict[str, Any]) -> list[File | None]:
    """Return the files of a row: an image, or a list of them, or null."""
    (found,) = row.values()
    return found if isinstance(found, list) else [found] * (found is not None)


@contextmanager
def _reading(file: File | None, image: int, row: int, dataset: str) -> Iterator[File]:
    """Name the image in errors of reading it, and raise one if it is missing."""
    from PIL.Image import DecompressionBombError

    where = f"image {image} in row {row} of the {dataset} dataset"
    if file is None or (file["bytes"] is None and file["path"] is None):
        raise ImageError(f"{where} is missing (null); remove it, or the row")
    try:
        yield file
    # Damaged EXIF data raise the last two.
    except (OSError, SyntaxError, DecompressionBombError, ValueError, struct.error) as error:
        raise ImageError(
            f"{where} cannot be read ({str(error)[:200]}); give a file, or remove the row"
        ) from error


def _size(file: File | None, image: int, row: int, dataset: str) -> tuple[int, int]:
    """Return height and width as they are after the EXIF orientation is applied; from a header."""
    from PIL import Image as PillowImage

    with (
        _reading(file, image, row, dataset) as found,
        PillowImage.open(
            found["path"] if found["bytes"] is None else BytesIO(found["bytes"])
        ) as opened,
    ):
        width, height = opened.size
        # TIFF's size is turned already. PNG's own method would decode the whole image.
        turns = opened.format != "TIFF"
        turns = turns and PillowImage.Image.getexif(opened).get(_ORIENTATION, 1) >= 5
    return (width, height) if turns else (height, width)
