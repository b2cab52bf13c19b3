"""The micro-batches of a rank, from its readers in turn: as many as on every other rank.

    reader 0   a0 a1 a2 a3 │       rank 0, accumulation 2    step   a0 b0   a1 b1   a2 a3
    reader 1   b0 b1 │             rank 1, at its end                c0 c1   c2 --   -- --

It runs in the main process; each reader has a dataloader worker of its own, if there are any, so
that the order of micro-batches is ours and not the dataloader's. Before every optimizer step ranks
agree on whether any of them has documents left: one that has none goes on with empty micro-batches,
of which `PackedCollator` makes one masked token each, and all end with the same step. So nothing is
left over for the next epoch's first step either (`Trainer` would add a gradient to that, since it
does not know where a stream ends; transformers 5.23).
"""

import json
import os
from collections.abc import Callable, Iterable, Iterator
from dataclasses import asdict, replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.utils.data import DataLoader, IterableDataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.model_limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import NOTHING_TO_TRAIN, Document, take_counts
from trl_packing.models.sharding import all_reduce_max, cpu_group
from trl_packing.streaming.reader import PackedStream, Place, StreamSettings
from trl_packing.streaming.shards import assign_shards

_ENDED, _GOES_ON, _FAILED = 0, 1, 2
_KEPT_POSITIONS = 4  # the dataloader is at most one step ahead of the trainer


class StreamBatches(IterableDataset):
    """Collated micro-batches of one rank, epoch by epoch, with a position to save and load.

    documents, settings, rank: as in `PackedStream`.
    accumulation: micro-batches of an optimizer step.
    num_workers: processes that read, of which a stream with fewer shards uses fewer.
    global_step: returns the optimizer steps taken, by which positions are kept.
    agree: returns the largest of the values that the ranks pass.
    loading: further arguments of the readers' dataloaders.
    limits: what the model can read; ValueError, when read, for a document beyond.

    Raises ValueError, when read, for a stream without documents, and whatever `PackedStream`
    raises; RuntimeError if another rank cannot go on.
    """

    def __init__(
        self,
        documents: Iterable[Document],
        settings: StreamSettings,
        collate: Callable[[list[Document]], Any],
        *,
        rank: int = 0,
        accumulation: int = 1,
        num_workers: int = 0,
        global_step: Callable[[], int] = lambda: 0,
        agree: Callable[[int], int] | None = None,
        loading: dict[str, Any] | None = None,
        limits: ModelLimits = NO_LIMITS,
    ):
        self.documents = documents
        self.settings = settings
        self.limits = limits
        self.collate = collate
        self.rank = rank
        self.accumulation = accumulation
        self.num_workers = num_workers
        self.epoch = 0
        self.counts = PreparationCounts()  # what this rank has read so far, resumed or not
        self._global_step = global_step
        self._agree = agree or all_reduce_max
        self._loading = loading or {}
        self._division = assign_shards(
            documents, settings.num_ranks, num_workers, packs=settings.capacity is not None
        )
        self._positions: dict[int, dict[str, Any]] = {}
        self._resumed: dict[str, Any] | None = None

    def set_epoch(self, epoch: int) -> None:
        """Shuffle by `epoch` from now on, and tell it a stream that shuffles by itself."""
        self.epoch = epoch
        if hasattr(self.documents, "set_epoch"):
            self.documents.set_epoch(epoch)

    def __iter__(self) -> Iterator[Any]:
        """Yield the micro-batches of an epoch; behind a loaded position, those left of it.

        Their places in front of it are taken by empty dictionaries, which `skip_first_batches`
        (accelerate) throws away.
        """
        position, self._resumed = self._resumed, None
        first = self._global_step()
        if position is not None:
            self._positions[first] = position
            yield from ({} for _ in range(position["steps"] * self.accumulation))
        for number, (batches, behind) in enumerate(self._steps(position), start=1):
            self._positions[first + number] = behind
            self._positions.pop(first + number - _KEPT_POSITIONS, None)
            yield from batches

    # --- steps ------------------------------------------------------------------------------------

    def _steps(self, position: dict[str, Any] | None) -> Iterator[tuple[list[Any], dict[str, Any]]]:
        """Yield the micro-batches of each step, and the position behind them."""
        readers = _Readers(self, position)
        for steps in count(position["steps"] + 1 if position else 1):
            try:
                batches = readers.take(self.accumulation)
            except Exception:
                self._agree(_FAILED)
                raise
            agreed = self._agree(_GOES_ON if batches else _ENDED)
            if agreed == _FAILED:
                raise RuntimeError(
                    "another rank cannot read its part of the stream; its own error says why"
                )
            if agreed == _ENDED:
                break
            batches += [self.collate([]) for _ in range(self.accumulation - len(batches))]
            yield batches, {"epoch": self.epoch, "steps": steps, **readers.position()}
        if steps == 1:
            raise ValueError(NOTHING_TO_TRAIN)

    def reader(self, number: int, place: Place) -> DataLoader:
        """Return a dataloader of (collated micro-batch, place behind it, counts)."""
        stream = PackedStream(
            self.documents,
            self.settings,
            rank=self.rank,
            reader=number,
            division=self._division,
            epoch=self.epoch,
            place=place,
            limits=self.limits,
        )
        return DataLoader(
            stream,
            batch_size=None,
            collate_fn=_CollateDocuments(self.collate),
            num_workers=min(self.num_workers, 1),
            # Otherwise every reader would draw from the random numbers of the training.
            generator=self._generator(number),
            **self._loading,
        )

    def _generator(self, reader: int) -> torch.Generator:
        seeds = (self.settings.seed or 0, self.epoch, self.rank, reader)
        seed = int(np.random.SeedSequence(seeds).generate_state(1)[0])
        return torch.Generator().manual_seed(seed)

    def counts_of_all_ranks(self) -> PreparationCounts:
        """Return what was read so far, each document once; all ranks call it."""
        if self.settings.num_ranks == 1:
            return self.counts
        gathered: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(gathered, (self.rank, self.counts), group=cpu_group())
        ranks = dict(gathered).values()  # tensor-parallel ranks read the same
        if self._division.by_rank:
            return sum(ranks, PreparationCounts())
        return max(ranks, key=lambda counts: counts.before.documents)  # all read everything

    @property
    def num_readers(self) -> int:
        """Return how many readers this rank has."""
        return self._division.num_readers

    # --- positions --------------------------------------------------------------------------------

    def save(self, path: str) -> None:
        """Write the position behind the optimizer steps taken so far, whole or not at all."""
        position = self._positions[self._global_step()]
        Path(f"{path}.part").write_text(json.dumps(self._identity() | position))
        os.replace(f"{path}.part", path)

    def load(self, path: str) -> tuple[int, int]:
        """Go on from the position in `path`; returns its epoch, and the steps of that epoch.

        Where a rank has none, all of them read the stream again up to the optimizer steps taken.
        Raises ValueError if it was written with other settings.
        """
        found = Path(path).is_file()
        if self._agree(int(not found)):
            self._resumed = self._read_again(self._global_step())
        else:
            self._resumed = self._checked(json.loads(Path(path).read_text()))
        return self._resumed["epoch"], self._resumed["steps"]

    def _checked(self, position: dict[str, Any]) -> dict[str, Any]:
        for name, value in self._identity().items():
            if position[name] != value:
                raise ValueError(
                    f"the checkpoint was saved with a stream of {name}={position[name]}, and now "
                    f"it is {value}: documents would be lost or repeated. Resume with the former, "
                    "or set ignore_data_skip=True to begin the stream anew"
                )
        # As many readers as then, whatever the number of processes now: the order depends on it.
        self._division = replace(self._division, num_readers=len(position["readers"]))
        return position

    def _identity(self) -> dict[str, Any]:
        return {
            **asdict(self.settings),
            "rank": self.rank,
            "num_shards": self._division.num_shards,
        }

    def _read_again(self, steps: int) -> dict[str, Any]:
        taken = 0
        for epoch in count():
            self.set_epoch(epoch)
            for _, position in self._steps(None):
                taken += 1
                if taken == steps:
                    return position
        raise AssertionError("an epoch without steps raises")


