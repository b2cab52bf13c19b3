"""Packing an `IterableDataset` as it is read, a window of documents at a time.

    documents ──► a window: tokens for `window_bins` bins ──► best fit ──► random order ──► bins
                  while they leave, the next window is read

A window is packed as a whole data set is, so its bins are full, and they leave in random order: a
file sorted by length or source does not make sorted steps. It also is what a position is made of:
where the window began in the stream, and how many micro-batches of it are gone.

A reader reads shards of its own rank, or, where shards do not divide among ranks, what every rank
reads; micro-batch m then belongs to rank m mod ranks. So no document is lost or repeated. Ranks may
end at different times: `stream_batches` keeps them in step.

Windows of a stream: documents that are packed together, and how to find them again.

stream    d0 d1 d2 d3 │ d4 d5 d6 │ d7 …
windows   number 0      number 1   number 2, begins at a state of the stream, behind 7 documents
"""

import json
import zlib
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any, NamedTuple

import datasets
import numpy as np
from torch.utils.data import IterableDataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.model_limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import Document, check_lengths, take_counts
from trl_packing.documents.labels import SEQ_LENGTHS, TOKEN_WEIGHTS
from trl_packing.documents.weights import document_weight, token_weights
from trl_packing.packing.bins import pack
from trl_packing.streaming.shards import ShardAssignment, assign_shards


class Source:
    """The documents of a part, in order, with a place to come back to.

    part: an iterable of documents.
    state: what `place` returned; reading goes on behind it.
    skipped: documents to leave out first, for a part that does not know its place.

    limits: what the model can read.

    Raises ValueError, when read, if a document is longer than `capacity` or beyond `limits`.
    """

    def __init__(
        self,
        part: Any,
        capacity: int | None,
        state: Any = None,
        skipped: int = 0,
        limits: ModelLimits = NO_LIMITS,
    ):
        self._part = part
        self._limits = limits
        self._capacity = capacity
        self.num_read = skipped
        if state is not None:
            self._part.load_state_dict(state)
        self._documents = iter(self._part)
        if state is None:
            for _ in zip(range(skipped), self._documents, strict=False):
                pass

    def place(self) -> Any:
        """Return the state behind the last document, None if the part does not know it."""
        if not isinstance(self._part, datasets.IterableDataset) or not self.num_read:
            return None
        return self._part.state_dict()

    def size_of(self, document: Document) -> int:
        """Return its tokens, or 1 if documents are not packed."""
        return 1 if self._capacity is None else max(1, len(document["input_ids"]))

    def next(self) -> Document | None:
        """Return the next document, None at the end."""
        document = next(self._documents, None)
        if document is None:
            return None
        length = len(document["input_ids"])
        if self._capacity is not None and length > self._capacity:
            raise ValueError(
                f"document {self.num_read} of the stream has {length} tokens but capacity is "
                f"{self._capacity}; raise max_length or set overflow='truncate' or 'drop'"
            )
        check_weights(document, f"document {self.num_read} of the stream")
        check_lengths(document, self.num_read)
        document = {name: _compact(value) for name, value in document.items()}
        self._limits.check_document(document, f"document {self.num_read} of the stream")
        self.num_read += 1
        return document


def check_weights(document: Document, which: str) -> None:
    """Raise ValueError, naming the document, if it has weights that cannot be: null ones, too."""
    document_weight(document, which)
    if TOKEN_WEIGHTS in document:
        try:
            token_weights(document, len(document["input_ids"]))
        except ValueError as problem:
            raise ValueError(f"{which}: {problem}") from None


