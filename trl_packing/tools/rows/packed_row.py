"""One packed row of a run, its documents, and where they share prefixes, its segments."""

from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_packing.data.whole_images import ImageTokens
from trl_packing.tools.rows.segments import Segment

# Properties of documents that a reader looks for.
NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED = (
    "nothing trained",
    "no stop token",
    "cut",
    "weighted",
)
PROPERTIES = (NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED)


@dataclass(frozen=True)
class RowDocument:
    """One document of a packed row: tokens ``[start, stop)`` of its micro-batch.

    Where documents share prefixes, these are its tokens in the row of the documents apart.

    Attributes:
        start: its first token in the micro-batch, a boundary of `cu_seqlens`.
        stop: the next boundary.
        number: its number among the prepared documents; None for padding.
        row: the row of the user's data set that it comes from; None for padding.
        uncut: its tokens before it was cut to fit.
        properties: those of `PROPERTIES` that it has.
        images: the tokens of its images, counted from `start`.
    """

    start: int
    stop: int
    number: int | None = None
    row: int | None = None
    uncut: int = 0
    properties: tuple[str, ...] = ()
    images: tuple[ImageTokens, ...] = ()


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A bin as it is trained, or a whole micro-batch where nothing is packed.

    Attributes:
        micro_batch: its number in the epoch, over all ranks.
        index: which row of the micro-batch it is.
        batch: the micro-batch as the data loader yields it.
        documents: in the order of their tokens, padding included.
        apart: the micro-batch of the documents without shared prefixes; may be `batch`.
        segments: of a row whose documents share prefixes, without padding; else empty.
        shared: tokens of each document that stand in the documents before it; empty without
            `segments`.
    """

    micro_batch: int
    index: int
    batch: Any = field(repr=False)
    documents: tuple[RowDocument, ...]
    apart: Any = field(repr=False)
    segments: tuple[Segment, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Return the first token in the micro-batch."""
        return 0 if self.segments else self.documents[0].start

    @property
    def stop(self) -> int:
        """Return the position after the last token in the micro-batch."""
        return self.batch["labels"].shape[1] if self.segments else self.documents[-1].stop

    @property
    def real_tokens(self) -> int:
        """Return the tokens of all documents, those that they share in each of them."""
        return sum(d.stop - d.start for d in self.documents if d.number is not None)

    @property
    def num_images(self) -> int:
        """Return the images of all documents."""
        return sum(len(document.images) for document in self.documents)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: its documents, their images, and the tokens that they share."""
        real = [d for d in self.documents if d.number is not None]
        shared = self.shared or [0] * len(real)
        return {
            "micro_batch": self.micro_batch + 1,
            "tokens": self.stop - self.start,
            "documents": [
                {"number": d.number, "row": d.row, "tokens": d.stop - d.start, "shared": above}
                | ({"images": [[i.start, i.stop] for i in d.images]} if d.images else {})
                for d, above in zip(real, shared, strict=True)
            ],
        }

    def values(self, name: str) -> np.ndarray:
        """Return the row's part of a tensor of the batch, ``(tokens,)``."""
        return self.batch[name][0, self.start : self.stop].numpy()
