"""Pack an `IterableDataset` while it is read, one window of documents at a time.

    documents ──► a window: tokens for `window_bins` bins ──► best fit ──► random order ──► bins
                  while these bins leave, the next window is read

A position is the place where the window begins in the stream, and the number of its micro-batches
that are gone. A rank reads shards of its own if all get equally many; else document n belongs to
rank n mod ranks.
"""

import json
import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from functools import partial
from itertools import islice, pairwise
from typing import Any, NamedTuple

import datasets
import numpy as np
from torch.utils.data import IterableDataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import Document, steps_of, take_counts
from trl_packing.packing.bins import pack
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex

_WINDOW_BATCHES = 64  # size of a window in micro-batches, if documents are not packed


@dataclass(frozen=True)
class StreamSettings:
    """The settings that decide which documents of a stream share a micro-batch."""

    capacity: int | None  # tokens of a bin; None groups documents in order, without packing
    bins_per_batch: int = 1  # documents, if capacity is None
    num_ranks: int = 1
    strategy: str = "bfd"
    seed: int | None = None  # None keeps the order of bins
    window_bins: int = 256  # packed together: more are filled better, and take more memory
    prefix_group_size: int | None = None  # groups are found in a window; None: single documents
    mixture: str | None = None  # the shares of several streams that are read as one, as text


class Place(NamedTuple):
    """A place between two micro-batches of a rank."""

    window: str | None = None  # `Windows.begin` in JSON; None is the start of the stream
    taken: int = 0  # micro-batches of the window before this place


_START = Place()


