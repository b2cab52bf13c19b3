"""Images of a document, which stay whole: a document with images is kept as it is, or dropped.

image_ids    0 0 1 1 1 1 0 0 2 2 0       an image is what lies from its first to its last token
"""

from collections.abc import Mapping
from typing import Any, NamedTuple

import numpy as np

from trl_packing.data.overflow import Pieces
from trl_packing.documents.labels import IMAGE_IDS


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
    at = np.flatnonzero(ids)
    firsts = np.flatnonzero(np.diff(ids[at], prepend=0))
    lasts = np.append(firsts[1:], len(at)) - 1 if len(at) else firsts
    return [
        ImageTokens(int(ids[start]) - 1, int(start), int(stop) + 1)
        for start, stop in zip(at[firsts], at[lasts], strict=True)
    ]


def keep_images_whole(pieces: Pieces, drops: np.ndarray) -> Pieces:
    """Return `pieces` without those of some documents.

    Args:
        pieces: as `pieces_of` returns them.
        drops: documents with images that are too long, ``(documents,)`` bool.
    """
    kept, contexts = ~drops[pieces.rows], pieces.contexts
    rows, starts, stops = (part[kept] for part in pieces[:3])
    return Pieces(rows, starts, stops, None if contexts is None else contexts[kept])
