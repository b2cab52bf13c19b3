"""From document lengths to the micro-batches of one data-parallel rank, anew every epoch.

    an epoch    [ m0 m1 | m2 m3 ] [ m4 m5 | m6 m7 ] ...     micro-batches, in the order of training
                  └ slot ┘          ranks × accumulation of them make an optimizer step
    rank r takes m_r, m_(r + ranks), ...

Which micro-batches make a step depends on ranks × accumulation alone, so 1 rank × 4, 2 × 2 and
4 × 1 train the same steps. Every rank computes the same epoch from (lengths, seed, epoch) and takes
its part: no communication, every document exactly once, equally many micro-batches on every rank.
The micro-batches of a slot run at the same moment, and cost about the same (balance.py).
"""

import heapq
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from transformers.trainer_pt_utils import BatchRebalanceSampler

from trl_packing.packing.bins import PackingPlan, find_strategy, pack
from trl_packing.packing.document_order import document_order
from trl_packing.packing.epoch import PackedSteps, steps_from_plan


class PackedBatchSampler(BatchRebalanceSampler):
    """Yield the document indices of each micro-batch of one rank.

    It subclasses transformers' `BatchRebalanceSampler`, because that is how `Trainer` knows a batch
    sampler that is aware of ranks: it then leaves accelerate's sharding out and calls `set_epoch`.

    lengths: tokens of every document.
    capacity: tokens a bin may hold. A micro-batch is `bins_per_batch` bins.
    documents_per_step: instead of packing into bins, take exactly so many documents every optimizer
        step (the last of an epoch may be smaller) and cut them into micro-batches of equal cost.
        They are the documents of a padded run with steps of that size (document_order).
    rows: every document is a bin of its own, kept as it is (rows that were packed before).
    num_ranks, rank, accumulation: data-parallel ranks, which one this is, micro-batches of a step.
    strategy, seed: as in `pack`; the seed of an epoch is (seed, epoch). "wrapped" fills bins with
        documents in data-set order, so that pieces cut where rows end fill them again.
    shuffle: False keeps the data set's order and the same bins every epoch (evaluation).
    sampling: with documents_per_step, the `train_sampling_strategy` by which transformers draws
        documents: "random", "group_by_length", "batch_rebalance" or "sequential".
    attention_cost: c in the cost of a micro-batch, tokens + c · Σ len².
    balance_window: optimizer steps among which bins are exchanged, where random steps would make
        ranks wait: so that the micro-batches that run at the same moment cost about the same, and
        the mean document length of steps varies no more than at random. 1 keeps steps random, and
        arranges their micro-batches only. benchmarks/results/balance.md measures the default.
    drop_last: with documents_per_step, leave out of each epoch the documents (others every epoch)
        that do not fill a padded run's last micro-batch, as `dataloader_drop_last` asks.
    allow_idle_ranks: let ranks without documents run empty micro-batches (evaluation, the rest of
        an epoch).

    When micro-batches do not divide evenly by ranks, bins of the last step are split until they do;
    where every bin holds one document, the last micro-batches are empty, and `PackedCollator` makes
    one masked token of each: nothing is dropped, repeated, or put beyond capacity.

    Raises ValueError for fewer documents than ranks, unless `allow_idle_ranks`.
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
    ):
        self.lengths = np.asarray(lengths)
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
            self.documents_multiple_of = self._documents_kept_together(documents_per_step)
        self.num_used = len(self.lengths) // self.documents_multiple_of * self.documents_multiple_of
        self._check(allow_idle_ranks)
        self._epoch_drawn: int | None = None
        self._plan: PackingPlan | None = None
        self._plan_epoch: int | None = None
        self._steps: PackedSteps | None = None
        self.resumed_epoch: ResumedEpoch | None = None
        self.num_bins = None if documents_per_step else len(self._plan_of(0))

    def _check(self, allow_idle_ranks: bool) -> None:
        if not self.documents_per_step and not self.rows and self.capacity is None:
            raise ValueError(
                "capacity is None; set the tokens a bin may hold, or documents_per_step to batch "
                "without packing"
            )
        for name in ("bins_per_batch", "num_ranks", "accumulation", "balance_window"):
            if getattr(self, name) < 1:
                raise ValueError(f"{name}={getattr(self, name)} must be at least 1")
        if not 0 <= self.rank < self.num_ranks:
            raise ValueError(f"rank={self.rank} is not one of {self.num_ranks} ranks")
        if len(self.lengths) < self.num_ranks and not allow_idle_ranks:
            raise ValueError(
                f"{len(self.lengths)} documents cannot keep {self.num_ranks} ranks busy; "
                "use fewer processes or more documents"
            )
        if not self.num_used:
            raise ValueError(
                f"{len(self.lengths)} documents do not fill one micro-batch of every rank, and "
                "dataloader_drop_last=True drops what does not; set it to False"
            )
        if self.documents_per_step is not None and self.documents_per_step < self._slots:
            raise ValueError(
                f"documents_per_step={self.documents_per_step} is less than one document for each "
                f"of {self.num_ranks} ranks × {self.accumulation} accumulated micro-batches; "
                "raise it or lower gradient_accumulation_steps"
            )

    def _documents_kept_together(self, documents_per_step: int) -> int:
        """Return of how many documents a padded run that drops the last ones trains multiples."""
        if self.sampling == "batch_rebalance":
            return documents_per_step
        return max(documents_per_step // self.accumulation, 1)

    @property
    def _slots(self) -> int:
        return self.num_ranks * self.accumulation

    @property
    def tokens_per_batch(self) -> int | None:
        """Return the tokens that a micro-batch has room for, None where it is no bins."""
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
        full, rest = divmod(self.num_used, self.documents_per_step)
        return full * self.accumulation + self._micro_batches_of(rest)

    def __iter__(self) -> Iterator[list[int]]:
        if self.resumed_epoch is not None and self.epoch == self.resumed_epoch.epoch:
            yield from self.resumed_epoch
            return
        if self.documents_per_step is not None:
            yield from self._iterate_steps()
            return
        steps = self._packed_steps()
        for at in range(self.rank, len(steps), self.num_ranks):
            yield steps[at].tolist()

    def micro_batches(self) -> list[np.ndarray]:
        """Return the document indices of all ranks' micro-batches of this epoch, in order."""
        if self.documents_per_step is not None:
            return [np.asarray(g) for step in range(self._num_steps) for g in self._groups(step)]
        return list(self._packed_steps())

    def documents_in_first_steps(self, number: int) -> np.ndarray:
        """Return the documents of this epoch's first `number` optimizer steps, in any order."""
        if self.documents_per_step is not None:
            return self._drawn_order()[: number * self.documents_per_step]
        return self._packed_steps().documents_in_first(number * self._slots)

    def most_documents(self) -> int:
        """Return the documents of the micro-batch that has most of them, in this epoch."""
        if self.documents_per_step is not None:
            return max(map(len, self.micro_batches()))
        return self._packed_steps().most_documents()

    # --- packed: a micro-batch is bins --------------------------------------------------------

    def _plan_of(self, epoch: int) -> PackingPlan:
        """Return the bins of an epoch, and keep them: the constructor has asked for the first."""
        is_fixed = self.rows or find_strategy(self.strategy).order_dependent
        same_bins = is_fixed or not self.shuffle
        epoch = 0 if same_bins else epoch
        if self._plan is None or self._plan_epoch != epoch:
            self._plan, self._plan_epoch = self._planned(epoch), epoch
        return self._plan

    def _planned(self, epoch: int) -> PackingPlan:
        if self.rows or self.capacity is None:
            number = len(self.lengths)
            longest = int(self.lengths.max(initial=0))
            tokens = self.lengths.astype(np.int64)
            return PackingPlan(np.arange(number), np.arange(number + 1), tokens, longest)
        seed = (self.seed, epoch) if self.shuffle else None
        return pack(self.lengths, self.capacity, self.strategy, seed)

    def _packed_steps(self) -> PackedSteps:
        if self._steps is None or self._epoch_drawn != self.epoch:
            self._steps = steps_from_plan(
                self._plan_of(self.epoch),
                self.lengths,
                num_ranks=self.num_ranks,
                accumulation=self.accumulation,
                bins_per_batch=self.bins_per_batch,
                # How long the documents inside a row are is not known here.
                attention_cost=0.0 if self.rows else self.attention_cost,
                balance_window=self.balance_window,
                rng=np.random.default_rng((self.seed, self.epoch)) if self.shuffle else None,
            )
            self._epoch_drawn = self.epoch
        return self._steps

    # --- by documents: a step is `documents_per_step` documents -------------------------------

    @property
    def _num_steps(self) -> int:
        assert self.documents_per_step is not None
        return -(-self.num_used // self.documents_per_step)

    def _micro_batches_of(self, num_documents: int) -> int:
        """Return the micro-batches per rank of a step with so many documents."""
        assert self.documents_per_step is not None
        return -(-num_documents * self.accumulation // self.documents_per_step)

    def steps(self) -> Iterator[list[list[int]]]:
        """Yield the micro-batches of all ranks, step by step."""
        return map(self._groups, range(self._num_steps))

    def _iterate_steps(self) -> Iterator[list[int]]:
        for groups in self.steps():
            yield from groups[self.rank :: self.num_ranks]

    def _groups(self, step: int) -> list[list[int]]:
        assert self.documents_per_step is not None
        start = step * self.documents_per_step
        chosen = self._drawn_order()[start : start + self.documents_per_step]
        num_groups = self._micro_batches_of(len(chosen)) * self.num_ranks
        lengths = self.lengths[chosen].astype(float)
        return _equal_cost(chosen, lengths + self.attention_cost * lengths**2, num_groups)

    def _drawn_order(self) -> np.ndarray:
        """Return the documents of this epoch in the order of training."""
        assert self.documents_per_step is not None
        if self._epoch_drawn != self.epoch:
            self._order = document_order(
                self.sampling,
                self.lengths,
                seed=self.seed,
                epoch=self.epoch,
                documents_per_rank=max(self.documents_per_step // self.num_ranks, 1),
            )
            self._epoch_drawn = self.epoch
        return self._order[: self.num_used]


@dataclass(frozen=True, eq=False)
class ResumedEpoch:
    """The micro-batches of an epoch that began under other settings (resuming.py).

    epoch: the one that is continued; all later ones are whole.
    documents: those that it has left to train, (left,) int64.
    sampler: of `documents`, by their place among them.
    num_skipped: micro-batches of a rank that stand for the documents trained before. They are
        empty and come first: `Trainer` skips as many, and counts the epoch from there.
    """

    epoch: int
    documents: np.ndarray
    sampler: PackedBatchSampler
    num_skipped: int

    def __len__(self) -> int:
        return self.num_skipped + len(self.sampler)

    def __iter__(self) -> Iterator[list[int]]:
        yield from ([] for _ in range(self.num_skipped))
        for places in self.sampler:
            yield self.documents[places].tolist()


def _equal_cost(documents: np.ndarray, costs: np.ndarray, num_groups: int) -> list[list[int]]:
    """Return `num_groups` groups of about equal cost: the costliest first, into the cheapest group.

    Longest processing time first (Graham 1969): within 4/3 of the best possible maximum.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    cheapest = [(0.0, group) for group in range(num_groups)]
    for i in np.argsort(-costs, kind="stable").tolist():
        cost, group = heapq.heappop(cheapest)
        groups[group].append(int(documents[i]))
        heapq.heappush(cheapest, (cost + costs[i], group))
    return groups


def attention_cost(hidden_size: int | None) -> float:
    """Return c in the cost of documents, tokens + c · Σ len², for a model of a Llama's shape."""
    return 1 / (12 * hidden_size) if hidden_size else 0.0
