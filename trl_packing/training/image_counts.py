"""Counts of the images of an epoch for the report: images, tokens and patches.

images       900 in 800 documents · 230,400 tokens (61%) · 921,600 patches, up to 8,192 a
             micro-batch
"""

from dataclasses import dataclass

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.packing.sampler import PackedBatchSampler

_MOST_BATCHES = 20_000  # that are looked at


@dataclass(frozen=True)
class ImageCounts:
    """Images of the documents of an epoch.

    Attributes:
        images: their number.
        documents: with an image.
        tokens: that come from images.
        share: of these in all tokens.
        patches: positions of the vision tower.
        most_patches: in a micro-batch.
        limit: the most patches that any bin may hold; None without a limit.
    """

    images: int
    documents: int
    tokens: int
    share: float
    patches: int
    most_patches: int
    limit: int | None = None

    @classmethod
    def of(cls, sampler: PackedBatchSampler) -> "ImageCounts | None":
        """Return the counts of the epoch that `sampler` draws next; None without images."""
        loads = sampler.loads
        if loads is None:
            return None
        batches = sampler.some_micro_batches(_MOST_BATCHES)
        # A mixture draws some documents repeatedly.
        images, tokens = sampler.at_places(loads.images), sampler.at_places(loads.tokens)
        patches = sampler.at_places(loads.patches)
        return cls(
            images=int(images.sum()),
            documents=int((images > 0).sum()),
            tokens=int(tokens.sum()),
            share=float(tokens.sum() / sampler.at_places(sampler.lengths).sum()),
            patches=int(patches.sum()),
            most_patches=max(int(loads.patches[np.asarray(batch)].sum()) for batch in batches),
            limit=loads.most_patches and max(loads.most_patches, int(patches.max())),
        )

    def __str__(self) -> str:
        """Return the line of the report."""
        of_bins = "" if self.limit is None else f", a bin at most {self.limit:,}"
        return (
            f"{self.images:,} in {quantity(self.documents, 'document')} · {self.tokens:,} tokens "
            f"({self.share:.0%}) · {self.patches:,} patches, up to {self.most_patches:,} a "
            f"micro-batch{of_bins}"
        )
