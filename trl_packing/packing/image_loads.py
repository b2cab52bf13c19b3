"""The work that the images of each document add to its tokens.

    document      tokens   image tokens   patches
    [t t i i t]      5          2            8
    [t t t]          3          0            0

Memory grows with the tokens and the patches of a micro-batch, so bins may be limited by both
(patch_bins.py).
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
        most_patches: that a bin may hold; None without a limit.
    """

    images: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    most_patches: int | None = None

    def limited(self, most_patches: int | None) -> "ImageLoads":
        """Return the same loads with another limit."""
        return replace(self, most_patches=most_patches)
