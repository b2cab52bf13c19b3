"""The documents of each epoch of a mixture: some sources more than once, others in part.

    source   documents   share of an epoch      epoch 0          epoch 1          epoch 2
    math     a b         2 times each           a b a b          a b a b          a b a b
    chat     c d e f g   2 of 5                 e c              g d              f e

An epoch draws whole copies of a source, and a remainder that goes on where that of the epoch before
stopped. So no document is drawn twice before all others of its source are drawn once. A draw holds
numbers of documents; no token is copied. It depends on (seed, epoch) alone.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trl_packing.packing.fair_steps import excess_of_documents, exchange_between_steps

_SEED = 0x6D6978  # keeps the order of remainders apart from other uses of the seed

_MOST_COUNTED = 2.0**60  # larger shares would not fit into 64 bits


@dataclass(frozen=True, eq=False)
class MixtureDraw:
    """The documents that each epoch of a mixture draws, with repetitions.

    Attributes:
        source_ids: the source of every document, ``(documents,)`` integers from 0.
        counts: documents of each source that an epoch draws, ``(sources,)`` int64.
        seed: decides the order in which remainders are drawn.

    Examples:
        >>> draw = MixtureDraw(np.array([0, 0, 1, 1, 1, 1]), np.array([4, 2]), seed=0)
        >>> len(draw), draw.documents(0).tolist(), draw.documents(1).tolist()
        (6, [0, 0, 1, 1, 4, 5], [0, 0, 1, 1, 2, 3])
    """

    source_ids: np.ndarray
    counts: np.ndarray
    seed: int

    def __len__(self) -> int:
        """Return the number of documents of an epoch, the same in all of them."""
        return int(self.counts.sum())

    @cached_property
    def sizes(self) -> np.ndarray:
        """Documents of each source, ``(sources,)`` int64."""
        return np.bincount(self.source_ids, minlength=len(self.counts))

    @property
    def is_same_every_epoch(self) -> bool:
        """Whether every epoch draws the same documents: no source has a remainder."""
        return not (self.counts % np.maximum(self.sizes, 1)).any()

    def documents(self, epoch: int) -> np.ndarray:
        """Return the documents of an epoch, ascending, ``(len(self),)`` int64."""
        copies = self.counts // np.maximum(self.sizes, 1)
        times = copies[self.source_ids]
        for source, order in enumerate(self._orders):
            number = int(self.counts[source] % max(len(order), 1))
            start = epoch * number
            times[order[np.arange(start, start + number) % max(len(order), 1)]] += 1
        return np.repeat(np.arange(len(self.source_ids)), times)

    def fair_order(
        self, documents: np.ndarray, lengths: np.ndarray, *, epoch: int, documents_per_step: int
    ) -> np.ndarray:
        """Return the places of an epoch in an order of which every step is a fair mixture.

        A step holds each source in proportion to its documents, within one or two of them, and
        nearly in proportion to its tokens. A document that is drawn twice comes again when all
        others of its source have come.

        Args:
            documents: of the epoch, as `documents` returns them.
            lengths: tokens of each of them.
            epoch: its number.
            documents_per_step: documents in a step.
        """
        rng = np.random.default_rng((_SEED, self.seed, epoch))
        sources = self.source_ids[documents]
        copies = np.arange(len(documents)) - np.searchsorted(documents, documents)
        by_source = np.lexsort((rng.random(len(documents)), copies, sources))
        starts = np.cumsum(self.counts) - self.counts
        rank = np.arange(len(documents)) - starts[sources[by_source]]
        offsets = rng.random(len(self.counts))[sources[by_source]]
        order = by_source[np.argsort((rank + offsets) / self.counts[sources[by_source]])]
        return exchange_between_steps(
            order,
            documents_per_step,
            excess=excess_of_documents(sources, lengths),
            keys=copies * len(self.counts) + sources,  # a document may replace one of its source
            rng=rng,
        )

    @cached_property
    def _orders(self) -> list[np.ndarray]:
        """Documents of each source in the order of drawing, which the remainders go round."""
        return [
            np.random.default_rng((_SEED, self.seed, source)).permutation(
                np.flatnonzero(self.source_ids == source)
            )
            for source in range(len(self.counts))
        ]


def drawn_by_weight(
    weights: Sequence[float], sizes: np.ndarray, units: np.ndarray, temperature: float = 1.0
) -> np.ndarray:
    """Return the documents that an epoch draws of each source, ``(sources,)`` int64.

    An epoch has as many units (documents, or tokens) as all sources together. Source s has the
    share weight_s^(1/T) / Σ weight^(1/T) of them.

    Args:
        weights: of each source; none is negative, and one is positive.
        sizes: documents of each source, ``(sources,)``.
        units: documents or tokens of each source, in which shares are counted, ``(sources,)``.
        temperature: T; above 1, small sources get more than their weight.

    Examples:
        >>> drawn_by_weight([3, 1], np.array([10, 10]), np.array([10, 10])).tolist()
        [15, 5]
        >>> drawn_by_weight([1, 1], np.array([10, 10]), np.array([300, 100])).tolist()
        [7, 20]
    """
    shares = np.asarray(weights, float)
    shares = (shares / shares.max()) ** (1 / temperature)  # neither power nor sum overflows
    shares[np.asarray(weights) == 0] = 0.0
    wanted = shares / shares.sum() * units.sum()
    return drawn_by_epochs(wanted / np.maximum(units, 1), sizes)


def drawn_by_epochs(epochs: np.ndarray, sizes: np.ndarray) -> np.ndarray:
    """Return `epochs` × `sizes` in whole documents, at least 1 where a source has a share.

    Args:
        epochs: how often an epoch draws each document of a source, ``(sources,)``.
        sizes: documents of each source, ``(sources,)``.
    """
    counts = np.rint(np.minimum(epochs * sizes, _MOST_COUNTED)).astype(np.int64)
    return np.maximum(counts, (np.asarray(epochs) > 0) & (sizes > 0))
