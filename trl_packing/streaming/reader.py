"""Pack an `IterableDataset` while it is read, one window of documents at a time.

    documents ──► a window: tokens for `window_bins` bins ──► best fit ──► random order ──► bins
                  while these bins leave, the next window is read

A window is packed like a whole data set, so its bins are full. They leave in random order, so a
file sorted by length or source does not make sorted steps. A saved position consists of the place
where the window begins in the stream, and the number of its micro-batches that are gone.

A rank reads shards of its own if each rank gets equally many; else document n belongs to rank n mod
ranks. No document is lost or repeated either way. Ranks may end at different
times; `loader.py` keeps them in step.
"""

import json
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import islice, pairwise
from typing import Any, NamedTuple

import datasets
import numpy as np
from torch.utils.data import IterableDataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import Document, steps_of, take_counts
from trl_packing.documents.labels import SEQ_LENGTHS
from trl_packing.packing.bins import pack
from trl_packing.packing.prefix_groups import PrefixGroups, group_documents, keep_groups_together
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.streaming.windows import DocumentSource, Window

_WINDOW_BATCHES = 64  # size of a window in micro-batches, if documents are not packed


@dataclass(frozen=True)
class StreamSettings:
    """The settings that decide which documents of a stream share a micro-batch.

    Attributes:
        capacity: tokens that a bin may hold; None groups documents in order, without packing.
        bins_per_batch: bins (documents, if capacity is None) in a micro-batch.
        num_ranks: data-parallel ranks.
        strategy: as in `packing.pack`.
        seed: as in `packing.pack`; None also keeps the order of bins.
        window_bins: bins that are packed together. More bins are filled better and shuffled more
            widely, and take more memory.
        prefix_group_size: most documents of a group with a common prefix, which shares a
            micro-batch; groups are found within a window. None draws single documents.
        mixture: the shares of several streams that are read as one, as text; None for one stream.
    """

    capacity: int | None
    bins_per_batch: int = 1
    num_ranks: int = 1
    strategy: str = "bfd"
    seed: int | None = None
    window_bins: int = 256
    prefix_group_size: int | None = None
    mixture: str | None = None


class Place(NamedTuple):
    """A place between two micro-batches of a rank.

    Attributes:
        window: start of the current window, in JSON: its number, the documents before it, the state
            of the stream there, and a checksum of its documents. None is the start of the stream.
        taken: micro-batches of the window before this place.
    """

    window: str | None = None
    taken: int = 0


