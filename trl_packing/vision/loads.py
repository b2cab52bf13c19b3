"""Images, image tokens, patches and cost of every document of a run.

rows of the user       row 0: images of 8 and 24 patches      row 1: none
documents, image_ids   [0 1 1 0]  [2 2 2 0]                   [0 0 0]
patches                     8         24                         0
"""

from collections.abc import Sequence

import numpy as np

from trl_packing.data.whole_images import ImageSpans
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IMAGE_IDS, IMAGE_ROW
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.vision.tower_cost import TowerCost


class RunLoads:
    """Knows the patches of each image of a run.

    Args:
        cost: of the tower.
    """

    def __init__(self, cost: TowerCost):
        self.cost = cost
        self._rows = np.zeros(0, np.int64)  # numbers of the user's rows with images, ascending
        self._starts = np.zeros(1, np.int64)  # of the images of each row in `_patches`
        self._patches = np.zeros(0, np.int64)

    def add(self, rows: Sequence[int], patches: Sequence[Sequence[int]]) -> None:
        """Add the images of a data set.

        Args:
            rows: numbers of its rows in the run, in any order.
            patches: of each image of each row; rows without images are left out.
        """
        known = set(self._rows.tolist())
        given = zip(rows, patches, strict=True)
        new = sorted((row, of_row) for row, of_row in given if of_row and row not in known)
        self._rows = np.append(self._rows, np.array([row for row, _ in new], np.int64))
        self._patches = np.append(
            self._patches, np.array([n for _, of_row in new for n in of_row], np.int64)
        )
        sizes = np.array([len(of_row) for _, of_row in new], np.int64)
        self._starts = np.append(self._starts, self._starts[-1] + np.cumsum(sizes))
        order = np.argsort(self._rows, kind="stable")
        if (np.diff(order) < 0).any():
            sizes = np.diff(self._starts)[order]
            at = np.repeat(self._starts[:-1][order] - np.cumsum(sizes) + sizes, sizes)
            self._patches = self._patches[at + np.arange(len(at))]
            self._rows = self._rows[order]
            self._starts = np.concatenate([[0], np.cumsum(sizes)])

    def of(self, documents: ArrowDocuments) -> ImageLoads | None:
        """Return the loads of prepared documents; None if these have no images."""
        if IMAGE_IDS not in documents.columns:
            return None
        rows = documents.dataset.data.column(IMAGE_ROW).to_numpy()
        reader = documents.readers[IMAGE_IDS]
        chunks = [
            self._of_chunk(values, offsets, rows[first : first + len(offsets) - 1])
            for (values, offsets), first in zip(reader.chunks, reader.first_row, strict=False)
        ]
        images, tokens, patches, costs = (
            documents.in_order([chunk[column] for chunk in chunks]) for column in range(4)
        )
        return ImageLoads(images, tokens, patches, costs)

    def _of_chunk(
        self, values: np.ndarray, offsets: np.ndarray, rows: np.ndarray
    ) -> tuple[np.ndarray, ...]:
        """Return images, image tokens, patches and cost of some stored documents."""
        start, stop, number = int(offsets[0]), int(offsets[-1]), len(offsets) - 1
        values, offsets = values[start:stop], offsets.astype(np.int64) - start
        spans = ImageSpans((values, offsets))
        of_image, images = spans.document, values[spans.first].astype(np.int64)
        at = np.searchsorted(self._rows, rows[of_image])
        patches = self._patches[self._starts[at] + images - 1]
        is_feature = np.concatenate([[0], np.cumsum(values > 0)])
        costs = np.bincount(of_image, self.cost.of_images(patches), number)
        return (
            np.bincount(of_image, minlength=number),
            is_feature[offsets[1:]] - is_feature[offsets[:-1]],
            np.bincount(of_image, patches, number).astype(np.int64),
            np.rint(costs).astype(np.int64),
        )
