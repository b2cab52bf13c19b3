"""Images, image tokens and patches of every document of a run.

rows of the user       row 0: images of 8 and 24 patches      row 1: none
documents, image_ids   [0 1 1 0 2 2 2 0]                      [0 0 0]
patches                32                                     0
"""

from collections.abc import Sequence

import numpy as np

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS, IMAGE_ROW
from trl_packing.packing.patch_bins import ImageLoads


class RunLoads:
    """Knows the images and patches of each row of a run; a document has all images of its row."""

    def __init__(self) -> None:
        self._of_rows = np.zeros((2, 0), np.int64)  # images and patches, by the number of the row

    def add(self, rows: Sequence[int], patches: Sequence[Sequence[int]]) -> None:
        """Add the images of a data set.

        Args:
            rows: numbers of its rows in the run, in any order.
            patches: of each image of each row.
        """
        missing = max(rows, default=-1) + 1 - self._of_rows.shape[1]
        self._of_rows = np.pad(self._of_rows, ((0, 0), (0, max(missing, 0))))
        self._of_rows[:, rows] = [[*map(len, patches)], [*map(sum, patches)]]

    def of(self, documents: ArrowDocuments) -> ImageLoads | None:
        """Return the loads of prepared documents; None if these have no images."""
        if IMAGE_IDS not in documents.columns:
            return None
        stored = documents.dataset.data.column(IMAGE_ROW).to_numpy()
        rows = stored[documents.stored_rows(np.arange(len(documents)))]
        has_row = rows >= 0  # neither -1 nor NaN, as in documents of text
        images, patches = np.zeros((2, len(rows)), np.int64)
        images[has_row], patches[has_row] = self._of_rows[:, rows[has_row].astype(np.int64)]
        tokens = [
            np.diff(np.concatenate([[0], np.cumsum(values > 0)])[offsets])
            for values, offsets in documents.readers[IMAGE_IDS].chunks
        ]
        return ImageLoads(images, documents.in_order(tokens), patches)
