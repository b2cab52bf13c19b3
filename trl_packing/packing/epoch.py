"""One epoch: its documents in the order of training, cut into micro-batches and optimizer steps.

    places    0 1 2 3 4 5 6 7             of an epoch: all documents once, or those of a mixture
    bins      5 2 | 7 | 0 3 | 6 1 4       documents that share a row; or each document alone
    epoch     7 5 2 | 0 3 | 6 1 | 4       places in the order of training
    ends          3     5     7   8       of micro-batches; `slots` of them make an optimizer step

Steps depend on ranks × accumulation alone. The last one has as few micro-batches as hold what is
left, equally many on every rank.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from heapq import heapify, heappop, heappush

import numpy as np

# Documents of a padded batch with which a run is compared, unless its settings give another number.
PADDED_BATCH = 8


@dataclass(frozen=True, eq=False)
class EpochPlan:
    """The micro-batches of all ranks in an epoch; `epoch[i]` are the documents of one of them.

    `places` are in the order of training, and `documents` those at each place, ``(places,)`` int64.
    `ends`, ``(micro-batches,)`` int64, says where micro-batches end. A step has `slots` of them.
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
        last = np.arange(self.slots, len(self) + self.slots, self.slots)
        return self.ends[np.minimum(last, len(self)) - 1]

    def sums(self, values: np.ndarray) -> np.ndarray:
        """Return the sums of values of the documents of each micro-batch, ``(micro-batches,)``."""
        running = np.append(0, np.cumsum(values[self.documents], dtype=np.int64))
        return np.diff(running[self.ends], prepend=0)


def padded_batches(number: int, documents_per_batch: int, num_ranks: int) -> np.ndarray:
    """Return the ends of the micro-batches of a padded run, which takes documents in slices.

    Where transformers repeats documents for ranks without any, those of the last round are dealt.
    """
    full, left = divmod(number, documents_per_batch * num_ranks)
    if left > documents_per_batch * (num_ranks - 1):
        last = [documents_per_batch] * (num_ranks - 1)
        last.append(left - sum(last))
    else:
        last = [(left + i) // num_ranks for i in reversed(range(num_ranks))] if left else []
    return np.cumsum([documents_per_batch] * (full * num_ranks) + last, dtype=np.int64)


def padded_batch_size(batch_size: int, *, packing: bool) -> int:
    """Return the documents of a padded micro-batch with which a run is compared.

    Packing asks for one bin a micro-batch, but nobody pads batches of one document.
    """
    return PADDED_BATCH if packing and batch_size == 1 else batch_size


def equal_cost(costs: np.ndarray, number: int) -> tuple[np.ndarray, np.ndarray]:
    """Divide the elements of each row of `costs` into `number` parts of about equal cost.

    Longest processing time first (Graham 1969). Return the elements of each row, part after part,
    (steps, elements), and the number in each part, (steps, number).
    """
    by_cost = np.argsort(-costs, axis=1, kind="stable")
    part_of = np.empty_like(by_cost)
    rows = np.arange(len(costs))
    sums = np.zeros((len(costs), number))
    sizes = np.zeros((len(costs), number), np.int64)
    for at in range(costs.shape[1]):
        cheapest = sums.argmin(1)
        part_of[:, at] = cheapest
        sums[rows, cheapest] += costs[rows, by_cost[:, at]]
        sizes[rows, cheapest] += 1
    by_part = np.argsort(part_of, axis=1, kind="stable")
    return np.take_along_axis(by_cost, by_part, 1), sizes


def split_bins(bins: Iterable[np.ndarray], number: int) -> list[np.ndarray]:
    """Return `number` bins by halving the fullest ones; fewer where all hold one document.

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
        for new in (at, len(bins) - 1):
            heappush(fullest, (-len(bins[new]), new))
    return bins
