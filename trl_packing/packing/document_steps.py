"""Optimizer steps of a fixed number of documents, without bins.

    order     7 2 5 0 | 3 6 1 4 | ...                documents of a padded run, a slice a step
    step 0    [7] [2 0] [5] ...                      micro-batches of about equal cost, all ranks

The last step of an epoch may have fewer documents, and then fewer micro-batches. Groups of
documents with a common prefix come in one step, and in one micro-batch where that leaves enough for
the others (group_order.py).
"""

import heapq
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trl_packing.packing.epoch import split_bins
from trl_packing.packing.prefix_groups import PrefixGroups

# Documents of a padded batch with which a run is compared, unless its settings give another number.
PADDED_BATCH = 8


def padded_batch_size(batch_size: int, *, packing: bool) -> int:
    """Return the documents of a padded micro-batch with which a run is compared.

    One bin a micro-batch is what packing asks for; nobody pads batches of one document. So its
    padded run has `PADDED_BATCH`. Any other size is taken as it is given.

    Args:
        batch_size: bins, or documents without packing, of a micro-batch.
        packing: the run packs documents into bins.
    """
    return PADDED_BATCH if packing and batch_size == 1 else batch_size


@dataclass(frozen=True, eq=False)
class DocumentSteps:
    """The steps of an epoch, each a list of micro-batches of all ranks.

    Attributes:
        order: documents in the order of training, (documents,) integers.
        lengths: tokens of every document of the data set, (documents,) integers.
        documents_per_step: documents in a full step.
        num_ranks: data-parallel ranks.
        accumulation: micro-batches that a rank accumulates in a full step.
        attention_cost: c in the cost of a document, len + c · len².
        groups: documents with common prefixes, next to each other in `order`; None if each document
            is computed alone.
        image_costs: of the vision tower for each document, in tokens; None without images.
    """

    order: np.ndarray
    lengths: np.ndarray
    documents_per_step: int
    num_ranks: int
    accumulation: int
    attention_cost: float
    groups: PrefixGroups | None = None
    image_costs: np.ndarray | None = None

    def __len__(self) -> int:
        return -(-len(self.order) // self.documents_per_step)

    def __iter__(self) -> Iterator[list[list[int]]]:
        return (self[step] for step in range(len(self)))

    def __getitem__(self, step: int) -> list[list[int]]:
        """Return the micro-batches of a step; `num_ranks` of them run at the same moment."""
        start = step * self.documents_per_step
        documents = self.order[start : start + self.documents_per_step]
        number = self.num_ranks * micro_batches_per_rank(
            len(documents), self.documents_per_step, self.accumulation
        )
        lengths = self.lengths[documents].astype(float)
        costs = lengths + self.attention_cost * lengths**2
        if self.image_costs is not None:
            costs += self.image_costs[documents]
        if self.groups is None:
            return _equal_cost(documents, costs, number)
        depths = self.groups.depths[documents].astype(float)
        cuts = np.flatnonzero(np.diff(self.groups.numbers[documents])) + 1
        parts, costs = _parts(costs, depths + self.attention_cost * depths**2, cuts, number)
        dealt = _equal_cost(np.arange(len(parts)), costs, number)
        return [[d for i in each for d in documents[parts[i]].tolist()] for each in dealt]

    def documents_in_first(self, number: int) -> np.ndarray:
        """Return the documents of the first `number` steps."""
        return self.order[: number * self.documents_per_step]


def micro_batches_per_rank(num_documents: int, documents_per_step: int, accumulation: int) -> int:
    """Return how many micro-batches each rank runs for a step of `num_documents`."""
    return -(-num_documents * accumulation // documents_per_step)


def _parts(
    costs: np.ndarray, saved: np.ndarray, cuts: np.ndarray, number: int
) -> tuple[list[np.ndarray], np.ndarray]:
    """Return groups of a step, cut where one costs more than a mean micro-batch, and their costs.

    Args:
        costs: of each document alone, ``(documents,)``.
        saved: what it costs less behind the one before it in its group.
        cuts: places at which groups begin, but the first.
        number: micro-batches of the step.
    """
    costs_before = np.concatenate([[0], np.cumsum(costs - saved)]).tolist()

    def cost(part: np.ndarray) -> float:
        return costs_before[part[-1] + 1] - costs_before[part[0]] + saved[part[0]]

    todo = np.split(np.arange(len(costs)), cuts)[::-1]
    limit, parts = sum(map(cost, todo)) / number, []
    while todo:
        part = todo.pop()
        if len(part) > 1 and cost(part) > limit:
            todo += [part[len(part) // 2 :], part[: len(part) // 2]]
        else:
            parts.append(part)
    parts = split_bins(parts, number)
    return parts, np.array([cost(part) for part in parts])


def _equal_cost(documents: np.ndarray, costs: np.ndarray, num_groups: int) -> list[list[int]]:
    """Return `num_groups` groups of about equal cost: the costliest first, to the cheapest group.

    Longest processing time first (Graham 1969): within 4/3 of the best possible maximum.
    """
    groups: list[list[int]] = [[] for _ in range(num_groups)]
    cheapest = [(0.0, group) for group in range(num_groups)]
    for i in np.argsort(-costs, kind="stable").tolist():
        cost, group = heapq.heappop(cheapest)
        groups[group].append(int(documents[i]))
        heapq.heappush(cheapest, (cost + costs[i], group))
    return groups
