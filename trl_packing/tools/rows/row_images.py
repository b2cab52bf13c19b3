"""The images of packed rows for the page: where their tokens are, their sizes, small pictures."""

from typing import Any

import numpy as np

from trl_packing.data.whole_images import ImageTokens
from trl_packing.documents.labels import IMAGE_ROW
from trl_packing.formatting.printable import escape_text
from trl_packing.tools.rows.packed_row import PackedRow
from trl_packing.tools.rows.packed_rows import PackedEpoch
from trl_packing.vision.image_store import ImageError
from trl_packing.vision.thumbnails import thumbnail

MAX_PICTURES = 64  # of a page, about 0.5 MB


class RowImages:
    """Describes the images of rows, and draws the first ones.

    Args:
        epoch: of the rows.
        most: pictures that are drawn. Further images are described only.
    """

    def __init__(self, epoch: PackedEpoch, most: int = MAX_PICTURES):
        self.epoch = epoch
        self.left = most
        self._numbers = epoch.documents.scalars.get(IMAGE_ROW, np.zeros(0, np.int64)).tolist()

    def of(self, row: PackedRow) -> list[dict[str, Any]]:
        """Return the images of a row for rows.js; tokens count from the first of the row."""
        return [
            self._described(image, self._numbers[document.number], document.start - row.start)
            for document in row.documents
            for image in document.images
        ]

    def _described(self, image: ImageTokens, user_row: int, first: int) -> dict[str, Any]:
        store = self.epoch.run.images.store
        height, width = store.sizes(user_row)[image.image].tolist()
        described = {
            "start": first + image.start,
            "stop": first + image.stop,
            "size": f"{width} × {height}",
        }
        if not self.left:
            return described
        self.left -= 1
        try:
            picture = store.load(user_row, np.array([image.image]))[0]
        except ImageError as error:
            return described | {"error": escape_text(str(error))}
        return described | {"picture": thumbnail(picture)}