class Window:
    """Documents of `source` up to a size, in tokens if it has a capacity, else in documents.

    number, num_batches_before: windows, and micro-batches of them, before this one.
    """

    def __init__(self, source: Source, full: int, number: int = 0, num_batches_before: int = 0):
        self.number = number
        self.num_batches_before = num_batches_before
        self.documents: list[Document] = []
        self._num_documents_before = source.num_read
        self._state = source.place()
        self._source = source
        self._full = full
        self._size = 0

    def following(self) -> "Window":
        """Return the window behind this one, empty so far; set its `num_batches_before`."""
        return Window(self._source, self._full, self.number + 1)

    def beginning_at(self, state: Any) -> "Window":
        """Return this window, whose place is at `state` of the stream."""
        self._state = state
        return self

    def read_up_to(self, share: float) -> "Window":
        """Read until this share of the window is there, or the stream ends."""
        while self._size < share * self._full:
            document = self._source.next()
            if document is None:
                break
            self.documents.append(document)
            self._size += self._source.size_of(document)
        return self

    def checksum(self) -> int:
        value = 0
        for document in self.documents:
            value = zlib.crc32(np.asarray(document["input_ids"]).tobytes(), value)
        return value

    def place(self) -> str:
        """Return where the window begins, in JSON (`streaming.Place`)."""
        begin = {
            "number": self.number,
            "documents": self._num_documents_before,
            "batches": self.num_batches_before,
            "state": self._state,
            "checksum": self.checksum(),
        }
        return json.dumps(begin, default=_plain)


def _compact(value: Any) -> Any:
    # A list of Python integers takes five times the memory, and the collator wants an array anyway.
    return np.asarray(value) if isinstance(value, list) else value


def _plain(value: Any) -> Any:
    """Return a NumPy number or array of a stream's state as JSON knows it."""
    return value.tolist()


_WINDOW_DOCUMENTS = 64  # micro-batches' worth, where documents are not packed


@dataclass(frozen=True)
class StreamSettings:
    """What decides which documents of a stream meet in a micro-batch.

    capacity: tokens a bin may hold; None groups documents in their order, without packing.
    bins_per_batch: bins (documents, if capacity is None) of a micro-batch.
    num_ranks: data-parallel ranks.
    strategy: as in `packing.pack`, or "wrapped": in their order, whatever the seed.
    seed: None keeps bins in the order in which they are packed.
    window_bins: bins that are packed together; more of them fill better and shuffle wider.
    """

    capacity: int | None
    bins_per_batch: int = 1
    num_ranks: int = 1
    strategy: str = "bfd"
    seed: int | None = None
    window_bins: int = 256


class Place(NamedTuple):
    """A place between two micro-batches of a reader.

    window: where their window began, in JSON: its number, the documents and micro-batches before
        it, the state of the stream there, and a checksum of its documents. None: at the start.
    taken: micro-batches of the window, of all ranks, up to here.
    """

    window: str | None = None
    taken: int = 0


