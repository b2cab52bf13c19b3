"""The image files of a run: sizes from their headers, pixels only when a micro-batch is made.

    rows of data sets    train 0 1 2   eval 0 1
    numbers in the run         0 1 2        3 4      the column `image_row` of prepared documents

Prepared documents hold numbers, and the files stay where they are: bytes in the Arrow file of the
user's data set, or paths. A worker maps the file again; nothing is copied.
"""

import struct
from collections.abc import Iterator, Sequence
from io import BytesIO, UnsupportedOperation
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset

from trl_packing.documents.arrow import stored_rows
from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW

if TYPE_CHECKING:  # only runs with images need Pillow
    from PIL import Image as PillowImage

_FIRST_ROWS = 20
_ORIENTATION = 0x0112  # EXIF tag; values from 5 exchange width and height


class ImageError(ValueError):
    """An image that cannot be read, or a row whose images do not fit its text."""


class NoImages(Sequence[np.ndarray]):
    """The sizes of rows that have no images; small also for many rows.

    Args:
        rows: their number.
    """

    def __init__(self, rows: int):
        self.rows = rows

    def __len__(self) -> int:
        return self.rows

    def __getitem__(self, row: Any) -> Any:
        found = range(self.rows)[row]  # raises IndexError behind the last row
        return NoImages(len(found)) if isinstance(row, slice) else np.zeros((0, 2), np.int64)


class Source(NamedTuple):
    """The images of a data set.

    Attributes:
        column: of files: lists of them, or one in each row.
        stored: the row of `column` that holds each row of the data set, ``(rows,)`` int64.
        sizes: height and width of the images of each row, ``(images, 2)`` int64 each.
        name: of the data set, for messages.
        first: number of its first row in the run.
    """

    column: pa.ChunkedArray
    stored: np.ndarray
    sizes: Sequence[np.ndarray]
    name: str
    first: int


class ImageStore:
    """The images of all data sets of a run, by row.

    Attributes:
        sources: the data sets, in the order in which they were added.
    """

    def __init__(self) -> None:
        self.sources: list[Source] = []

    def take(self, dataset: Dataset, name: str) -> Dataset:
        """Return `dataset` with numbers in the column `image_row` in place of its images.

        Args:
            dataset: with a column `image` (an image, or null) or `images` (a list of them).
            name: of the data set, for messages.

        Raises:
            ValueError: it has both columns, or the column holds no images.
            ImageError: an image is missing or cannot be read, naming the row.
        """
        found = [column for column in IMAGE_COLUMNS if column in dataset.column_names]
        if len(found) == 2:
            raise ValueError(
                f"the {name} dataset has the columns 'image' and 'images'; remove one of them"
            )
        if len(dataset.column_names) == 1:
            raise ValueError(
                f"the {name} dataset has images but no text; give it messages, or prompts and "
                "completions"
            )
        column, stored = dataset.data.column(found[0]), stored_rows(dataset)
        _check_type(column.type, found[0], name)
        sizes = list(_sizes_of_rows(column, stored, name))
        return self._add(dataset.remove_columns(found), column, stored, sizes, name)

    def take_texts(self, dataset: Dataset, name: str) -> Dataset:
        """Return a `dataset` without images as one whose rows have none, with `image_row`.

        Args:
            dataset: without a column of images.
            name: of the data set, for messages.
        """
        column, rows = pa.chunked_array([pa.nulls(1)]), len(dataset)
        return self._add(dataset, column, np.zeros(rows, np.int64), NoImages(rows), name)

    def _add(
        self,
        rows: Dataset,
        column: pa.ChunkedArray,
        stored: np.ndarray,
        sizes: Sequence[np.ndarray],
        name: str,
    ) -> Dataset:
        """Add the images of a data set; return its `rows` with their numbers in the run."""
        last = self.sources[-1] if self.sources else None
        first = last.first + len(last.stored) if last else 0
        self.sources.append(Source(column, stored, sizes, name, first))
        return rows.add_column(IMAGE_ROW, np.arange(first, first + len(stored)))

    def sizes(self, row: int) -> np.ndarray:
        """Return height and width of each image of a row, ``(images, 2)`` int64."""
        source, row = self._find(row)
        return source.sizes[row]

    def sizes_of(self, rows: Sequence[int]) -> Sequence[np.ndarray]:
        """Return height and width of the images of some rows of one data set."""
        if len(rows) and isinstance(self._find(rows[0])[0].sizes, NoImages):
            return NoImages(len(rows))
        return [self.sizes(row) for row in rows]

    def load(self, row: int, chosen: np.ndarray | None = None) -> list["PillowImage.Image"]:
        """Return the images of a row, decoded as `datasets` decodes them.

        Args:
            row: its number in the run.
            chosen: numbers of the images in the row; None for all of them.

        Raises:
            ImageError: an image cannot be decoded, naming the row.
        """
        source, row = self._find(row)
        files = _files(source.column[int(source.stored[row])])
        numbers = range(len(files)) if chosen is None else chosen.tolist()
        return [_decoded(files[at], _name(at, row, source.name)) for at in numbers]

    def name_of(self, row: int) -> str:
        """Return the words by which messages name a row."""
        source, row = self._find(row)
        return f"row {row} of the {source.name} dataset"

    def _find(self, row: int) -> tuple[Source, int]:
        source = next(source for source in reversed(self.sources) if source.first <= row)
        return source, row - source.first


