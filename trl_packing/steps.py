"""From the bins of an epoch to its micro-batches, in the order of training.

bins            in random order, the full steps balanced (balance.py)
full steps      slots × bins_per_batch bins each; a slot is one micro-batch of one rank
last step       the bins that are left, split until every rank has equally many micro-batches
"""

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from trl_packing.balance import balanced_order
from trl_packing.packing import PackingPlan


@dataclass(frozen=True, eq=False)
class PackedSteps:
    """The micro-batches of all ranks; documents are looked up when one is asked for.

    bins: of each micro-batch of the full steps, (micro-batches, bins_per_batch).
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
        """Return the documents of the micro-batch that has most of them."""
        of_full = np.diff(self.plan.offsets)[self.bins].sum(1)
        return max(int(of_full.max(initial=0)), max(map(len, self.last), default=0))

    def documents_of(self, number: int) -> np.ndarray:
        """Return the documents of the first `number` micro-batches, in any order."""
        is_taken = np.zeros(len(self.plan), bool)
        is_taken[self.bins[:number]] = True
        of_full = self.plan.indices[np.repeat(is_taken, np.diff(self.plan.offsets))]
        return np.concatenate([of_full, *self.last[: max(number - len(self.bins), 0)]])

    def __getitem__(self, index: int) -> np.ndarray:
        """Return the documents of a micro-batch."""
        if index >= len(self.bins):
            return self.last[index - len(self.bins)]
        return np.concatenate([self.plan[i] for i in self.bins[index]])


def packed_steps(
    plan: PackingPlan,
    lengths: np.ndarray,
    *,
    num_ranks: int,
    accumulation: int,
    bins_per_batch: int,
    attention_cost: float,
    balance_window: int,
    rng: np.random.Generator | None,
) -> PackedSteps:
    """Return an epoch of micro-batches; without `rng` bins keep their order.

    The last step deals what is left to as few rounds of ranks as hold it, evenly; so the bins of
    each step depend on ranks × accumulation alone.
    """
    slots = num_ranks * accumulation
    bins = np.arange(len(plan)) if rng is None else rng.permutation(len(plan))
    num_full = len(bins) - len(bins) % (slots * bins_per_batch)
    full, rest = bins[:num_full].reshape(-1, bins_per_batch), bins[num_full:]
    if rng is not None and len(full):
        order = balanced_order(
            _costs(plan, lengths, attention_cost)[bins],
            tokens=plan.tokens[bins],
            documents=np.diff(plan.offsets)[bins],
            slots=slots,
            bins_per_batch=bins_per_batch,
            window=balance_window,
            rng=rng,
        )
        full = bins[order].reshape(full.shape)
    num_last = -(-len(rest) // (bins_per_batch * num_ranks)) * num_ranks
    return PackedSteps(plan, full, _split_evenly([plan[i] for i in rest], num_last))


def _costs(plan: PackingPlan, lengths: np.ndarray, attention_cost: float) -> np.ndarray:
    """Return tokens + c · Σ len² of each bin, in whole tokens."""
    squares = lengths[plan.indices].astype(np.int64)
    squares *= squares
    squares = np.add.reduceat(squares, plan.offsets[:-1])
    return plan.tokens + (attention_cost * squares).astype(np.int64)


def _split_evenly(bins: list[np.ndarray], number: int) -> list[np.ndarray]:
    """Return `number` micro-batches of about equally many bins, which are split if too few."""
    bins = _split_until(bins, number)
    sizes = [(len(bins) + i) // number for i in reversed(range(number))]
    ends = np.cumsum(sizes, dtype=np.int64).tolist()
    return [_concatenated(bins[e - n : e]) for n, e in zip(sizes, ends, strict=True)]


def _concatenated(bins: list[np.ndarray]) -> np.ndarray:
    return np.concatenate(bins) if bins else np.empty(0, dtype=np.int64)


def _split_until(bins: list[np.ndarray], target: int) -> list[np.ndarray]:
    """Return at least `target` bins by halving the fullest ones, where any holds two documents."""
    bins = list(bins)
    while len(bins) < target:
        fullest = max(range(len(bins)), key=lambda i: len(bins[i]))
        if len(bins[fullest]) < 2:
            break
        half = len(bins[fullest]) // 2
        bins.append(bins[fullest][half:])
        bins[fullest] = bins[fullest][:half]
    return bins
