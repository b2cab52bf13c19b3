"""Packing an `IterableDataset` as it is read, with a bounded number of open bins.

    document ──► the tightest open bin that it fits ──► a bin that is full enough leaves
                 (none fits and all are open: the fullest bin leaves and a new one opens)

Every rank reads the same stream and packs it the same way; micro-batch m belongs to rank
m mod ranks. So no document is lost or repeated, and all ranks have equally many micro-batches,
without communication. A dataloader worker does the same with the shards that it reads.
"""

from bisect import bisect_left
from collections.abc import Iterable, Iterator
from typing import Any

import datasets
from torch.utils.data import IterableDataset, get_worker_info

Document = dict[str, Any]


class PackedStream(IterableDataset):
    """Micro-batches (lists of documents) of one rank, from an iterable of documents.

    capacity: tokens a bin may hold; None groups documents without packing.
    bins_per_batch: bins (documents, if capacity is None) of a micro-batch.
    num_ranks, rank, accumulation: data-parallel ranks, which one this is, micro-batches of a step.
    open_bins: bins kept open while packing; more of them fill better and delay documents longer.

    The last step is completed with empty micro-batches, which `PackedCollator` turns into masked
    tokens: ranks stay in step, and no gradient is left over for the next epoch's first step (which
    `Trainer` would add it to, since it does not know where a stream ends; transformers 5.23).

    Raises ValueError for a stream that was divided among ranks before, and, when read, for one
    without documents.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        capacity: int | None,
        *,
        bins_per_batch: int = 1,
        num_ranks: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        open_bins: int = 256,
    ):
        if num_ranks > 1 and getattr(documents, "_distributed", None) is not None:
            raise ValueError(
                "the stream is divided among ranks already (split_dataset_by_node), and dividing "
                "it again would lose documents; pass the whole stream to every rank"
            )
        self.documents = documents
        self.capacity = capacity
        self.bins_per_batch = bins_per_batch
        self.num_ranks = num_ranks
        self.rank = rank
        self.accumulation = accumulation
        self.open_bins = open_bins

    def set_epoch(self, epoch: int) -> None:
        """Pass the epoch on to a stream that shuffles by it."""
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[list[Document]]:
        worker = get_worker_info()
        num_workers, worker_id = (worker.num_workers, worker.id) if worker else (1, 0)
        if isinstance(self.documents, datasets.IterableDataset):
            # It reads a part of its shards in each worker by itself, the same part on every rank.
            num_workers, worker_id = 1, 0
        number = -1
        for number, batch in enumerate(self._micro_batches()):
            turn, rank = divmod(number, self.num_ranks)
            if rank == self.rank and turn % num_workers == worker_id:
                yield batch
        if number < 0 and worker is None:
            raise ValueError(
                "the stream has no documents left to train on; check its source, max_length and "
                "the completion or assistant masks"
            )

    def _micro_batches(self) -> Iterator[list[Document]]:
        bins = pack_stream(self.documents, self.capacity, self.open_bins)
        batch: list[Document] = []
        size = count = 0
        for packed in bins:
            batch, size = batch + packed, size + 1
            if size == self.bins_per_batch:
                yield batch
                batch, size, count = [], 0, count + 1
        if batch:
            yield batch
            count += 1
        yield from ([] for _ in range(-count % (self.num_ranks * self.accumulation)))


def pack_stream(
    documents: Iterable[Document], capacity: int | None, open_bins: int = 256
) -> Iterator[list[Document]]:
    """Yield bins by online best fit; a row that has `seq_lengths` is a bin already.

    Raises ValueError if a document is longer than `capacity`.

    >>> docs = [{"input_ids": [0] * n} for n in (3, 2, 1, 4)]
    >>> [[len(d["input_ids"]) for d in b] for b in pack_stream(docs, 4)]
    [[3, 1], [4], [2]]
    """
    # Two parallel lists, ascending by the space left: a search finds the tightest bin that fits.
    spaces: list[int] = []
    waiting: list[list[Document]] = []
    for number, document in enumerate(documents):
        length = len(document["input_ids"])
        if capacity is not None and length > capacity:
            raise ValueError(
                f"document {number} of the stream has {length} tokens but capacity is {capacity}; "
                "raise max_length or set overflow='truncate' or 'split'"
            )
        if capacity is None or document.get("seq_lengths") is not None:
            yield [document]
            continue
        at = bisect_left(spaces, length)
        if at < len(spaces):
            space, packed = spaces.pop(at), waiting.pop(at)
        else:
            if len(spaces) == open_bins:
                del spaces[0]
                yield waiting.pop(0)
            space, packed = capacity, []
        packed.append(document)
        if space == length:
            yield packed
        else:
            at = bisect_left(spaces, space - length)
            spaces.insert(at, space - length)
            waiting.insert(at, packed)
    yield from waiting