@dataclass(eq=False)
class PackedStream(IterableDataset):
    """The micro-batches of one rank, from a place in an epoch on.

    They are triples of documents (their tokens as NumPy arrays), the place behind these documents,
    and the counts of what preparation has read and lost since the triple before. Counts are up to
    two windows ahead of the documents.

    Raises:
        ValueError: the stream was divided among ranks before. While reading: a document is longer
            than `capacity` or exceeds `limits`, or the documents before `place` are not those that
            were there when the place was saved.

    Examples:
        >>> rows = [{"input_ids": [0] * length} for length in (3, 2, 1, 4)]
        >>> documents = datasets.Dataset.from_list(rows).to_iterable_dataset()
        >>> stream = PackedStream(documents, StreamSettings(capacity=4))
        >>> [[len(document["input_ids"]) for document in batch] for batch, _, _ in stream]
        [[4], [3, 1], [2]]
    """

    documents: datasets.IterableDataset
    settings: StreamSettings
    rank: int = 0
    epoch: int = 0
    place: Place = _START
    limits: ModelLimits = NO_LIMITS

    def __post_init__(self) -> None:
        if self.settings.num_ranks > 1 and getattr(self.documents, "_distributed", None):
            raise ValueError(
                "the stream is divided among ranks already (split_dataset_by_node); pass the whole "
                "stream to every rank"
            )

    def __iter__(self) -> Iterator[tuple[list[Document], Place, PreparationCounts]]:
        windows = self._windows()
        skipped = self.place.taken
        while windows.documents:
            place = json.dumps(windows.begin(), default=lambda number: number.tolist())  # of NumPy
            batches = self._batches(windows.documents, windows.number)
            windows.next()
            for taken, batch in enumerate(batches, start=1):
                # Read the next window little by little; at once, it would stall the training.
                windows.read_up_to(taken / len(batches))
                if taken > skipped:
                    yield batch, Place(place, taken), take_counts(self.documents)
            skipped = 0

    def _windows(self) -> "Windows":
        """Return the windows from `place` on, of which the first is read."""
        begin: dict[str, Any] = {"number": 0, "documents": 0, "state": None, "checksum": None}
        begin |= json.loads(self.place.window or "{}")
        # Streams that shuffle lose their buffer (datasets 5.2), and other streams have no state:
        # their documents are read again from the start of the epoch.
        for state in [begin["state"], None] if begin["state"] else [None]:
            windows = Windows(self, begin, state)
            windows.read_up_to(1.0)
            if begin["checksum"] in (None, windows.begin()["checksum"]):
                return windows
        raise ValueError(
            f"after {begin['documents']} documents, the stream continues with other documents than "
            "when the checkpoint was saved; resume with the same data and seeds, or set "
            "ignore_data_skip=True to restart the stream"
        )

    def _batches(self, documents: list[Document], window: int) -> list[list[Document]]:
        settings, capacity = self.settings, self.settings.capacity
        size = settings.bins_per_batch
        if capacity is None:
            return [documents[start : start + size] for start in range(0, len(documents), size)]
        lengths = np.array([max(1, len(document["input_ids"])) for document in documents])
        pack_all: Any = partial(pack, lengths)
        if settings.prefix_group_size is not None:
            index = PrefixIndex.of_loaded(documents)
            pack_all = group_documents(index, lengths, capacity, settings.prefix_group_size).pack
        seed = None
        if settings.seed is not None:
            seed = [settings.seed, self.epoch, self.rank, window]
        bins = list(pack_all(capacity, settings.strategy, seed))
        if seed is not None:
            order = np.random.default_rng([*seed, 1]).permutation(len(bins))
            bins = [bins[i] for i in order]
        # All of about equal size; otherwise every window would end with a small micro-batch.
        number = -(-len(bins) // size)
        cuts = np.linspace(0, len(bins), number + 1).astype(int).tolist()
        return [
            [documents[i] for packed in bins[start:stop] for i in packed]
            for start, stop in pairwise(cuts)
        ]


class Windows:
    """The documents of one rank, one window of them after the other.

    Attributes:
        documents: of the window that is read.
        number: of that window.
    """

    def __init__(self, stream: PackedStream, begin: dict[str, Any], state: Any):
        """Read from `state` on; without one, read and skip the documents before `begin`."""
        self._stream = stream
        ranks = stream.settings.num_ranks
        packs = stream.settings.capacity is not None
        self._part = part_of_rank(stream.documents, ranks, stream.rank, packs=packs)
        self._part.set_epoch(stream.epoch)
        self.number = begin["number"] - 1
        self._num_read = begin["documents"]
        if state is not None:
            self._part.load_state_dict(state)
        skipped = 0 if state is not None else self._num_read
        self._documents = islice(self._part, skipped, None)
        self.next()
        self._state = begin["state"]

    def next(self) -> None:
        """Begin the next window."""
        self._state = self._part.state_dict() if self._num_read else None
        self.number += 1
        self._num_before = self._num_read
        self.documents: list[Document] = []
        self._size = 0

    def read_up_to(self, share: float) -> None:
        """Read documents until this share of the window is full, or the stream ends."""
        settings = self._stream.settings
        full = settings.bins_per_batch * _WINDOW_BATCHES  # documents, or else tokens
        if settings.capacity is not None:
            full = settings.capacity * settings.window_bins
        while self._size < share * full and (found := next(self._documents, None)) is not None:
            # A list of Python integers takes five times the memory; the collator needs an array.
            document = {k: np.asarray(x) if isinstance(x, list) else x for k, x in found.items()}
            where = f"document {self._num_read} of the stream"
            self._stream.limits.check_document(document, where)
            self._num_read += 1
            self.documents.append(document)
            self._size += 1 if settings.capacity is None else max(1, len(document["input_ids"]))

    def begin(self) -> dict[str, Any]:
        """Return where the window begins in the stream, and a checksum of all its tokens."""
        checksum = 0
        for document in self.documents:
            checksum = zlib.crc32(np.asarray(document["input_ids"]).tobytes(), checksum)
        place = {"number": self.number, "documents": self._num_before, "state": self._state}
        return place | {"checksum": checksum}


# Stages of `datasets` (5.2) that treat a shard alone as they treat it in the whole stream.
_SHARD_BY_SHARD = {
    "ArrowExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "ExamplesIterable",
    "BufferShuffledExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "MappedExamplesIterable",
    "SelectColumnsIterable",
    "InterleavedShardsExamplesIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}


def num_shards(documents: datasets.IterableDataset) -> int:
    """Return the number of shards of a stream, 1 if its shards, read alone, are not all of it.

    They are not after `take`, `skip`, `interleave_datasets`, or a function of row numbers.
    """
    for step in steps_of(documents):
        # Functions of this package use row numbers in messages only.
        module = getattr(getattr(step, "function", None), "__module__", "")
        is_numbered = getattr(step, "with_indices", False) and not module.startswith("trl_packing.")
        drops = getattr(step, "drop_last_batch", False)
        if type(step).__name__ not in _SHARD_BY_SHARD or is_numbered or drops:
            return 1
    return documents.num_shards


def part_of_rank(
    documents: datasets.IterableDataset, num_ranks: int, rank: int, *, packs: bool
) -> datasets.IterableDataset:
    """Return the documents that a rank reads; loading a state does not change `documents`.

    A rank that `packs` reads shards from all over the stream, since files are often sorted; else
    neighboring ones, as in a padded run.
    """
    if num_shards(documents) % num_ranks == 0:
        return documents.shard(num_ranks, rank, contiguous=not packs)
    turn = partial(_is_turn_of, num_ranks=num_ranks, rank=rank)
    return documents.filter(turn, with_indices=True)


def _is_turn_of(document: Document, number: int, *, num_ranks: int, rank: int) -> bool:
    return number % num_ranks == rank
