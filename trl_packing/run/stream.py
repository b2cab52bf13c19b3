"""Pack an `IterableDataset` while it is read, one window of documents at a time, in whole steps.

    documents ──► a window: tokens for `window_bins` bins ──► best fit ──► random order ──► bins
                  while these bins leave, the next window is read

A position is the place where the window begins in the stream, and the number of its micro-batches
that are gone. A rank reads shards of its own if all get equally many; else document n belongs to
rank n mod ranks.

    documents    a0 a1 a2 │ a3       rank 0, accumulation 2    step   a0 a1   a2 a3
                 b0 b1               rank 1                           b0 b1   -- --

Before every optimizer step, the ranks agree on whether any of them has documents left; one without
continues with empty micro-batches, a masked token each. So all end with the same step, which is
complete: `Trainer` would add the gradient of another to the next epoch (transformers 5.23).
"""

import json
import zlib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from itertools import count, islice, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import datasets
import numpy as np
import torch
from torch.utils.data import DataLoader, IterableDataset

from trl_packing.attention.ranks import all_reduce_max, gather_objects
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import NOTHING_TO_TRAIN, Document, steps_of, take_counts
from trl_packing.documents.labels import SOURCE, SOURCE_IDS
from trl_packing.packing.bins import pack
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex

Position = dict[str, Any]  # where a window begins, or where a rank goes on, as JSON

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
        begin: Position = {"number": 0, "documents": 0, "state": None, "checksum": None}
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
        batches = []
        for start, stop in pairwise(cuts):
            batches.append([documents[i] for packed in bins[start:stop] for i in packed])
        return batches


class Windows:
    """The documents of one rank, one window of them after the other.

    Attributes:
        documents: of the window that is read.
        number: of that window.
    """

    def __init__(self, stream: PackedStream, begin: Position, state: Any):
        """Read from `state` on; without one, read and skip the documents before `begin`."""
        self._stream = stream
        settings = stream.settings
        self._part = part_of_rank(
            stream.documents,
            settings.num_ranks,
            stream.rank,
            packs=settings.capacity is not None,
        )
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
            self._stream.limits.check_document(document, f"document {self._num_read} of the stream")
            self._num_read += 1
            self.documents.append(document)
            self._size += 1 if settings.capacity is None else max(1, len(document["input_ids"]))

    def begin(self) -> Position:
        """Return where the window begins in the stream, and a checksum of all its tokens."""
        checksum = 0
        for document in self.documents:
            checksum = zlib.crc32(np.asarray(document["input_ids"]).tobytes(), checksum)
        return {
            "number": self.number,
            "documents": self._num_before,
            "state": self._state,
            "checksum": checksum,
        }


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


_ENDED, _GOES_ON, _FAILED = 0, 1, 2
_KEPT_POSITIONS = 4  # the dataloader is at most one step ahead of the training


