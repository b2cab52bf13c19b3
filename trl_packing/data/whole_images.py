"""Cuts of documents that never go through an image.

    image_ids    0 0 1 1 1 1 0 0 2 2 0       an image is what lies from its first to its last token
    cut at 4         |<- the image starts here; the piece before ends here
                             ->| the piece behind starts here, if the one before cannot have it

`overflow.pieces_of` cuts by lengths alone. A cut inside an image moves to its start, or, at the
start of a document, to its end. Pieces of "split" are cut again behind such a move.
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trl_packing.data.overflow import Overflow, Pieces
from trl_packing.documents.labels import IMAGE_IDS
from trl_packing.documents.list_columns import FlatLists


class ImageTokens(NamedTuple):
    """Tokens ``[start, stop)`` of a document that stand for an image, separators included.

    Attributes:
        image: number of the image in the user's row, from 0.
        start: its first token in the document.
        stop: the token after its last one.
    """

    image: int
    start: int
    stop: int


def images_of(document: Mapping[str, Any]) -> list[ImageTokens]:
    """Return the images of a document in their order; none without the column `image_ids`.

    Examples:
        >>> images_of({"input_ids": [5, 9, 9, 6], "image_ids": [0, 2, 2, 0]})
        [ImageTokens(image=1, start=1, stop=3)]
    """
    ids = np.asarray(document.get(IMAGE_IDS, ()), np.int64)
    spans = ImageSpans((ids, np.array([0, len(ids)]))).of(0)
    return [ImageTokens(int(ids[start]) - 1, start, stop) for start, stop in spans]


class ImageSpans:
    """First and last tokens of the images of a batch of documents.

    Args:
        image_ids: image of each token, 0 on text; values and offsets.
    """

    def __init__(self, image_ids: FlatLists):
        values, self.offsets = image_ids
        at = np.flatnonzero(values)
        document = np.searchsorted(self.offsets, at, side="right") - 1
        change = (np.diff(document, prepend=-1) != 0) | (np.diff(values[at], prepend=0) != 0)
        starts = np.flatnonzero(change)
        self.first = at[starts]
        ends = np.append(starts[1:], len(at)) - 1
        self.end = at[ends] + 1 if len(at) else self.first
        self.document = document[starts]

    def of(self, row: int) -> list[tuple[int, int]]:
        """Return ``[start, stop)`` of the images of a document, counted from its first token."""
        low, high = np.searchsorted(self.document, [row, row + 1])
        first = int(self.offsets[row])
        return [
            (int(start) - first, int(stop) - first)
            for start, stop in zip(self.first[low:high], self.end[low:high], strict=True)
        ]

    def around(self, rows: np.ndarray, cuts: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return start and stop of the image that each cut goes through; the cut itself without.

        Args:
            rows: document of each cut.
            cuts: token before which it cuts, counted from the first of its document.
        """
        if not len(self.first):
            return cuts, cuts
        place = self.offsets[rows] + cuts
        number = np.maximum(np.searchsorted(self.first, place, side="left") - 1, 0)
        inside = (self.first[number] < place) & (place < self.end[number])
        start = np.where(inside, self.first[number] - self.offsets[rows], cuts)
        return start, np.where(inside, self.end[number] - self.offsets[rows], cuts)


def split_around(
    length: int, capacity: int, images: list[tuple[int, int]]
) -> list[tuple[int, int]]:
    """Return pieces ``[start, stop)`` of at most `capacity` tokens that cut no image.

    An image longer than `capacity` is left out.

    Examples:
        >>> split_around(10, 4, [(2, 6)])
        [(0, 2), (2, 6), (6, 10)]
    """
    pieces, start = [], 0
    while start < length:
        stop = min(start + capacity, length)
        cut = next(((a, b) for a, b in images if a < stop < b), None)
        if cut is None:
            pieces.append((start, stop))
            start = stop
        elif cut[0] > start:
            pieces.append((start, cut[0]))
            start = cut[0]
        else:  # the image alone does not fit
            start = cut[1]
    return pieces


def keep_images_whole(pieces: Pieces, image_ids: FlatLists, overflow: Overflow) -> Pieces:
    """Return `pieces` that cut no image.

    Args:
        pieces: as `pieces_of` returns them.
        image_ids: image of each token of the documents, 0 on text.
        overflow: the policy.

    Raises:
        ValueError: a document with images is too long under ``"overlap"``.
    """
    images, capacity = ImageSpans(image_ids), overflow.capacity
    if capacity is None or not len(images.first):
        return pieces
    if overflow.policy == "overlap":
        running = np.concatenate([[0], np.cumsum(image_ids[0] > 0)])
        begins, ends = image_ids[1][:-1], image_ids[1][1:]
        if ((ends - begins > capacity) & (running[ends] > running[begins])).any():
            raise ValueError(
                "overflow='overlap' cannot cut a document with images: an overlap might begin in "
                "one; set overflow='split', or raise max_length"
            )
        return pieces
    if overflow.policy != "split":
        _, starts = images.around(pieces.rows, pieces.starts)
        stops, _ = images.around(pieces.rows, pieces.stops)
        return Pieces(pieces.rows, starts, np.maximum(starts, stops))
    return _split_again(pieces, images, np.diff(image_ids[1]), capacity)


def _split_again(pieces: Pieces, images: ImageSpans, lengths: np.ndarray, capacity: int) -> Pieces:
    """Return `pieces`, with new ones of each document in which a cut goes through an image."""
    through = np.zeros(len(lengths), bool)
    for cuts in (pieces.starts, pieces.stops):
        through[pieces.rows[images.around(pieces.rows, cuts)[0] != cuts]] = True
    whole = ~through[pieces.rows]
    again = [
        (row, start, stop)
        for row in np.flatnonzero(through).tolist()
        for start, stop in split_around(int(lengths[row]), capacity, images.of(row))
    ]
    rows, starts, stops = (
        np.concatenate([kept[whole], np.array(new, np.int64)])
        for kept, new in zip(
            pieces[:3], zip(*again, strict=True) if again else ((),) * 3, strict=True
        )
    )
    order = np.lexsort([starts, rows])
    return Pieces(rows[order], starts[order], stops[order])
