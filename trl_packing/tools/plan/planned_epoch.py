"""The first epoch of a run as arrays: documents, tokens and cost of every micro-batch.

micro-batch     0    1  |  2    3  |  4        ranks × accumulation of them make a step
documents       5    4  |  6    5  |  2
tokens       1020 1019  | 998 1024 | 420
cost         1104 1150  |1050 1120 | 440       tokens + c · Σ len² + the cost of the vision tower,
                                               by which ranks are balanced
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np

from trl_packing.packing.sampler import PackedBatchSampler


@dataclass(frozen=True, eq=False)
class PlannedEpoch:
    """The micro-batches of all ranks in the epoch of a sampler, in the order of training.

    Attributes:
        members: documents of each micro-batch.
        documents: their number, ``(micro-batches,)`` int64.
        tokens: of each micro-batch, ``(micro-batches,)`` int64; with groups of documents, those
            that it computes.
        costs: of each micro-batch in tokens, ``(micro-batches,)`` float64.
        ranks: data-parallel ranks.
        slots: micro-batches of a full step.
        patches: of each micro-batch, ``(micro-batches,)`` int64; None without images.
    """

    members: list[np.ndarray]
    documents: np.ndarray
    tokens: np.ndarray
    costs: np.ndarray
    ranks: int
    slots: int
    patches: np.ndarray | None = None

    @classmethod
    def from_sampler(cls, sampler: PackedBatchSampler) -> "PlannedEpoch":
        """Return the epoch that `sampler` would draw next."""
        members = [np.asarray(batch, np.int64) for batch in sampler.micro_batches()]
        documents = np.array([len(batch) for batch in members], np.int64)
        ends = np.cumsum(documents)
        drawn = np.concatenate(members)
        squares = (
            sampler.lengths[drawn].astype(np.int64) ** 2
            if sampler.groups is None
            else sampler.groups.squares[drawn]
        )

        def sums(values: np.ndarray) -> np.ndarray:
            running = np.concatenate([[0], np.cumsum(values)])
            return running[ends] - running[ends - documents]

        tokens = sampler.tokens_of(members)
        costs = tokens + sampler.attention_cost * sums(squares)
        patches, loads = None, sampler.loads
        if loads is not None:
            patches, costs = sums(loads.patches[drawn]), costs + sums(loads.costs[drawn])
        slots = sampler.num_ranks * sampler.accumulation
        return cls(members, documents, tokens, costs, sampler.num_ranks, slots, patches)

    @property
    def steps(self) -> int:
        """Optimizer steps."""
        return -(-len(self.members) // self.slots)

    @cached_property
    def documents_by_step(self) -> np.ndarray:
        """Documents of each step, ``(steps,)`` int64."""
        return self._by_step(self.documents)

    @cached_property
    def tokens_by_step(self) -> np.ndarray:
        """Tokens of each step, ``(steps,)`` int64."""
        return self._by_step(self.tokens)

    def costs_by_rank(self) -> np.ndarray:
        """Return the cost of each rank's micro-batches, ``(ranks,)``."""
        return self.costs.reshape(-1, self.ranks).sum(axis=0)

    def waiting(self) -> float:
        """Return the share of all ranks' time in which they wait for the costliest one.

        The micro-batches that run at the same moment take as long as the costliest of them.
        """
        together = self.costs.reshape(-1, self.ranks)
        return float(1 - together.sum() / (together.max(axis=1).sum() * self.ranks))

    def _by_step(self, values: np.ndarray) -> np.ndarray:
        return np.add.reduceat(values, np.arange(0, len(values), self.slots))
