"""The places of an epoch: a document for each, and its tokens.

no mixture    place 0 1 2 3   document 0 1 2 3      every document once
a mixture     place 0 1 2 3   document 0 0 2 5      as the epoch draws them (draw.py)

Bins and steps are made of places, so they need not know of mixtures.
"""

import numpy as np

from trl_packing.packing.draw import MixtureDraw


class EpochPlaces:
    """The places of every epoch of a sampler; as many in each of them.

    Args:
        lengths: tokens of every document, ``(documents,)`` integers.
        draw: the documents that each epoch of a mixture draws; None draws every document once.
    """

    def __init__(self, lengths: np.ndarray, draw: MixtureDraw | None = None):
        self.draw = draw
        self._lengths = lengths
        self._drawn: tuple[int, np.ndarray] | None = None

    def __len__(self) -> int:
        return len(self._lengths) if self.draw is None else len(self.draw)

    @property
    def are_same_every_epoch(self) -> bool:
        return self.draw is None or self.draw.is_same_every_epoch

    def lengths(self, epoch: int) -> np.ndarray:
        """Return the tokens at each place, ``(places,)``."""
        return self.values(self._lengths, epoch)

    def values(self, of_documents: np.ndarray, epoch: int) -> np.ndarray:
        """Return values of the documents ``(documents,)`` as those of the places ``(places,)``."""
        return of_documents if self.draw is None else of_documents[self.documents(epoch)]

    def documents_at(self, places: np.ndarray, epoch: int) -> np.ndarray:
        """Return the documents at some places, int64."""
        places = np.asarray(places, np.int64)
        return places if self.draw is None else self.documents(epoch)[places]

    def fair_order(self, epoch: int, documents_per_step: int) -> np.ndarray:
        """Return the places in an order of which every step is a fair mixture."""
        assert self.draw is not None
        documents, lengths = self.documents(epoch), self.lengths(epoch)
        return self.draw.fair_order(
            documents, lengths, epoch=epoch, documents_per_step=documents_per_step
        )

    def documents(self, epoch: int) -> np.ndarray:
        """Return the document at each place of a mixture, kept for one epoch."""
        assert self.draw is not None
        if self._drawn is None or self._drawn[0] != epoch:
            self._drawn = epoch, self.draw.documents(epoch)
        return self._drawn[1]
