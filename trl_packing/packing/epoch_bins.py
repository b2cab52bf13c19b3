"""The bins of each epoch, made of its places (places.py).

packing        new bins in every epoch, from (seed, epoch); all epochs have equally many
groups         documents with common prefixes share a bin (prefix_groups.py)
stages         bins of one stage after those of another (curriculum.py)
images         bins are limited by patches, too (patch_bins.py)
a mixture      an epoch with fewer bins than the fullest one gets some of its bins split
packed rows    each is a bin of its own
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property

import numpy as np

from trl_packing.packing.bins import PackingPlan, find_strategy, pack
from trl_packing.packing.curriculum import pack_stages
from trl_packing.packing.epoch import with_more_bins
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.patch_bins import PatchBins
from trl_packing.packing.places import EpochPlaces
from trl_packing.packing.prefix_groups import PrefixGroups


@dataclass(eq=False)
class EpochBins:
    """Packs the places of an epoch into bins; the last plan is kept.

    Args:
        lengths: tokens of every document, ``(documents,)`` integers.
        capacity: tokens that a bin may hold; None makes each document a bin of its own.
        places: of the documents.
        strategy: as in `pack`.
        seed: as in `pack`; the seed of an epoch is (seed, epoch).
        shuffle: False makes the same bins in every epoch.
        epochs: of a mixture, those that get equally many bins.
        groups: documents with common prefixes that share a bin.
        stages: of each document, ``(documents,)`` integers.
        loads: of the images of the documents; None without images.

    Attributes:
        number: of bins, the same in every epoch.
    """

    lengths: np.ndarray
    capacity: int | None
    places: EpochPlaces
    _: KW_ONLY
    strategy: str
    seed: int
    shuffle: bool
    epochs: int = 1
    groups: PrefixGroups | None = None
    stages: np.ndarray | None = None
    loads: ImageLoads | None = None
    number: int = field(default=0, init=False)  # while bins are counted, no bin is split

    def __post_init__(self) -> None:
        self._plan: tuple[int, PackingPlan] | None = None  # of the epoch of this number
        self.number = self._number_of_each_epoch()

    def _number_of_each_epoch(self) -> int:
        if self.places.are_same_every_epoch:
            return len(self.plan(0))
        # If documents are sorted first, no seed changes the number of bins.
        is_seeded = find_strategy(self.strategy).order_dependent
        return max(
            len(self._pack(self.places.documents(epoch), (self.seed, epoch) if is_seeded else None))
            for epoch in range(max(self.epochs, 1))
        )

    def plan(self, epoch: int) -> PackingPlan:
        """Return the bins of an epoch."""
        is_new = self.shuffle and not find_strategy(self.strategy).order_dependent
        is_fixed = self.capacity is None or not is_new
        epoch = 0 if is_fixed and self.places.are_same_every_epoch else epoch
        if self._plan is None or self._plan[0] != epoch:
            self._plan = epoch, self._draw(epoch)
        return self._plan[1]

    def _draw(self, epoch: int) -> PackingPlan:
        lengths = self.places.lengths(epoch)
        if self.capacity is None:
            number = len(lengths)
            longest = int(lengths.max(initial=0))
            tokens = lengths.astype(np.int64)
            return PackingPlan(np.arange(number), np.arange(number + 1), tokens, longest)
        seed = (self.seed, epoch) if self.shuffle else None
        if self.groups is not None:
            return self.groups.pack(self.capacity, self.strategy, seed)
        if self.stages is not None:
            return pack_stages(self.stages, self._pack, seed)
        if self.places.draw is not None:
            plan = self._pack(self.places.documents(epoch), seed)
            return with_more_bins(plan, lengths, self.number)
        if self._patch_bins is not None:
            return self._patch_bins.pack(seed)
        return pack(self.lengths, self.capacity, self.strategy, seed)

    def _pack(self, documents: np.ndarray, seed: Sequence[int] | None) -> PackingPlan:
        """Return the bins of some documents, which it counts from 0 as they are given."""
        assert self.capacity is not None
        lengths, loads = self.lengths[documents], self.loads
        if loads is None or loads.most_patches is None:
            return pack(lengths, self.capacity, self.strategy, seed)
        limits = self.capacity, loads.most_patches
        return PatchBins(lengths, loads.patches[documents], *limits, self.strategy).pack(seed)

    @cached_property
    def _patch_bins(self) -> PatchBins | None:
        loads = self.loads
        if loads is None or loads.most_patches is None or self.capacity is None:
            return None
        limits = self.capacity, loads.most_patches
        return PatchBins(self.lengths, loads.patches, *limits, self.strategy)