class PackedStream(IterableDataset):
    """The micro-batches of one rank, each with the place behind it.

    They are triples of documents (their tokens as NumPy arrays), the place behind these documents,
    and the counts of what preparation has read and lost since the triple before. Counts are up to
    two windows ahead of the documents.

    Args:
        documents: the whole stream.
        settings: decide which documents share a micro-batch.
        rank: the rank that reads.
        epoch: epoch in which reading starts.
        place: place in the epoch at which reading starts.
        limits: limits of the model.

    Raises:
        ValueError: the stream was divided among ranks before. While reading: a document is longer
            than `capacity` or exceeds `limits`, or the documents before `place` are not those that
            were there when the place was saved.

    Examples:
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
        self.epoch = epoch
        self.place = place or Place()
        self.limits = limits

    def __iter__(self) -> Iterator[tuple[list[Document], Place, PreparationCounts]]:
        window = self._first_window()
        skipped = self.place.taken
        while window.documents:
            next_window = window.next()
            batches = self._batches(window)
            place = window.place()
            for taken, batch in enumerate(batches, start=1):
                # Read the next window little by little; at once, it would stall the training.
                next_window.read_up_to(taken / len(batches))
                if taken > skipped:
                    yield batch, Place(place, taken), take_counts(self.documents)
            window, skipped = next_window, 0

    def _source(self, state: Any = None, skipped: int = 0) -> DocumentSource:
        settings = self.settings
        packs = settings.capacity is not None
        part = part_of_rank(self.documents, settings.num_ranks, self.rank, packs=packs)
        if isinstance(part, datasets.IterableDataset):
            part.set_epoch(self.epoch)
        return DocumentSource(part, settings.capacity, state, skipped, self.limits)

    @property
    def _window_size(self) -> int:
        """Return the size of a window: tokens, or documents if they are not packed."""
        if self.settings.capacity is None:
            return self.settings.bins_per_batch * _WINDOW_BATCHES
        return self.settings.capacity * self.settings.window_bins

    # --- windows ----------------------------------------------------------------------------------

    def _first_window(self) -> Window:
        if self.place.window is None:
            return Window(self._source(), self._window_size).read_up_to(1.0)
        begin = json.loads(self.place.window)
        # Streams that shuffle lose their buffer (datasets 5.2), and other streams have no state:
        # their documents are read again from the start of the epoch.
        for state in [begin["state"], None] if begin["state"] else [None]:
            try:
                source = self._source(state, begin["documents"])
                window = Window(source, self._window_size, begin["number"])
                window.read_up_to(1.0)
            except (AttributeError, IndexError, KeyError, TypeError):
                if state is None:
                    raise
                continue  # the state of a stream that was built differently
            if window.checksum() == begin["checksum"]:
                return window.beginning_at(begin["state"])
        raise ValueError(
            f"after {begin['documents']} documents, the stream continues with other documents than "
            "when the checkpoint was saved, so the position is lost; resume with the same data, "
            "seeds and dataloader_num_workers, or set ignore_data_skip=True to restart the stream"
        )

    def _batches(self, window: Window) -> list[list[Document]]:
        settings, documents = self.settings, window.documents
        size = settings.bins_per_batch
        if settings.capacity is None:
            order = np.arange(len(documents))
            if settings.prefix_group_size is not None:
                groups = self._groups(documents, settings.prefix_group_size)
                order = keep_groups_together(order, groups, size)
            return [
                [documents[i] for i in order[start : start + size]]
                for start in range(0, len(documents), size)
            ]
        bins = self._bins(window)
        # All of about equal size; otherwise every window would end with a small micro-batch.
        bounds = np.linspace(0, len(bins), -(-len(bins) // size) + 1).astype(int).tolist()
        return [
            [documents[i] for packed in bins[start:stop] for i in packed]
            for start, stop in pairwise(bounds)
        ]

    def _bins(self, window: Window) -> list[list[int]]:
        """Return the documents of each bin; a row with `seq_lengths` already is a bin."""
        settings, documents = self.settings, window.documents
        assert settings.capacity is not None
        seed = self._seed(window)
        rows = [i for i, d in enumerate(documents) if d.get(SEQ_LENGTHS) is not None]
        loose = np.setdiff1d(np.arange(len(documents)), rows)
        bins = [[i] for i in rows]
        if len(loose):
            lengths = [max(1, len(documents[i]["input_ids"])) for i in loose]
            if settings.prefix_group_size is None:
                plan = pack(lengths, settings.capacity, settings.strategy, seed)
            else:
                groups = self._groups([documents[i] for i in loose], settings.prefix_group_size)
                plan = groups.pack(settings.capacity, settings.strategy, seed)
            bins += [loose[packed].tolist() for packed in plan]
        if seed is None:
            return bins
        return [bins[i] for i in np.random.default_rng([*seed, 1]).permutation(len(bins))]

    def _groups(self, documents: list[Document], most: int) -> PrefixGroups:
        if any(document.get(SEQ_LENGTHS) is not None for document in documents):
            raise ValueError(
                "prefix_sharing='group' cannot regroup rows that were packed before (they have "
                f"{SEQ_LENGTHS}); set prefix_sharing='bin', or pass the documents"
            )
        index = PrefixIndex.of_loaded(documents)
        lengths = np.array([max(1, len(document["input_ids"])) for document in documents])
        return group_documents(index, lengths, self.settings.capacity, most)

    def _seed(self, window: Window) -> list[int] | None:
        if self.settings.seed is None:
            return None
        return [self.settings.seed, self.epoch, self.rank, window.number]


# Stages of `datasets` (5.2) that treat a shard alone as they treat it in the whole stream.
_SHARD_BY_SHARD = {
    "ArrowExamplesIterable",
    "BufferShuffledExamplesIterable",
    "ExamplesIterable",
    "FilteredExamplesIterable",
    "FormattedExamplesIterable",
    "InterleavedShardsExamplesIterable",
    "MappedExamplesIterable",
    "RebatchedArrowExamplesIterable",
    "SelectColumnsIterable",
    "VerticallyConcatenatedMultiSourcesExamplesIterable",
}


def num_shards(documents: Iterable[Document]) -> int:
    """Return the number of shards of a stream, 1 if its shards, read separately, are not all of it.

    They are not after `take`, `skip`, `interleave_datasets`, or a function that receives row
    numbers.
    """
    steps = list(steps_of(documents))
    if all(
        type(step).__name__ in _SHARD_BY_SHARD
        and not getattr(step, "drop_last_batch", False)
        and not _receives_row_numbers(step)
        for step in steps
    ):
        return documents.num_shards  # type: ignore[attr-defined]
    return 1


def _receives_row_numbers(step: Any) -> bool:
    # Functions of this package use row numbers in messages only.
    module = getattr(getattr(step, "function", None), "__module__", "")
    return getattr(step, "with_indices", False) and not module.startswith("trl_packing.")


def part_of_rank(documents: Iterable[Document], num_ranks: int, rank: int, *, packs: bool) -> Any:
    """Return the documents that a rank reads; loading a state does not change `documents`.

    Args:
        documents: the whole stream.
        num_ranks: data-parallel ranks.
        rank: the rank that reads.
        packs: Documents are packed. Every rank then reads shards from all over the stream, since
            files are often sorted by source or length. If False, ranks read neighboring shards,
            the same as in a padded run.
    """
    if not isinstance(documents, datasets.IterableDataset):
        return islice(documents, rank, None, num_ranks)
    if num_shards(documents) % num_ranks == 0:
        return documents.shard(num_ranks, rank, contiguous=not packs)
    return documents.filter(_OfRank(num_ranks, rank), with_indices=True)


@dataclass(frozen=True)
class _OfRank:
    num_ranks: int
    rank: int

    def __call__(self, document: Document, number: int) -> bool:
        return number % self.num_ranks == self.rank