def _name(image: int, row: int, dataset: str) -> str:
    return f"image {image} in row {row} of the {dataset} dataset"


def _check_type(kind: pa.DataType, column: str, name: str) -> None:
    """Raise ValueError unless an Arrow column holds files of images, or lists of them."""
    is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
    file = kind.value_type if is_list else kind
    if pa.types.is_struct(file) and {"bytes", "path"} <= {field.name for field in file}:
        return
    if is_list and pa.types.is_null(file):  # no row has an image
        return
    tests = (pa.types.is_string, pa.types.is_large_string, pa.types.is_binary)
    if not any(test(file) for test in (*tests, pa.types.is_large_binary)):
        raise ValueError(
            f"the column {column!r} of the {name} dataset holds {kind}, but images are PIL images, "
            "paths or bytes, one or a list of them in each row"
        )


# --- sizes ----------------------------------------------------------------------------------------


def _sizes_of_rows(column: pa.ChunkedArray, stored: np.ndarray, name: str) -> Iterator[np.ndarray]:
    """Yield height and width of the images of each row; only headers are read."""
    for number, place in enumerate(stored.tolist()):
        sizes = [
            _header_size(file, _name(at, number, name))
            for at, file in enumerate(_files(column[place]))
        ]
        yield np.array(sizes, np.int64).reshape(-1, 2)


def holds_addresses(dataset: Dataset) -> bool:
    """Return whether the first images of a data set are addresses (https://, s3://), not files.

    Their sizes are not known without a download.
    """
    for name in (column for column in IMAGE_COLUMNS if column in dataset.column_names):
        column = dataset.data.column(name)
        for place in stored_rows(dataset)[:_FIRST_ROWS].tolist():
            if any(map(_is_address, _files(column[place]))):
                return True
    return False


def _is_address(file: pa.Scalar) -> bool:
    if isinstance(file, pa.StructScalar) and file.is_valid and not file["bytes"].is_valid:
        file = file["path"]
    is_path = isinstance(file, (pa.StringScalar, pa.LargeStringScalar)) and file.is_valid
    return is_path and "://" in file.as_py()


def _files(found: pa.Scalar) -> list[pa.Scalar]:
    """Return the files of a row: an entry of a column of files, or of lists of them."""
    if not found.is_valid:
        return []
    return list(found) if isinstance(found, (pa.ListScalar, pa.LargeListScalar)) else [found]


def _opened(file: pa.Scalar, where: str, *, reads_all: bool) -> "PillowImage.Image":
    """Return an image whose header is read, from the memory of the Arrow table or from its path.

    Args:
        file: bytes, a path, or a structure of both.
        where: which image it is.
        reads_all: read the whole file, not only its header.
    """
    from PIL import Image as PillowImage

    if file.is_valid and isinstance(file, pa.StructScalar):
        file = file["bytes"] if file["bytes"].is_valid else file["path"]
    if not file.is_valid:
        raise ImageError(f"{where} is missing (null); remove it, or the row")
    if isinstance(file, (pa.StringScalar, pa.LargeStringScalar)):
        return PillowImage.open(file.as_py())
    if not reads_all:
        try:
            return PillowImage.open(pa.BufferReader(file.as_buffer()))
        except UnsupportedOperation:  # WebP's reader asks more of a file
            pass
    return PillowImage.open(BytesIO(file.as_buffer()))


def _header_size(file: pa.Scalar, where: str) -> tuple[int, int]:
    """Return height and width as they are after the EXIF orientation is applied."""
    try:
        with _opened(file, where, reads_all=False) as opened:
            width, height = opened.size
            turned = _is_turned(opened)
    except ImageError:
        raise
    except _errors() as error:
        raise _unreadable(where, error) from error
    return (width, height) if turned else (height, width)


def _is_turned(opened: "PillowImage.Image") -> bool:
    """Return whether decoding will exchange width and height of an image, from its header."""
    from PIL.Image import Image as AnyImage

    if opened.format == "TIFF":  # Pillow has turned its size already
        return False
    # The base class's method: PNG's would decode the whole image to look behind its pixels.
    return bool(AnyImage.getexif(opened).get(_ORIENTATION, 1) >= 5)


def _decoded(file: pa.Scalar, where: str) -> "PillowImage.Image":
    from PIL import ImageOps

    try:
        image = _opened(file, where, reads_all=True)
        image.load()
        if image.getexif().get(_ORIENTATION) is not None:
            image = ImageOps.exif_transpose(image)
    except ImageError:
        raise
    except _errors() as error:
        raise _unreadable(where, error) from error
    return image


def _errors() -> tuple[type[Exception], ...]:
    from PIL.Image import DecompressionBombError

    # Damaged EXIF data raise the last two.
    return OSError, SyntaxError, DecompressionBombError, ValueError, struct.error


def _unreadable(where: str, error: Exception) -> ImageError:
    return ImageError(f"{where} cannot be read ({str(error)[:200]}); replace it, or remove the row")