class _Readers:
    """The readers of an epoch, which take turns; those that end are left out."""

    def __init__(self, batches: StreamBatches, position: dict[str, Any] | None):
        self._stream = batches
        take_counts(batches.documents)  # what others have read of it, the isolation check first
        start = position or {"turn": 0, "readers": [[None, 0]] * batches.num_readers}
        self._places: list[Place | None] = [
            None if place is None else Place(*place) for place in start["readers"]
        ]
        self._turn = start["turn"]
        self._iterators = [
            iter(()) if place is None else iter(batches.reader(number, place))
            for number, place in enumerate(self._places)
        ]

    def take(self, number: int) -> list[Any]:
        """Return the next `number` micro-batches, fewer at the end."""
        batches: list[Any] = []
        while len(batches) < number and any(place is not None for place in self._places):
            at = self._turn
            self._turn = (at + 1) % len(self._places)
            if self._places[at] is None:
                continue
            found = next(self._iterators[at], None)
            if found is None:
                self._places[at] = None
            else:
                batch, place, counts = found
                self._places[at] = Place(*place)
                self._stream.counts += counts
                batches.append(batch)
        return batches

    def position(self) -> dict[str, Any]:
        return {"turn": self._turn, "readers": list(self._places)}


class _CollateDocuments:
    """Collate the documents of a triple, in the worker."""

    def __init__(self, collate: Callable[[list[Document]], Any]):
        self.collate = collate

    def __call__(self, triple: Any) -> tuple[Any, Place, PreparationCounts]:
        documents, place, counts = triple
        return self.collate(documents), place, counts