class PackedStream(IterableDataset):
    """Micro-batches of one reader of one rank, each with what it takes to go on behind it.

    They are triples (documents, place, counts): the place behind them, and what preparation has
    read and lost since the triple before, which is ahead of the documents by up to two windows.

    documents: the whole stream; tokens come out as NumPy arrays.
    division: what is this reader's, by default all shards for every rank.
    epoch, place: where reading starts.
    limits: what the model can read.

    Raises ValueError for a stream that was divided among ranks before; and, when read, for a
    document longer than `capacity` or beyond `limits`, and if other documents than before lead to
    `place`.

    >>> documents = [{"input_ids": [0] * length} for length in (3, 2, 1, 4)]
    >>> stream = PackedStream(documents, StreamSettings(capacity=4))
    >>> [[len(document["input_ids"]) for document in batch] for batch, _, _ in stream]
    [[4], [3, 1], [2]]
    """

    def __init__(
        self,
        documents: Iterable[Document],
        settings: StreamSettings,
        *,
        rank: int = 0,
        reader: int = 0,
        division: ShardAssignment | None = None,
        epoch: int = 0,
        place: Place | None = None,
        limits: ModelLimits = NO_LIMITS,
    ):
        if settings.num_ranks > 1 and getattr(documents, "_distributed", None) is not None:
            raise ValueError(
                "the stream is divided among ranks already (split_dataset_by_node), and dividing "
                "it again would lose documents; pass the whole stream to every rank"
            )
        self.documents = documents
        self.settings = settings
        self.rank = rank
        self.reader = reader
        self.division = division or assign_shards(
            documents, settings.num_ranks, 1, packs=settings.capacity is not None
        )
        self.epoch = epoch
        self.place = place or Place()
        self.limits = limits

    def __iter__(self) -> Iterator[tuple[list[Document], Place, PreparationCounts]]:
        window = self._first_window()
        number = window.num_batches_before
        taken, skipped = 0, self.place.taken
        while window.documents:
            following = window.following()
            batches = self._batches(window)
            place = window.place()
            for taken, batch in enumerate(batches, start=1):
                # Read on evenly: reading a window at once would keep the device waiting.
                following.read_up_to(taken / len(batches))
                if taken > skipped and self._is_own(number):
                    yield batch, Place(place, taken), take_counts(self.documents)
                number += 1
            following.num_batches_before = number
            window, skipped = following, 0

    def _is_own(self, number: int) -> bool:
        return self.division.by_rank or number % self.settings.num_ranks == self.rank

    def _source(self, state: Any = None, skipped: int = 0) -> Source:
        part = self.division.part(self.documents, self.settings.num_ranks, self.rank, self.reader)
        if isinstance(part, datasets.IterableDataset):
            part.set_epoch(self.epoch)
        return Source(part, self.settings.capacity, state, skipped, self.limits)

    @property
    def _full(self) -> int:
        """Return the size of a window: tokens, or documents if they are not packed."""
        if self.settings.capacity is None:
            return self.settings.bins_per_batch * _WINDOW_DOCUMENTS
        return self.settings.capacity * self.settings.window_bins

    # --- windows ----------------------------------------------------------------------------------

    def _first_window(self) -> Window:
        if self.place.window is None:
            return Window(self._source(), self._full).read_up_to(1.0)
        begin = json.loads(self.place.window)
        # Streams that shuffle forget what waited in their buffer (datasets 5.2), and others have no
        # state: their documents are read again from the start of the epoch.
        for state in [begin["state"], None] if begin["state"] else [None]:
            try:
                source = self._source(state, begin["documents"])
                window = Window(source, self._full, begin["number"], begin["batches"])
                window.read_up_to(1.0)
            except (AttributeError, IndexError, KeyError, TypeError):
                if state is None:
                    raise
                continue  # the state of a stream that is made in another way
            if window.checksum() == begin["checksum"]:
                return window.beginning_at(begin["state"])
        raise ValueError(
            f"after {begin['documents']} documents the stream has other ones than when the "
            "checkpoint was saved, so its place is lost; resume with the same data, seeds and "
            "dataloader_num_workers, or set ignore_data_skip=True to begin the stream anew"
        )

    def _batches(self, window: Window) -> list[list[Document]]:
        settings, documents = self.settings, window.documents
        size = settings.bins_per_batch
        if settings.capacity is None:
            return [documents[i : i + size] for i in range(0, len(documents), size)]
        bins = self._bins(window)
        # Of about equal size, instead of a small one at the end of every window.
        bounds = np.linspace(0, len(bins), -(-len(bins) // size) + 1).astype(int).tolist()
        return [
            [documents[i] for packed in bins[start:stop] for i in packed]
            for start, stop in pairwise(bounds)
        ]

    def _bins(self, window: Window) -> list[list[int]]:
        """Return the documents of each bin; a row that has `seq_lengths` is a bin already."""
        settings, documents = self.settings, window.documents
        assert settings.capacity is not None
        seed = self._seed(window)
        rows = [i for i, d in enumerate(documents) if d.get(SEQ_LENGTHS) is not None]
        loose = np.setdiff1d(np.arange(len(documents)), rows)
        bins = [[i] for i in rows]
        if len(loose):
            lengths = [max(1, len(documents[i]["input_ids"])) for i in loose]
            plan = pack(lengths, settings.capacity, settings.strategy, seed)
            bins += [loose[packed].tolist() for packed in plan]
        if seed is None:
            return bins
        return [bins[i] for i in np.random.default_rng([*seed, 1]).permutation(len(bins))]

    def _seed(self, window: Window) -> list[int] | None:
        if self.settings.seed is None:
            return None
        # What all ranks read, they must pack alike.
        of_rank = self.rank if self.division.by_rank else 0
        return [self.settings.seed, self.epoch, of_rank, self.reader, window.number]
