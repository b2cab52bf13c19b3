"""Arrange the bins of an epoch in optimizer steps, and these in micro-batches.

bins            in random order, the full steps balanced (balance.py)
of a mixture    exchanged between steps until all hold their share of each source (fair_steps.py)
full steps      slots × bins_per_batch bins each; a slot is one micro-batch of one rank
last step       the remaining bins, split until every rank has equally many micro-batches
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from heapq import heapify, heappop, heappush

import numpy as np

from trl_packing.packing.balance import COSTLY_FROM, arranged, balanced_order
from trl_packing.packing.bins import PackingPlan
from trl_packing.packing.curriculum import balanced_in_stages, in_stages
from trl_packing.packing.fair_steps import excess_of_bins, exchange_between_steps


@dataclass(frozen=True, eq=False)
class PackedSteps:
    """The micro-batches of all ranks in an epoch; documents are looked up on access.

    Attributes:
        plan: the bins of the epoch.
        bins: bins of each micro-batch of the full steps, (micro-batches, bins_per_batch).
        last: documents of each micro-batch of the last step.
    """

    plan: PackingPlan
    bins: np.ndarray
    last: list[np.ndarray]

    def __len__(self) -> int:
        return len(self.bins) + len(self.last)

    def __iter__(self) -> Iterator[np.ndarray]:
        return (self[i] for i in range(len(self)))

    def most_documents(self) -> int:
        """Return the largest number of documents in a micro-batch."""
        in_full = np.diff(self.plan.offsets)[self.bins].sum(1)
        return max(int(in_full.max(initial=0)), max(map(len, self.last), default=0))

    def documents_in_first(self, number: int) -> np.ndarray:
        """Return the documents of the first `number` micro-batches, in any order."""
        is_taken = np.zeros(len(self.plan), bool)
        is_taken[self.bins[:number]] = True
        in_full = self.plan.indices[np.repeat(is_taken, np.diff(self.plan.offsets))]
        return np.concatenate([in_full, *self.last[: max(number - len(self.bins), 0)]])

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the documents of a micro-batch."""
        if index >= len(self.bins):
            return self.last[index - len(self.bins)]
        return np.concatenate([self.plan[i] for i in self.bins[index]])


