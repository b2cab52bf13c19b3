"""One epoch: its documents in the order of training, cut into micro-batches and optimizer steps.

    places    0 1 2 3 4 5 6 7             of an epoch: all documents once, or those of a mixture
    bins      5 2 | 7 | 0 3 | 6 1 4       documents that share a row; or each document alone
    epoch     7 5 2 | 0 3 | 6 1 | 4       places in the order of training
    ends          3     5     7   8       of micro-batches; `slots` of them make an optimizer step

`steps_of_bins` makes steps of equally many bins, balanced, and those of a mixture fair
(balance.py). `steps_of_documents` makes steps of equally many documents, balanced too, and
`padded_batches` the micro-batches of a padded run. Steps depend on ranks × accumulation alone. The
last one has as few micro-batches as hold what is left, equally many on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush
from itertools import pairwise

import numpy as np

from trl_packing.packing.balance import (
    COSTLY_FROM,
    arranged,
    balanced_order,
    excess_of_parts,
    exchange_between_steps,
)
from trl_packing.packing.bins import PackingPlan, ranges

# Documents of a padded batch with which a run is compared, unless its settings give another number.
PADDED_BATCH = 8

#: Places of an epoch in the order of training, and where each of its micro-batches ends.
Steps = tuple[np.ndarray, np.ndarray]


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The micro-batches of all ranks in an epoch; `epoch[i]` are the documents of one of them.

    Attributes:
        places: in the order of training, ``(places,)`` int64; without a mixture, documents.
        documents: the document at each of them, ``(places,)`` int64.
        ends: where each micro-batch ends, ``(micro-batches,)`` int64.
        slots: micro-batches of an optimizer step; the last step may have fewer.
    """

    places: np.ndarray
    documents: np.ndarray
    ends: np.ndarray
    slots: int

    def __len__(self) -> int:
        return len(self.ends)

    def __getitem__(self, index: int) -> np.ndarray:
        return self.documents[self.ends[index - 1] if index else 0 : self.ends[index]]

    @property
    def step_ends(self) -> np.ndarray:
        """Where each optimizer step ends, ``(steps,)``."""
        number = -(-len(self) // self.slots)
        return self.ends[np.minimum(np.arange(1, number + 1) * self.slots, len(self)) - 1]


# --- steps of bins ----------------------------------------------------------------------------


def arranged_bins(
    bins: PackingPlan,
    costs: np.ndarray,
    *,
    slots: int,
    bins_per_batch: int,
    window: int,
    rng: np.random.Generator | None,
    stages: np.ndarray | None = None,
    sources: np.ndarray | None = None,
    lengths: np.ndarray | None = None,
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bins of the full steps, (steps, slots, bins_per_batch), and the bins left over.

    Args:
        bins: of the places of an epoch.
        costs: of each bin, (bins,) integers.
        slots: micro-batches of a step, ranks × accumulation.
        bins_per_batch: bins in a micro-batch.
        window: steps that exchange bins, as in `balanced_order`.
        rng: shuffles the bins; None keeps the order of the plan.
        stages: of each place; bins of a stage come after those of the stages before it, and only
            they change places.
        sources: of each place of a mixture, which has `lengths` and is shuffled.
        lengths: tokens of each place of a mixture.
    """
    size, documents = slots * bins_per_batch, np.diff(bins.offsets)
    order = np.arange(len(bins)) if rng is None else rng.permutation(len(bins))
    num_full = len(order) - len(order) % size
    cuts = [0, len(order)]
    if stages is not None:
        stages = stages[bins.indices[bins.offsets[:-1]]]  # of each bin
        order = in_stages(order, stages)
        # A step with bins of two stages exchanges none: no bin of the next stage comes early.
        steps = stages[order[:num_full]].reshape(-1, size)
        is_other = (np.diff(steps[:, 0]) != 0) | (np.diff(steps[:, -1]) != 0)
        cuts = [0, *((np.flatnonzero(is_other) + 1) * size).tolist(), num_full]
    full, left = order[:num_full].reshape(-1, slots, bins_per_batch), order[num_full:]
    if rng is None or not len(full):
        return full, left
    parts = []
    for start, stop in pairwise(cuts):
        part = order[start:stop]
        numbers = costs[part], bins.tokens[part], documents[part]
        parts.append(part[balanced_order(*numbers, slots, bins_per_batch, window, rng)])
    full = np.concatenate(parts)
    if sources is None or lengths is None:
        return full, left
    # Bins of ordinary cost change places whatever they cost, as in balance.py; costly bins if their
    # costs differ by less than 1 % of the median.
    median = int(np.median(costs))
    ordinary = int(COSTLY_FROM * median)
    bin_of = np.repeat(np.arange(len(bins)), documents)
    order = exchange_between_steps(
        np.concatenate([full.ravel(), left]),
        size,
        excess=excess_of_parts(sources[bins.indices], lengths[bins.indices], bin_of, len(bins)),
        keys=np.maximum(costs, ordinary) // max(ordinary - median, 1),
        rng=rng,
    )
    return arranged(order[:num_full].reshape(-1, size), costs, slots), order[num_full:]


def in_stages(order: np.ndarray, stages: np.ndarray) -> np.ndarray:
    """Return `order` with its elements by stage; those of a stage keep their order."""
    return order[np.argsort(stages[order], kind="stable")]


def steps_of_bins(bins: PackingPlan, full: np.ndarray, left: np.ndarray, num_ranks: int) -> Steps:
    """Return the steps of an epoch of bins.

    Args:
        bins: of the places of the epoch.
        full: bins of each micro-batch of the full steps, as `arranged_bins` returns them.
        left: the other bins. They form the last step: as few micro-batches per rank as hold them,
            and bins are split if these are too few.
        num_ranks: data-parallel ranks.
    """
    number = -(-len(left) // (full.shape[-1] * num_ranks)) * num_ranks
    last = split_bins((bins[i] for i in left), number)
    held = np.array([*map(len, last)], np.int64)
    # Micro-batches of the last step have about equally many bins.
    of_last = np.array([(len(last) + i) // number for i in reversed(range(number))], np.int64)
    sizes = np.diff(bins.offsets)
    chosen = ranges(bins.offsets[full.ravel()], sizes[full.ravel()])
    places = np.concatenate([bins.indices[chosen], *last]).astype(np.int64)
    ends = np.cumsum(np.concatenate([sizes[full].sum(-1).ravel(), held]))
    before = full.shape[0] * full.shape[1]
    return places, np.append(ends[:before], np.append(0, ends)[before + np.cumsum(of_last)])


# --- steps of documents -----------------------------------------------------------------------


def padded_batches(number: int, documents_per_batch: int, num_ranks: int) -> np.ndarray:
    """Return the ends of the micro-batches of a padded run, which takes documents in slices.

    In the last round of ranks, transformers repeats documents for ranks without any. Here the
    documents of that round are dealt evenly instead; a rank is idle only if they are too few.

    Args:
        number: of documents.
        documents_per_batch: documents in a micro-batch.
        num_ranks: data-parallel ranks.
    """
    full, left = divmod(number, documents_per_batch * num_ranks)
    if left > documents_per_batch * (num_ranks - 1):
        last = [documents_per_batch] * (num_ranks - 1)
        last.append(left - sum(last))
    else:
        last = [(left + i) // num_ranks for i in reversed(range(num_ranks))] if left else []
    return np.cumsum([documents_per_batch] * (full * num_ranks) + last, dtype=np.int64)


def steps_of_documents(
    order: np.ndarray,
    costs: np.ndarray,
    *,
    documents_per_step: int,
    num_ranks: int,
    accumulation: int,
    groups: np.ndarray | None = None,
    saved: np.ndarray | None = None,
) -> Steps:
    """Return the steps of an epoch of documents, in micro-batches of about equal cost.

    Groups of documents with a common prefix come in one micro-batch where that leaves enough for
    the others.

    Args:
        order: places as they are drawn, ``(places,)``; those of a group are neighbors.
        costs: of each place alone, ``(places,)`` floats.
        documents_per_step: documents in a full step.
        num_ranks: data-parallel ranks.
        accumulation: micro-batches that a rank accumulates in a full step.
        groups: the group of each place, ``(places,)``.
        saved: with groups, the cost that each place saves behind the one before it.
    """
    num_full = len(order) // documents_per_step * documents_per_step
    parts, sizes = [np.empty(0, np.int64)], [np.empty(0, np.int64)]
    for places, per_step in ((order[:num_full], documents_per_step), (order[num_full:], 0)):
        if not len(places):
            continue
        steps = places.reshape(-1, per_step or len(places))
        per_rank = micro_batches_per_rank(steps.shape[1], documents_per_step, accumulation)
        if groups is None or saved is None:
            at, found = _equal_cost(costs[steps], num_ranks * per_rank)
            parts.append(np.take_along_axis(steps, at, 1).ravel())
            sizes.append(found.ravel())
            continue
        for step in steps:
            behind = np.where(np.diff(groups[step], prepend=-1) == 0, saved[step], 0)
            at, found = _groups_of_equal_cost(costs[step], behind, num_ranks * per_rank)
            parts.append(step[at])
            sizes.append(found)
    return np.concatenate(parts), np.cumsum(np.concatenate(sizes))


def padded_batch_size(batch_size: int, *, packing: bool) -> int:
    """Return the documents of a padded micro-batch with which a run is compared.

    One bin a micro-batch is what packing asks for; nobody pads batches of one document. So its
    padded run has `PADDED_BATCH`. Any other size is taken as it is given.

    Args:
        batch_size: bins, or documents without packing, of a micro-batch.
        packing: the run packs documents into bins.
    """
    return PADDED_BATCH if packing and batch_size == 1 else batch_size


def micro_batches_per_rank(num_documents: int, documents_per_step: int, accumulation: int) -> int:
    """Return how many micro-batches each rank runs for a step of `num_documents`."""
    return -(-num_documents * accumulation // documents_per_step)


def _equal_cost(costs: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the elements of each row of `costs` into `number` parts of about equal cost.

    Longest processing time first (Graham 1969): the costliest element to the cheapest part, within
    4/3 of the best possible maximum.

    Returns:
        The elements of each row, part after part, (steps, elements), and the elements of each part,
        (steps, number).
    """
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    part_of, rows = np.empty_like(by_cost), np.arange(len(costs))
    sums, sizes = np.zeros((len(costs), number)), np.zeros((len(costs), number), np.int64)
    for at in range(costs.shape[1]):
        cheapest = sums.argmin(1)
        part_of[:, at] = cheapest
        sums[rows, cheapest] += costs[rows, by_cost[:, at]]
        sizes[rows, cheapest] += 1
    by_part = np.argsort(part_of, axis=1, kind="stable")
    return np.take_along_axis(by_cost, by_part, 1), sizes


def _groups_of_equal_cost(costs: np.ndarray, saved: np.ndarray, number: int) -> Steps:
    """Do the same with a step of groups, each cut where it costs more than the mean micro-batch.

    Args:
        costs: of each document alone, ``(documents,)``.
        saved: what it costs less behind the one before it; 0 for the first one of a group.
        number: micro-batches of the step.
    """
    own = costs - saved
    firsts, before = np.flatnonzero(saved == 0), np.cumsum(own) - own
    within = before - np.repeat(before[firsts], np.diff(firsts, append=len(own)))
    piece = (within // (own.sum() / number)).astype(np.int64)
    is_first = (saved == 0) | (np.diff(piece, prepend=0) != 0)
    parts = split_bins(np.split(np.arange(len(own)), np.flatnonzero(is_first)[1:]), number)
    of_parts = np.array([own[part].sum() + saved[part[0]] for part in parts])
    dealt, sizes = _equal_cost(of_parts[None], number)
    held = np.cumsum([0, *(len(parts[i]) for i in dealt[0])])
    return np.concatenate([parts[i] for i in dealt[0]]), np.diff(held[np.append(0, sizes.cumsum())])


# --- more bins --------------------------------------------------------------------------------


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