@dataclass(eq=False, repr=False)
class StreamBatches(IterableDataset):
    """Collated micro-batches of one rank, epoch by epoch, with a position to save and load.

    Raises:
        ValueError: while reading, the stream has no documents, or a document is longer than
            `capacity` or exceeds `limits`; or the stream was divided among ranks before.
        RuntimeError: while reading, another rank has failed.
    """

    documents: datasets.IterableDataset
    settings: StreamSettings
    collate: Callable[[list[Document]], Any]
    _: KW_ONLY
    rank: int = 0
    accumulation: int = 1
    num_workers: int = 0  # 0 reads in this process, more in one dataloader worker
    global_step: Callable[[], int] = lambda: 0  # positions are stored by it
    agree: Callable[[int], int] = all_reduce_max  # the largest of the values that ranks pass
    loading: Mapping[str, Any] = field(default_factory=dict)  # arguments of the dataloader
    limits: ModelLimits = NO_LIMITS
    sources: Sequence[str] | None = None  # names of streams that were joined

    def __post_init__(self) -> None:
        self.epoch = 0
        self.counts = PreparationCounts()  # of everything this rank has read, also before resuming
        self._positions: dict[int, Position] = {}
        self._resumed: Position | None = None

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by `epoch` from now on, and pass it to a stream that shuffles by itself."""
        self.epoch = epoch
        self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of an epoch, or those behind a loaded position.

        Empty dictionaries come before these, which accelerate's `skip_first_batches` discards.
        """
        position = self._resumed or {"steps": 0, "place": ()}
        self._resumed = None
        first = self.global_step()
        before = position["steps"]
        place = Place(*position["place"])
        if before:
            self._positions[first] = position
            yield from ({} for _ in range(before * self.accumulation))
        take_counts(self.documents)  # discard what others have read, such as the isolation check
        micro_batches = iter(self._reader(place))
        for number in count(1):
            batches: list[Any] = []
            try:
                for batch, behind, counts in islice(micro_batches, self.accumulation):
                    place = behind
                    self.counts += counts
                    batches.append(batch)
            except Exception:
                self.agree(_FAILED)
                raise
            agreed = self.agree(_GOES_ON if batches else _ENDED)
            if agreed == _FAILED:
                raise RuntimeError("another rank cannot read its part of the stream; see its error")
            if agreed == _ENDED:
                break
            self._positions[first + number] = {
                "epoch": self.epoch,
                "steps": before + number,
                "place": place,
            }
            self._positions.pop(first + number - _KEPT_POSITIONS, None)
            yield from batches
            yield from (self.collate([]) for _ in range(self.accumulation - len(batches)))
        if before + number == 1:
            raise ValueError(NOTHING_TO_TRAIN)

    def _reader(self, place: Place) -> DataLoader:
        """Return a dataloader of micro-batches, each with the place behind it, and counts."""
        seed = hash((self.settings.seed or 0, self.epoch, self.rank)) % 2**63
        return DataLoader(
            PackedStream(self.documents, self.settings, self.rank, self.epoch, place, self.limits),
            batch_size=None,
            collate_fn=partial(_collated, collate=self.collate, sources=self.sources),
            num_workers=min(self.num_workers, 1),
            # Without a generator, the reader would draw from the training's random numbers.
            generator=torch.Generator().manual_seed(seed),
            **self.loading,
        )

    def counts_of_all_ranks(self) -> PreparationCounts:
        """Return the counts of everything read so far, each document once; a call of all ranks."""
        # Tensor-parallel ranks read the same documents.
        ranks = dict(gather_objects((self.rank, self.counts))).values()
        if num_shards(self.documents) % self.settings.num_ranks == 0:
            return sum(ranks, PreparationCounts())
        return max(ranks, key=lambda counts: counts.before.documents)  # all read everything

    # --- positions --------------------------------------------------------------------------------

    def save(self, path: Path) -> None:
        """Write the position behind the optimizer steps taken so far."""
        path.write_text(json.dumps(self._identity() | self._positions[self.global_step()]))

    def load(self, path: Path) -> tuple[int, int]:
        """Continue at the position in `path`; return its epoch and the steps in that epoch.

        Raises:
            ValueError: a rank has no such file, or the position was saved with other settings.
        """
        found = json.loads(path.read_text()) if path.is_file() else {}
        if self.agree(int("place" not in found)):
            raise ValueError(
                f"{path.parent} has no position of the stream for every rank, so the "
                "documents left are unknown; set ignore_data_skip=True to restart the stream"
            )
        for name, value in self._identity().items():
            if found.get(name) != value:
                raise ValueError(
                    f"the checkpoint was saved with a stream of {name}={found.get(name)}, and now "
                    f"it is {value}; resume with the former, or set ignore_data_skip=True"
                )
        self._resumed = found
        return found["epoch"], found["steps"]

    def _identity(self) -> dict[str, Any]:
        return {
            **asdict(self.settings),
            "rank": self.rank,
            "num_shards": num_shards(self.documents),
        }


def _collated(
    triple: Any, collate: Callable[[list[Document]], Any], sources: Sequence[str] | None
) -> tuple[Any, Place, PreparationCounts]:
    """Collate the documents of a triple in the worker, with the numbers of their sources."""
    documents, place, counts = triple
    if sources is not None:
        documents = [dict(document) for document in documents]
        for document in documents:
            document[SOURCE_IDS] = list(sources).index(str(document.pop(SOURCE)))
    return collate(documents), place, counts