def steps_from_plan(
    plan: PackingPlan,
    lengths: np.ndarray,
    *,
    num_ranks: int,
    accumulation: int,
    bins_per_batch: int,
    attention_cost: float,
    balance_window: int,
    rng: np.random.Generator | None,
    squares: np.ndarray | None = None,
    stages: np.ndarray | None = None,
    image_costs: np.ndarray | None = None,
    sources: np.ndarray | None = None,
) -> PackedSteps:
    """Return the micro-batches of an epoch.

    The remaining bins form the last step: as few micro-batches per rank as hold them, of equal
    size. Each step's bins therefore depend on ranks × accumulation alone.

    Args:
        plan: the bins of the epoch.
        lengths: tokens of each document, (documents,) integers.
        num_ranks: data-parallel ranks.
        accumulation: micro-batches that a rank accumulates in a step.
        bins_per_batch: bins in a micro-batch.
        attention_cost: c in the cost of a bin, tokens + c · Σ len².
        balance_window: steps that exchange bins, as in `balanced_order`.
        rng: shuffles the bins; None keeps the order of the plan.
        squares: len² of each document, where it computes less than all of its pairs of tokens.
        stages: of each document, whose bins come stage after stage; None draws all bins at once.
        image_costs: of the vision tower for each document, in tokens; None without images.
        sources: of each document of a mixture, (documents,) integers, which `rng` then shuffles;
            None without a mixture.
    """
    slots = num_ranks * accumulation
    bins = np.arange(len(plan)) if rng is None else rng.permutation(len(plan))
    if stages is not None:
        stages = stages[plan.indices[plan.offsets[:-1]]]  # of each bin
        bins = in_stages(bins, stages)
    num_full = len(bins) - len(bins) % (slots * bins_per_batch)
    full, left = bins[:num_full].reshape(-1, bins_per_batch), bins[num_full:]
    if rng is not None and len(full):
        balance = balanced_order
        if stages is not None:
            balance = partial(balanced_in_stages, stages=stages[bins])
        costs = _costs(plan, lengths, attention_cost, squares, image_costs)
        order = balance(
            costs[bins],
            tokens=plan.tokens[bins],
            documents=np.diff(plan.offsets)[bins],
            slots=slots,
            bins_per_batch=bins_per_batch,
            window=balance_window,
            rng=rng,
        )
        full = bins[order].reshape(full.shape)
        if sources is not None:
            bins = np.concatenate([full.ravel(), left])
            bins = _fair(bins, slots * bins_per_batch, plan, lengths, sources, costs, rng)
            steps = bins[:num_full].reshape(-1, slots * bins_per_batch)
            full, left = arranged(steps, costs, slots).reshape(full.shape), bins[num_full:]
    num_last = -(-len(left) // (bins_per_batch * num_ranks)) * num_ranks
    return PackedSteps(plan, full, _dealt_evenly([plan[i] for i in left], num_last))


def _fair(
    bins: np.ndarray,
    size: int,
    plan: PackingPlan,
    lengths: np.ndarray,
    sources: np.ndarray,
    costs: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return `bins` in steps of `size` that hold about equal shares of each source."""
    bin_of = np.repeat(np.arange(len(plan)), np.diff(plan.offsets))
    documents = plan.indices
    # Bins of ordinary cost change places whatever they cost, as in balance.py; costly bins if their
    # costs differ by less than 1 % of the median.
    median = int(np.median(costs))
    ordinary = int(COSTLY_FROM * median)
    return exchange_between_steps(
        bins,
        size,
        excess=excess_of_bins(sources[documents], lengths[documents], bin_of, len(plan)),
        keys=np.maximum(costs, ordinary) // max(ordinary - median, 1),
        rng=rng,
    )


def with_more_bins(plan: PackingPlan, lengths: np.ndarray, number: int) -> PackingPlan:
    """Return `plan` with the fullest bins split until there are `number`; more stay as they are.

    Args:
        plan: the bins of an epoch.
        lengths: tokens of each document, (documents,) integers.
        number: bins that are wanted.
    """
    if len(plan) >= number:
        return plan
    bins = split_bins(plan, number)
    indices, sizes = np.concatenate(bins), np.array([*map(len, bins)], np.int64)
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    tokens = np.add.reduceat(lengths[indices], offsets[:-1], dtype=np.int64)
    return PackingPlan(indices, offsets, tokens, plan.capacity)


def _costs(
    plan: PackingPlan,
    lengths: np.ndarray,
    attention_cost: float,
    squares: np.ndarray | None,
    image_costs: np.ndarray | None,
) -> np.ndarray:
    """Return tokens + c · Σ len² + the tower's cost of each bin, in whole tokens."""
    if squares is None:
        squares = lengths[plan.indices].astype(np.int64)
        squares *= squares
    else:
        squares = squares[plan.indices]
    squares = np.add.reduceat(squares, plan.offsets[:-1])
    costs = plan.tokens + (attention_cost * squares).astype(np.int64)
    if image_costs is None:
        return costs
    return costs + np.add.reduceat(image_costs[plan.indices], plan.offsets[:-1])


def _dealt_evenly(bins: list[np.ndarray], number: int) -> list[np.ndarray]:
    """Return `number` micro-batches of about equally many bins, split if there are too few."""
    bins = split_bins(bins, number)
    sizes = [(len(bins) + i) // number for i in reversed(range(number))]
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [_concatenated(bins[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def _concatenated(bins: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(bins) if bins else np.empty(0, dtype=np.int64)


def split_bins(
    bins: Iterable[np.ndarray], number: int, *, repeatedly: bool = True
) -> list[np.ndarray]:
    """Return `number` bins by halving the fullest ones; fewer where all hold one document.

    Args:
        bins: documents of each bin.
        number: bins that are wanted. Bins that are more stay as they are.
        repeatedly: A half may be halved again. If False, each bin is halved at most once.

    Examples:
        >>> bins = [np.arange(5), np.array([5])]
        >>> [documents.tolist() for documents in split_bins(bins, 4)]
        [[0, 1], [5], [2], [3, 4]]
    """
    bins = list(bins)
    fullest = [(-len(documents), at) for at, documents in enumerate(bins)]
    heapify(fullest)  # of equally full bins, the first comes first
    while len(bins) < number and fullest:
        size, at = heappop(fullest)
        half = -size // 2
        if not half:
            break
        bins.append(bins[at][half:])
        bins[at] = bins[at][:half]
        if repeatedly:
            for new in (at, len(bins) - 1):
                heappush(fullest, (-len(bins[new]), new))
    return bins
