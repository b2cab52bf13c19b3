"""The micro-batches of one rank of a stream, in whole optimizer steps.

    documents    a0 a1 a2 │ a3       rank 0, accumulation 2    step   a0 a1   a2 a3
                 b0 b1               rank 1                           b0 b1   -- --

Before every optimizer step, the ranks agree on whether any of them has documents left; one without
continues with empty micro-batches, a masked token each. So all end with the same step, which is
complete: `Trainer` would add the gradient of another to the next epoch (transformers 5.23).
"""

import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import KW_ONLY, asdict, dataclass, field
from functools import partial
from itertools import count, islice
from pathlib import Path
from typing import Any

import datasets
import torch
from torch.utils.data import DataLoader, IterableDataset

from trl_packing.attention.ranks import all_reduce_max, gather_objects
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import NOTHING_TO_TRAIN, Document, take_counts
from trl_packing.documents.labels import SOURCE, SOURCE_IDS
from trl_packing.training.stream_reader import PackedStream, Place, StreamSettings, num_shards

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
        self._positions: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None

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
            steps = {"epoch": self.epoch, "steps": before + number}
            self._positions[first + number] = steps | {"place": place}
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
        shards = num_shards(self.documents)
        return {**asdict(self.settings), "rank": self.rank, "num_shards": shards}


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
