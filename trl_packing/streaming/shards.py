"""Assign the shards of a stream to ranks, and to the readers of each rank.

    shards of the stream     0 1 2 3 4 5 6 7
    rank 0                   0 . 2 . 4 . 6 .      shards of its own, if ranks get equally many
      reader 0, reader 1     0 . . . 4 . . .  |  . . 2 . . . 6 .

A reader runs in a dataloader worker, or in the main process if there are no workers. If shards do
not divide evenly, every rank reads all of them, and ranks take turns on the micro-batches
(reader.py). A stream is divided only if its shards, read separately, are the whole stream: not
after `take`, `skip`, `interleave_datasets`, or a function that receives row numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import datasets

from trl_packing.data.stream import Document, steps_of

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

# With this many shards per rank, one shard more leaves other ranks idle for 1/8 of the epoch.
_MANY = 8


@dataclass(frozen=True)
class ShardAssignment:
    """The shards that each reader of each rank reads.

    Attributes:
        num_shards: shards of the stream, 1 if it cannot be divided.
        by_rank: Ranks read shards of their own. If False, every rank reads all shards.
        num_readers: readers of each rank, which divide its shards.
        contiguous: The shards of a rank are neighbors, as accelerate divides a stream.
    """

    num_shards: int
    by_rank: bool
    num_readers: int
    contiguous: bool = False

    def select(self, documents: Iterable[Document], num_ranks: int, rank: int, reader: int) -> Any:
        """Return the shards of a reader; loading a state into them does not change `documents`."""
        if not isinstance(documents, datasets.IterableDataset):
            return documents
        if not is_divisible(documents):
            whole = object.__new__(type(documents))  # `copy.copy` would share all attributes
            vars(whole).update(vars(documents))
            return whole
        shards = documents
        if self.by_rank:
            shards = documents.shard(num_ranks, rank, contiguous=self.contiguous)
        shards = shards.shard(self.num_readers, reader, contiguous=False)
        shards.set_epoch(documents.epoch)  # `shard` does not keep it (datasets 5.2)
        return shards


def assign_shards(
    documents: Iterable[Document], num_ranks: int, num_workers: int, *, packs: bool = True
) -> ShardAssignment:
    """Return the shards of each rank and reader.

    Args:
        documents: the whole stream.
        num_ranks: data-parallel ranks.
        num_workers: dataloader workers of a rank; a stream with fewer shards has fewer readers.
        packs: Documents are packed. Every rank then reads shards from all over the stream, since
            files are often sorted by source or length. If False, ranks read the same shards as in
            a padded run.

    Examples:
        >>> assign_shards([], num_ranks=2, num_workers=4)
        ShardAssignment(num_shards=1, by_rank=False, num_readers=1, contiguous=False)
    """
    shards = documents.num_shards if is_divisible(documents) else 1  # type: ignore[attr-defined]
    by_rank = num_ranks > 1 and (shards % num_ranks == 0 or shards >= _MANY * num_ranks)
    per_rank = shards // num_ranks if by_rank else shards
    num_readers = max(1, min(num_workers, per_rank))
    return ShardAssignment(shards, by_rank, num_readers, contiguous=not packs)


def is_divisible(documents: Iterable[Document]) -> bool:
    """Return whether the shards of a stream, read separately, are the whole stream."""
    if not isinstance(documents, datasets.IterableDataset):
        return False
    if getattr(documents, "_starting_state_dict", None) is not None:
        return False  # `shard` would restart the stream
    return all(
        type(step).__name__ in _SHARD_BY_SHARD
        and not getattr(step, "drop_last_batch", False)
        and not _receives_row_numbers(step)
        for step in steps_of(documents)
    )


def _receives_row_numbers(step: Any) -> bool:
    # Functions of this package use row numbers in messages only.
    module = getattr(getattr(step, "function", None), "__module__", "")
    return getattr(step, "with_indices", False) and not module.startswith("trl_packing.")
