"""How the documents of a stream are divided among readers.

    shards of the stream     0 1 2 3 4 5 6 7
    rank 0                   0 . 2 . 4 . 6 .      its own ones, if ranks get equally many
      reader 0, reader 1     0 . . . 4 . . .  |  . . 2 . . . 6 .

Where shards do not divide evenly, every rank reads all of them, and ranks take turns on the
micro-batches (`streaming`). A stream is divided only if its parts together are the whole of it:
not after `take`, `skip`, `interleave_datasets`, or a function that is told row numbers.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import datasets

from trl_packing.data.stream import Document, steps_of

# Steps of `datasets` (5.2) that make of each shard what they make of it in the whole stream.
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

# With so many shards a rank, one shard more or less leaves ranks idle for 1/8 of the epoch at most.
_MANY = 8


@dataclass(frozen=True)
class ShardAssignment:
    """Which shards each reader of each rank reads.

    num_shards: of the stream, 1 if it cannot be divided.
    by_rank: whether ranks read shards of their own.
    num_readers: of each rank, every one with shards of its own.
    contiguous: whether the shards of a rank are neighbors, as accelerate divides a stream.
    """

    num_shards: int
    by_rank: bool
    num_readers: int
    contiguous: bool = False

    def part(self, documents: Iterable[Document], num_ranks: int, rank: int, reader: int) -> Any:
        """Return what a reader reads; loading a state into it leaves `documents` as they are."""
        if not isinstance(documents, datasets.IterableDataset):
            return documents
        if not is_divisible(documents):
            whole = object.__new__(type(documents))  # `copy.copy` would share all attributes
            vars(whole).update(vars(documents))
            return whole
        part = documents
        if self.by_rank:
            part = documents.shard(num_ranks, rank, contiguous=self.contiguous)
        part = part.shard(self.num_readers, reader, contiguous=False)
        part.set_epoch(documents.epoch)  # `shard` forgets it (datasets 5.2)
        return part


def assign_shards(
    documents: Iterable[Document], num_ranks: int, num_workers: int, *, packs: bool = True
) -> ShardAssignment:
    """Return how `num_ranks` with up to `num_workers` readers each divide the stream.

    packs: whether documents are packed. Otherwise ranks read the shards that they read in a padded
        run; packed, every rank reads shards from all over the stream, since files are often sorted
        by source or by length.

    >>> assign_shards([], num_ranks=2, num_workers=4)
    ShardAssignment(num_shards=1, by_rank=False, num_readers=1, contiguous=False)
    """
    shards = documents.num_shards if is_divisible(documents) else 1  # type: ignore[attr-defined]
    by_rank = num_ranks > 1 and (shards % num_ranks == 0 or shards >= _MANY * num_ranks)
    of_a_rank = shards // num_ranks if by_rank else shards
    num_readers = max(1, min(num_workers, of_a_rank))
    return ShardAssignment(shards, by_rank, num_readers, contiguous=not packs)


def is_divisible(documents: Iterable[Document]) -> bool:
    """Return whether the shards of a stream, read apart, are the stream."""
    if not isinstance(documents, datasets.IterableDataset):
        return False
    if getattr(documents, "_starting_state_dict", None) is not None:
        return False  # `shard` would begin at the start again
    return all(
        type(step).__name__ in _SHARD_BY_SHARD
        and not getattr(step, "drop_last_batch", False)
        and not _is_told_row_numbers(step)
        for step in steps_of(documents)
    )


def _is_told_row_numbers(step: Any) -> bool:
    # Our own functions use them in messages only.
    own = getattr(getattr(step, "function", None), "__module__", "").startswith("trl_packing.")
    return getattr(step, "with_indices", False) and not own
