"""From document lengths to the micro-batches of one data-parallel rank, newly drawn every epoch.

    an epoch    [ m0 m1 | m2 m3 ] [ m4 m5 | m6 m7 ] ...     micro-batches, in the order of training
                  └ slot ┘          ranks × accumulation of them make an optimizer step
    rank r takes m_r, m_(r + ranks), ...

The micro-batches of a step depend on ranks × accumulation alone, so 1 rank × 4, 2 × 2 and 4 × 1
train the same steps. Every rank computes the same epoch from (lengths, seed, epoch) and takes its
part of it: no communication, every document exactly once, equally many micro-batches on every rank.
The micro-batches of a slot run at the same moment and cost about the same (balance.py).

An epoch of a mixture has places instead: a document that it draws twice has two of them (draw.py).
Bins and steps are made of places, and micro-batches are yielded as documents.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from trl_packing.packing.bins import PackingPlan
from trl_packing.packing.curriculum import in_stages
from trl_packing.packing.document_order import document_order
from trl_packing.packing.document_steps import DocumentSteps, micro_batches_per_rank
from trl_packing.packing.draw import MixtureDraw
from trl_packing.packing.epoch import PackedSteps, steps_from_plan
from trl_packing.packing.epoch_bins import EpochBins
from trl_packing.packing.group_order import keep_groups_together
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.packing.places import EpochPlaces
from trl_packing.packing.prefix_groups import PrefixGroups


class PackedBatchSampler(BatchRebalanceSampler):
    """Yield the document indices of each micro-batch of one rank.

    It subclasses transformers' `BatchRebalanceSampler` because `Trainer` recognizes rank-aware
    batch samplers by that class. `Trainer` then skips accelerate's sharding and calls `set_epoch`.

    If micro-batches do not divide evenly by ranks, bins of the last step are split until they do.
    If every bin holds one document, the last micro-batches are empty, and `PackedCollator` makes
    one masked token of each. No document is dropped or repeated, and no bin exceeds its capacity.

    Args:
        lengths: tokens of every document, (documents,) integers.
        capacity: tokens that a bin may hold.
        bins_per_batch: bins in a micro-batch.
        documents_per_step: Instead of packing into bins, take this many documents in every
            optimizer step (the last step of an epoch may be smaller) and cut them into
            micro-batches of equal cost. They are the documents of a padded run with steps of that
            size (document_order.py).
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
            ranks wait. Afterwards, micro-batches that run at the same moment cost about the same,
            and the mean document length of steps varies no more than at random. 1 keeps steps
            random and only arranges their micro-batches. benchmarks/results/balance.md measures the
            default.
        drop_last: with documents_per_step, leave out the documents that do not fill a padded run's
            last micro-batch (others every epoch), as `dataloader_drop_last` does.
        allow_idle_ranks: Ranks without documents run empty micro-batches (evaluation, the remainder
            of an epoch).
        groups: Documents with common prefixes that share a bin, whose tokens are then those that
            rows with shared prefixes compute. With documents_per_step they come in one step, which
            therefore holds other documents than that of a padded run.
        draw: the documents that each epoch of a mixture draws; None draws every document once.
        epochs: With `draw`, epochs that get equally many bins, as many as the fullest of them
            needs. Bins of the others are split until there are as many.
        stages: of each document, (documents,) integers: those of a stage come after those of the
            stages before it, and share bins only with each other (curriculum.py).
        loads: Images of the documents: bins are limited by their patches, too, and the tower is
            part of the cost of a micro-batch.

    Raises:
        ValueError: an argument is out of range, or there are fewer documents than ranks without
            `allow_idle_ranks`.
    """

    def __init__(
        self,
        lengths: Sequence[int] | np.ndarray,
        capacity: int | None = None,
        *,
        bins_per_batch: int = 1,
        documents_per_step: int | None = None,
        rows: bool = False,
        num_ranks: int = 1,
        rank: int = 0,
        accumulation: int = 1,
        strategy: str = "bfd",
        seed: int = 0,
        shuffle: bool = True,
        sampling: str = "random",
        attention_cost: float = 0.0,
        balance_window: int = 64,
        drop_last: bool = False,
        allow_idle_ranks: bool = False,
        groups: PrefixGroups | None = None,
        draw: MixtureDraw | None = None,
        epochs: int = 1,
        stages: np.ndarray | None = None,
        loads: ImageLoads | None = None,
    ):
        self.lengths = np.asarray(lengths)
        self.groups = groups
        self.draw = draw
        self.epochs = epochs
        self.stages = stages
        self.loads = loads
        self.capacity = capacity
        self.bins_per_batch = bins_per_batch
        self.documents_per_step = documents_per_step
        self.rows = rows
        self.num_ranks = num_ranks
        self.rank = rank
        self.accumulation = accumulation
        self.strategy = strategy
        self.seed = seed
        self.shuffle = shuffle
        self.sampling = sampling if shuffle else "sequential"
        self.attention_cost = attention_cost
        self.balance_window = balance_window
        self.epoch = 0
        self.documents_multiple_of = 1  # an epoch leaves out the documents beyond a multiple of it
        if drop_last and documents_per_step:
            self.documents_multiple_of = self._documents_of_a_padded_batch(documents_per_step)
        self.places = EpochPlaces(self.lengths, draw)
        self.num_drawn = len(self.places)
        self.num_used = self.num_drawn // self.documents_multiple_of * self.documents_multiple_of
        self._check(allow_idle_ranks)
        self._steps: PackedSteps | DocumentSteps | None = None
        self._steps_epoch: int | None = None
        self.resumed_epoch: ResumedEpoch | None = None
        self._bins: EpochBins | None = None
        if not documents_per_step:
            self._bins = EpochBins(
                self.lengths,
                None if rows else capacity,
                self.places,
                strategy=strategy,
                seed=seed,
                shuffle=shuffle,
                epochs=epochs,
                groups=groups,
                stages=stages,
                loads=loads,
            )

    def _check(self, allow_idle_ranks: bool) -> None:
        if not self.documents_per_step and not self.rows and self.capacity is None:
            raise ValueError(
                "capacity is None; set the tokens a bin may hold, or documents_per_step to batch "
                "without packing"
            )
        for name in ("bins_per_batch", "num_ranks", "accumulation", "balance_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if self.rows and not (self.groups is None and self.draw is None):
            raise ValueError(
                "rows that were packed before stay as they are; leave groups and draw out"
            )
        if self.groups is not None and self.stages is not None:
            raise ValueError("groups bring documents of several stages together; leave one out")
        if self.draw is not None and not (self.groups is self.stages is None and self.shuffle):
            raise ValueError(
                "a mixture draws single documents in random order; leave groups and stages out"
            )
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank={self.rank} is not one of {self.num_ranks} ranks")
        if self.num_drawn < self.num_ranks and not allow_idle_ranks:
            raise ValueError(
                f"{self.num_drawn} documents cannot keep {self.num_ranks} ranks busy; "
                "use fewer processes or more documents"
            )
        if not self.num_used:
            raise ValueError(
                f"{self.num_drawn} documents do not fill one micro-batch of every rank, and "
                "dataloader_drop_last=True drops what does not; set it to False"
            )
        if self.documents_per_step is not None and self.documents_per_step < self._slots:
            raise ValueError(
                f"documents_per_step={self.documents_per_step} is less than one document for each "
                f"of {self.num_ranks} ranks × {self.accumulation} accumulated micro-batches; "
                "raise it or lower gradient_accumulation_steps"
            )

    def _documents_of_a_padded_batch(self, documents_per_step: int) -> int:
        """Return the documents that a padded run's dataloader drops or keeps together."""
        if self.sampling == "batch_rebalance":
            return documents_per_step
        return max(documents_per_step // self.accumulation, 1)

    @property
    def _slots(self) -> int:
        return self.num_ranks * self.accumulation

    @property
    def num_bins(self) -> int | None:
        """Return the bins of an epoch; None if nothing is packed into bins."""
        return None if self._bins is None else self._bins.number

    @property
    def tokens_per_batch(self) -> int | None:
        """Return the capacity of a micro-batch in tokens, None if micro-batches are not bins."""
        if self.documents_per_step is not None or self.capacity is None:
            return None
        return self.bins_per_batch * self.capacity

    def set_epoch(self, epoch: int) -> None:
        """Draw epoch `epoch` on the next iteration."""
        self.epoch = epoch

    def __len__(self) -> int:
        """Return this rank's micro-batches per epoch, the same every epoch and on every rank."""
        if self.documents_per_step is None:
            assert self.num_bins is not None
            return -(-self.num_bins // (self.bins_per_batch * self.num_ranks))
        full, left = divmod(self.num_used, self.documents_per_step)
        in_last = micro_batches_per_rank(left, self.documents_per_step, self.accumulation)
        return full * self.accumulation + in_last

    def __iter__(self) -> Iterator[list[int]]:
        if self.resumed_epoch is not None and self.epoch == self.resumed_epoch.epoch:
            yield from self.resumed_epoch
        elif self.documents_per_step is not None:
            for micro_batches in self.steps():
                yield from micro_batches[self.rank :: self.num_ranks]
        else:
            packed = self._packed_steps()
            if len(packed) != len(self) * self.num_ranks:
                raise RuntimeError(
                    f"epoch {self.epoch} of the mixture needs {len(packed):,} micro-batches, but "
                    f"only {self.epochs:,} epochs were planned, of {len(self) * self.num_ranks:,}"
                )
            for at in range(self.rank, len(packed), self.num_ranks):
                yield self.documents_at(packed[at]).tolist()

    def documents_at(self, places: Sequence[int] | np.ndarray) -> np.ndarray:
        """Return the documents at some places of this epoch; without a mixture, they are equal."""
        return self.places.documents_at(np.asarray(places), self.epoch)

    def micro_batches(self) -> list[np.ndarray]:
        """Return the document indices of all ranks' micro-batches of this epoch, in order."""
        if self.documents_per_step is not None:
            return [np.asarray(documents, np.int64) for step in self.steps() for documents in step]
        return [self.documents_at(places) for places in self._packed_steps()]

    def some_micro_batches(self, number: int) -> list[np.ndarray]:
        """Return about `number` of them, evenly spread over the epoch; all if there are fewer."""
        if self.documents_per_step is None:
            packed = self._packed_steps()
            some = [packed[at] for at in _evenly_spread(len(packed), number)]
        else:
            steps = self._document_steps()
            chosen = _evenly_spread(len(steps), -(-number // self._slots))
            some = [np.asarray(places) for at in chosen for places in steps[at]]
        return [self.documents_at(places) for places in some]

    def plan(self) -> PackingPlan | None:
        """Return the bins of this epoch; None with documents_per_step."""
        if self._bins is None:
            return None
        plan = self._bins.plan(self.epoch)
        return plan if self.draw is None else replace(plan, indices=self.documents_at(plan.indices))

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of all ranks, step by step, with documents_per_step."""
        for step in self._document_steps():
            yield [self.documents_at(places).tolist() for places in step]

    def tokens_of(self, batches: Sequence[Sequence[int] | np.ndarray]) -> np.ndarray:
        """Return the tokens of micro-batches ``(M,)``: those that rows of `groups` compute."""
        documents = np.concatenate([np.asarray(batch, np.int64) for batch in batches])
        offsets = np.cumsum([0, *map(len, batches)])
        if self.groups is not None:
            return self.groups.index.computed_tokens(self.lengths, documents, offsets)
        running = np.concatenate([[0], np.cumsum(self.lengths[documents], dtype=np.int64)])
        return np.diff(running[offsets])

    def places_in_first_steps(self, number: int) -> np.ndarray:
        """Return the places of this epoch's first `number` optimizer steps, in any order."""
        if self.documents_per_step is not None:
            return np.asarray(self._document_steps().documents_in_first(number), np.int64)
        return np.asarray(self._packed_steps().documents_in_first(number * self._slots), np.int64)

    def most_documents(self) -> int:
        """Return the largest number of documents in a micro-batch of this epoch."""
        if self.documents_per_step is not None:
            return max(map(len, self.micro_batches()))
        return self._packed_steps().most_documents()

    def tokens_of_bins(self) -> int | None:
        """Return the tokens in all bins of epoch 0; None if nothing is packed into bins.

        With `groups` they are those that rows with shared prefixes compute.
        """
        return None if self._bins is None else int(self._bins.plan(0).tokens.sum())

    def groups_per_step(self) -> float | None:
        """Return the mean number of `groups` with a document in a step; None without groups."""
        if self.groups is None:
            return None
        if self.documents_per_step is None:  # a group lies in one bin
            return len(self.groups.tokens) / -(-len(self) // self.accumulation)
        steps = self._document_steps()
        step = np.arange(len(steps.order)) // self.documents_per_step
        numbers = step * len(self.groups.tokens) + self.groups.numbers[steps.order]
        return len(np.unique(numbers)) / len(steps)

    def documents_by_bin(self) -> np.ndarray | None:
        """Return the number of documents in each bin of epoch 0, None if nothing is packed here."""
        if self._bins is None or self.rows:
            return None
        return np.diff(self._bins.plan(0).offsets)

    # --- drawing an epoch ---------------------------------------------------------------------

    def _packed_steps(self) -> PackedSteps:
        assert self._bins is not None
        if not isinstance(self._steps, PackedSteps) or self._steps_epoch != self.epoch:
            self._steps = steps_from_plan(
                self._bins.plan(self.epoch),
                self.places.lengths(self.epoch),
                num_ranks=self.num_ranks,
                accumulation=self.accumulation,
                bins_per_batch=self.bins_per_batch,
                # The lengths of documents inside rows are not known here.
                attention_cost=0.0 if self.rows else self.attention_cost,
                balance_window=self.balance_window,
                rng=np.random.default_rng((self.seed, self.epoch)) if self.shuffle else None,
                squares=None if self.groups is None else self.groups.squares,
                stages=self.stages,
                image_costs=self._image_costs(),
                sources=self._sources(),
            )
            self._steps_epoch = self.epoch
        return self._steps

    def _document_steps(self) -> DocumentSteps:
        assert self.documents_per_step is not None
        if not isinstance(self._steps, DocumentSteps) or self._steps_epoch != self.epoch:
            lengths = self.places.lengths(self.epoch)
            if self.draw is None or self.sampling == "group_by_length":
                order = document_order(
                    self.sampling,
                    lengths,
                    seed=self.seed,
                    epoch=self.epoch,
                    documents_per_rank=max(self.documents_per_step // self.num_ranks, 1),
                )
            else:
                order = self.places.fair_order(self.epoch, self.documents_per_step)
            order = order[: self.num_used]
            if self.stages is not None:
                order = in_stages(order, self.stages)
            if self.groups is not None:
                order = keep_groups_together(order, self.groups, self.documents_per_step)
            self._steps = DocumentSteps(
                order,
                lengths,
                self.documents_per_step,
                self.num_ranks,
                self.accumulation,
                self.attention_cost,
                self.groups,
                self._image_costs(),
            )
            self._steps_epoch = self.epoch
        return self._steps

    def _sources(self) -> np.ndarray | None:
        """Return the source at each place of this epoch; None without a mixture."""
        draw = self.draw
        return None if draw is None else self.places.values(draw.source_ids, self.epoch)

    def _image_costs(self) -> np.ndarray | None:
        """Return the cost of the images at each place of this epoch; None without images."""
        return None if self.loads is None else self.places.values(self.loads.costs, self.epoch)


def _evenly_spread(total: int, number: int) -> list[int]:
    """Return up to `number` of `total` places, first and last among them."""
    return np.linspace(0, total - 1, min(number, total)).astype(int).tolist()


@dataclass(frozen=True, eq=False)
class ResumedEpoch:
    """The micro-batches of an epoch that began under other settings (training/resuming.py).

    Attributes:
        epoch: the epoch that is continued; all later ones are whole.
        places: places of the epoch that are not trained yet, (places,) int64.
        documents: the document at each of them, (places,) int64.
        sampler: draws micro-batches of `documents`, by position.
        num_skipped: a rank's micro-batches in place of the documents trained before. They are empty
            and come first: `Trainer` skips this many and counts the epoch's progress from there.
    """

    epoch: int
    places: np.ndarray
    documents: np.ndarray
    sampler: PackedBatchSampler
    num_skipped: int

    def __len__(self) -> int:
        return self.num_skipped + len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([] for _ in range(self.num_skipped))
        for positions in self.sampler:
            yield self.documents[positions].tolist()


def attention_cost(hidden_size: int | None) -> float:
    """Return c in the cost of documents, tokens + c · Σ len², for a model shaped like a Llama."""
    return 1 / (12 * hidden_size) if hidden_size else 0.0
