"""From document lengths to the micro-batches of one data-parallel rank, newly drawn every epoch.

    an epoch    [ m0 m1 | m2 m3 ] [ m4 m5 | m6 m7 ] ...     micro-batches, in the order of training
                  └ slot ┘          ranks × accumulation of them make an optimizer step
    rank r takes m_r, m_(r + ranks), ...

The micro-batches of a step depend on ranks × accumulation alone, so 1 rank × 4, 2 × 2 and 4 × 1
train the same steps. Every rank computes the same epoch from (lengths, seed, epoch) and takes its
part of it. An epoch of a mixture has places: a document that it draws twice has two (draw.py).
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import KW_ONLY, dataclass, replace
from functools import partial
from typing import Any

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from trl_packing.packing.balance import (
    COSTLY_FROM,
    arranged,
    balanced_order,
    excess_of_parts,
    exchange_between_steps,
)
from trl_packing.packing.bins import (
    PackingPlan,
    find_strategy,
    pack,
    plan_of,
    ranges,
)
from trl_packing.packing.draw import MixtureDraw, document_order
from trl_packing.packing.epoch import (
    EpochPlan,
    equal_cost,
    padded_batches,
    split_bins,
)
from trl_packing.packing.prefix_groups import PrefixGroups


@dataclass(frozen=True, eq=False)
class ImageLoads:
    """Numbers of images of the documents of a data set, ``(documents,)`` int64 each.

    Attributes:
        images: images.
        tokens: tokens that come from images.
        patches: positions of the vision tower.
        most_patches: that a bin may hold; a document with more shares its bin with no other.
    """

    images: np.ndarray
    tokens: np.ndarray
    patches: np.ndarray
    most_patches: int | None = None


@dataclass(eq=False, repr=False)
class PackedBatchSampler(BatchRebalanceSampler):
    """Yield the document indices of each micro-batch of one rank.

    `Trainer` recognizes rank-aware batch samplers by transformers' class, skips accelerate's
    sharding and calls `set_epoch`. No document is dropped or repeated, and no bin exceeds its
    capacity: bins of the last step are split until every rank has as many micro-batches, or some
    are empty, of which `PackedCollator` makes a masked token.

    Args:
        lengths: tokens of every document, (documents,) integers.
        capacity: tokens that a bin may hold.
        bins_per_batch: bins in a micro-batch.
        documents_per_step: Instead of packing into bins, take this many documents in every
            optimizer step: those of a padded run with steps of that size (draw.py). The last step
            of an epoch may be smaller.
        divide_by_cost: with documents_per_step, divide a step into micro-batches of equal cost.
            False keeps the micro-batches of the padded run.
        rows: Every document is a bin of its own and stays as it is (rows that were packed before).
        num_ranks: data-parallel ranks.
        rank: the rank that this sampler is for.
        accumulation: micro-batches that a rank accumulates in an optimizer step.
        strategy: as in `pack`.
        seed: as in `pack`; the seed of an epoch is (seed, epoch).
        shuffle: False keeps the order of the data set and the same bins every epoch (evaluation).
        sampling: with documents_per_step, the `train_sampling_strategy` of transformers that draws
            documents: "random", "group_by_length", "batch_rebalance" or "sequential".
        attention_cost: c in the cost of a micro-batch, tokens + c · Σ len².
        balance_window: number of optimizer steps that exchange bins if random steps would make
            ranks wait; 1 keeps steps random (benchmarks/results/balance.md).
        drop_last: with documents_per_step, leave out the documents that do not fill a padded run's
            last micro-batch (others every epoch), as `dataloader_drop_last` does.
        groups: Documents with common prefixes that share a bin, whose tokens are then those that
            its row computes.
        draw: the documents that each epoch of a mixture draws; None draws every document once.
        epochs: With `draw`, epochs that get as many bins as the fullest of them needs.
        stages: of each document, (documents,) integers: those of a stage come after those of the
            stages before it, and share bins only with each other (draw.py).
        loads: images of the documents: bins may be limited by their patches, too.

    Raises:
        ValueError: an argument is out of range.
    """

    lengths: Any
    capacity: int | None = None
    _: KW_ONLY
    bins_per_batch: int = 1
    documents_per_step: int | None = None
    divide_by_cost: bool = True
    rows: bool = False
    num_ranks: int = 1
    rank: int = 0
    accumulation: int = 1
    strategy: str = "bfd"
    seed: int = 0
    shuffle: bool = True
    sampling: str = "random"
    attention_cost: float = 0.0
    balance_window: int = 64
    drop_last: bool = False
    groups: PrefixGroups | None = None
    draw: MixtureDraw | None = None
    epochs: int = 1
    stages: np.ndarray | None = None
    loads: ImageLoads | None = None

    def __post_init__(self) -> None:
        self.lengths = np.asarray(self.lengths)
        self.sampling = self.sampling if self.shuffle else "sequential"
        self.epoch = 0
        self.slots = self.num_ranks * self.accumulation  # micro-batches of a step
        self.num_drawn = len(self.lengths) if self.draw is None else len(self.draw)
        multiple = 1  # an epoch leaves out the documents beyond a multiple of it
        if self.drop_last and self.documents_per_step:  # those that a padded loader drops together
            is_step = self.sampling == "batch_rebalance"
            multiple = max(self.documents_per_step // (1 if is_step else self.accumulation), 1)
        self.num_used = self.num_drawn // multiple * multiple
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank={self.rank} is not one of {self.num_ranks} ranks")
        if not self.num_used:
            raise ValueError(
                f"dataloader_drop_last=True drops all {self.num_drawn} documents, which do not "
                "fill one micro-batch of every rank; set it to False"
            )
        self._kept: dict[str, tuple[int, Any]] = {}  # by name: of the epoch drawn last
        # Bins of each epoch, and the capacity of a micro-batch; None if micro-batches are not bins.
        self.num_bins: int | None = None
        self.tokens_per_batch: int | None = None
        if self.documents_per_step is None:
            self.num_bins = self._most_bins()
            self.tokens_per_batch = self.capacity and self.bins_per_batch * self.capacity

    def set_epoch(self, epoch: int) -> None:
        """Draw epoch `epoch` on the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return this rank's micro-batches per epoch, the same every epoch and on every rank."""
        return len(self.drawn()) // self.num_ranks

    def __iter__(self) -> Iterator[list[int]]:
        drawn = self.drawn()
        return (drawn[at].tolist() for at in range(self.rank, len(drawn), self.num_ranks))

    def drawn(self) -> EpochPlan:
        """Return this epoch, which is kept until the next one is drawn."""
        return self._once("drawn", self.epoch, self._draw_epoch)

    def _draw_epoch(self) -> EpochPlan:
        by_bins = self.documents_per_step is None
        places, ends = self._steps_of_bins() if by_bins else self._steps_of_documents()
        documents = places if self.draw is None else self._documents(self.epoch)[places]
        return EpochPlan(places, documents, ends, self.slots)

    def micro_batches(self, most: int | None = None) -> list[np.ndarray]:
        """Return the documents of all ranks' micro-batches, or of `most` spread over the epoch."""
        drawn = self.drawn()
        number = len(drawn) if most is None else min(most, len(drawn))
        return [drawn[i] for i in np.linspace(0, len(drawn) - 1, number).astype(int)]

    def plan(self) -> PackingPlan | None:
        """Return the bins of this epoch; None with documents_per_step."""
        if self.documents_per_step is not None:
            return None
        bins = self._bins_of(self.epoch)
        if self.draw is None:
            return bins
        return replace(bins, indices=self._documents(self.epoch)[bins.indices])

    def tokens(self) -> np.ndarray:
        """Return the tokens of this epoch's micro-batches: those that rows of `groups` compute."""
        drawn = self.drawn()
        if self.groups is None:
            return drawn.sums(self.lengths)
        offsets = np.append(0, drawn.ends)
        return self.groups.index.computed_tokens(self.lengths, drawn.documents, offsets)

    def groups_per_step(self) -> float | None:
        """Return the mean number of `groups` with a document in a step; None without groups."""
        if self.groups is None:
            return None
        drawn = self.drawn()
        ends = drawn.step_ends
        step = np.repeat(np.arange(len(ends)), np.diff(ends, prepend=0))
        pairs = step * len(self.groups.tokens) + self.groups.numbers[drawn.places]
        return len(np.unique(pairs)) / len(ends)

    def at_places(self, values: np.ndarray) -> np.ndarray:
        """Return values of the documents ``(documents,)`` as those of this epoch's places."""
        return values if self.draw is None else values[self._documents(self.epoch)]

    def _documents(self, epoch: int) -> np.ndarray:
        """Return the document at each place of a mixture, ascending."""
        assert self.draw is not None
        return self._once("documents", epoch, partial(self.draw.documents, epoch))

    def _once(self, name: str, epoch: int, make: Callable[[], Any]) -> Any:
        if self._kept.get(name, (None, None))[0] != epoch:
            self._kept[name] = epoch, make()
        return self._kept[name][1]

    def _most_bins(self) -> int:
        """Return the bins of each epoch: those of the fullest one, if they draw other documents."""
        draw = self.draw
        if draw is None or draw.is_same_every_epoch:
            return len(self._bins_of(0))
        # If documents are sorted first, no seed changes the number of bins.
        seeded = find_strategy(self.strategy).order_dependent
        return max(
            len(self._pack(draw.documents(epoch), (self.seed, epoch) if seeded else None))
            for epoch in range(max(self.epochs, 1))
        )

    def _bins_of(self, epoch: int) -> PackingPlan:
        """Return the bins of an epoch, of its places."""
        is_new = self.shuffle and not find_strategy(self.strategy).order_dependent
        if self.rows or not is_new:
            epoch = 0 if self.draw is None or self.draw.is_same_every_epoch else epoch
        return self._once("bins", epoch, partial(self._pack_epoch, epoch))

    def _pack_epoch(self, epoch: int) -> PackingPlan:
        if self.rows:
            every = np.arange(len(self.lengths))
            longest = int(self.lengths.max(initial=0))
            return plan_of(every, np.ones_like(every), self.lengths, longest)
        seed = (self.seed, epoch) if self.shuffle else None
        if self.groups is not None:
            return self.groups.pack(self.capacity or 0, self.strategy, seed)
        if self.stages is not None:
            # Bins of one stage, stage after stage.
            indices = []
            sizes = []
            for stage in np.unique(self.stages).tolist():
                members = np.flatnonzero(self.stages == stage)
                bins = self._pack(members, seed and (*seed, stage))
                indices.append(members[bins.indices])
                sizes.append(np.diff(bins.offsets))
            documents_of = np.concatenate(indices)
            return plan_of(documents_of, np.concatenate(sizes), self.lengths, bins.capacity)
        # Without a mixture, places are documents: no array of a million numbers is copied.
        documents = slice(None) if self.draw is None else self._documents(epoch)
        bins = self._pack(documents, seed)
        most = len(bins) if self.num_bins is None else self.num_bins
        if len(bins) > most:
            raise RuntimeError(f"epoch {epoch} has more bins than the epochs={self.epochs} planned")
        if len(bins) < most:  # an emptier epoch of a mixture
            parts = split_bins(bins, most)
            of_parts = np.array([len(part) for part in parts])
            lengths = self.lengths[documents]
            return plan_of(np.concatenate(parts), of_parts, lengths, bins.capacity)
        return bins

    def _pack(self, documents: np.ndarray | slice, seed: Sequence[int] | None) -> PackingPlan:
        """Return the bins of some documents, which it counts from 0 as they are given."""
        lengths = self.lengths[documents]
        loads = self.loads
        capacity = self.capacity or 0
        if loads is None or loads.most_patches is None:
            return pack(lengths, capacity, self.strategy, seed)
        # A document takes the larger one of its shares of a bin's tokens and patches.
        patches = np.minimum(loads.patches[documents], loads.most_patches)
        share = -(-patches * capacity // loads.most_patches)
        bins = pack(np.maximum(lengths, share), capacity, self.strategy, seed)
        return plan_of(bins.indices, np.diff(bins.offsets), lengths, capacity)

    def _steps_of_bins(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of this epoch, bin by bin, and the ends of micro-batches."""
        bins = self._bins_of(self.epoch)
        full, left = self.arranged_bins(bins, self._costs(bins))
        sizes = np.diff(bins.offsets)
        places = bins.indices[ranges(bins.offsets[full.ravel()], sizes[full.ravel()])]
        # The last step has as few micro-batches as hold the bins left over, which are split if
        # there are too few of them.
        number = -(-len(left) // (self.bins_per_batch * self.num_ranks)) * self.num_ranks
        last = split_bins([bins[i] for i in left], number)
        held = np.array([len(part) for part in last], np.int64)
        if number:  # the first micro-batches hold a bin more than the others
            held = np.array([batch.sum() for batch in np.array_split(held, number)])
        documents = np.append(sizes[full].sum(-1), held)  # of each micro-batch
        return np.concatenate([places, *last], dtype=np.int64), np.cumsum(documents)

    def _costs(self, bins: PackingPlan) -> np.ndarray:
        """Return what bins cost, in whole tokens, (bins,)."""
        if self.rows:  # the lengths of documents inside are not known here
            return bins.tokens
        if self.groups is None:
            lengths = self.at_places(self.lengths)
            squares = np.square(lengths[bins.indices], dtype=np.int64)
        else:
            squares = self.groups.squares[bins.indices]
        attention = self.attention_cost * np.add.reduceat(squares, bins.offsets[:-1])
        return bins.tokens + attention.astype(np.int64)

    def arranged_bins(self, bins: PackingPlan, costs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the bins of full steps, (steps, slots, bins_per_batch), and the bins left over.

        `costs` are integers, (bins,).
        """
        rng = np.random.default_rng((self.seed, self.epoch)) if self.shuffle else None
        slots = self.slots
        documents = np.diff(bins.offsets)
        size = slots * self.bins_per_batch
        order = np.arange(len(bins)) if rng is None else rng.permutation(len(bins))
        num_full = len(order) - len(order) % size
        sections = [order]  # bins that are balanced with each other
        if self.stages is not None:
            stages = self.stages[bins.indices[bins.offsets[:-1]]]  # of each bin
            order = order[np.argsort(stages[order], kind="stable")]
            # A step with bins of two stages exchanges none: no bin of the next stage comes early.
            steps = stages[order[:num_full]].reshape(-1, size)
            is_other = (np.diff(steps[:, 0]) != 0) | (np.diff(steps[:, -1]) != 0)
            sections = np.split(order[:num_full], (np.flatnonzero(is_other) + 1) * size)
        full = order[:num_full].reshape(-1, slots, self.bins_per_batch)
        left = order[num_full:]
        if rng is None or not len(full):
            return full, left
        parts = []
        for part in sections:
            balanced = balanced_order(
                costs[part],
                bins.tokens[part],
                documents[part],
                slots=slots,
                bins_per_batch=self.bins_per_batch,
                window=self.balance_window,
                rng=rng,
            )
            parts.append(part[balanced])
        full = np.concatenate(parts)
        if self.draw is None:
            return full, left
        # Bins of ordinary cost change places, and costly ones within 1 % of the median.
        median = int(np.median(costs))
        ordinary = int(COSTLY_FROM * median)
        bin_of = np.repeat(np.arange(len(bins)), documents)
        sources = self.at_places(self.draw.source_ids)[bins.indices]
        lengths = self.at_places(self.lengths)[bins.indices]
        order = exchange_between_steps(
            np.concatenate([full.ravel(), left]),
            size,
            excess=excess_of_parts(sources, lengths, bin_of, len(bins)),
            keys=np.maximum(costs, ordinary) // max(ordinary - median, 1),
            rng=rng,
        )
        return arranged(order[:num_full].reshape(-1, size), costs, slots), order[num_full:]

    def _steps_of_documents(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the places of this epoch, step by step, and the ends of micro-batches."""
        lengths = self.at_places(self.lengths)
        per_step = self.documents_per_step or 1
        per_rank = max(per_step // self.num_ranks, 1)
        order = document_order(self.sampling, lengths, self.seed, self.epoch, per_rank)
        order = order[: self.num_used]
        if self.stages is not None:
            order = order[np.argsort(self.stages[order], kind="stable")]
        if not self.divide_by_cost:
            per_batch = max(per_step // self.slots, 1)
            return order, padded_batches(len(order), per_batch, self.num_ranks)
        costs = lengths + self.attention_cost * lengths.astype(float) ** 2
        num_full = len(order) // per_step * per_step
        parts = []
        sizes = []
        for steps in (order[:num_full].reshape(-1, per_step), order[num_full:][None]):
            if steps.size:
                of_rank = -(-steps.shape[1] * self.accumulation // per_step)
                at, found = equal_cost(costs[steps], self.num_ranks * of_rank)
                parts.append(np.take_along_axis(steps, at, 1).ravel())
                sizes.append(found.ravel())
        return np.concatenate(parts), np.cumsum(np.concatenate(sizes))


def attention_cost(hidden_size: int | None) -> float:
    """Return c in the cost of documents, tokens + c · Σ len², for a model shaped like a Llama."""
    return 1 / (12 * hidden_size) if hidden_size else 0.0
