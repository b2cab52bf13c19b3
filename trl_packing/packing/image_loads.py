"""The work that the images of each document add to its tokens.

    document      tokens   image tokens   patches   cost of the tower, in tokens
    [t t i i t]      5          2            8           3
    [t t t]          3          0            0           0

Memory grows with the tokens and the patches of a micro-batch, so bins are limited by both
(patch_bins.py). Its time grows with tokens and the cost of the tower, which ranks balance.
"""

from dataclasses import dataclass, replace

import numpy as np


@dataclass(frozen=True, eq=False)
class ImageLoads:
    """Images of the documents of a data set, ``(documents,)`` int64 each.

    Attributes:
        images: number of images.
        tokens: tokens that come from images.
        patches: positions of the vision tower.
        costs: time of the tower, in tokens of the text model that take as long.
        most_patches: that a bin may hold; None without a limit.
    """

    images: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    costs: np.ndarray
    most_patches: int | None = None

    def limited(self, most_patches: int | None) -> "ImageLoads":
        """Return the same loads with another limit."""
        return replace(self, most_patches=most_patches)
