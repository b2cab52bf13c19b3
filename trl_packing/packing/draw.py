"""The documents of each epoch, and their order before they are packed.

    all of them      in a random order, or as a padded run of transformers draws them
    a mixture        some sources more than once, others in part
    a curriculum     in stages by a number of each document, such as its length

An epoch of a mixture draws whole copies of a source, and a remainder that goes on where that of the
epoch before stopped. Within a stage of a curriculum, documents are drawn, packed and balanced as in
an epoch without stages. A draw depends on (seed, epoch) alone.
"""

from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

from trl_packing.documents.arrow import ArrowDocuments

#: The value of the setting `curriculum` that orders by tokens.
LENGTH = "length"

# More stages are closer to a sorted epoch; fewer have fuller bins.
_MOST_STAGES, _BINS_OF_A_STAGE = 64, 64

_MIX_SEED = 0x6D6978  # keeps the order of remainders apart from other uses of the seed


def document_order(
    strategy: str, lengths: np.ndarray, seed: int, epoch: int, documents_per_rank: int
) -> np.ndarray:
    """Return all documents in the order of a padded run, ``(documents,)`` int64.

    strategy            drawn by (transformers 5.23, accelerate 1.15)      seed of an epoch
    random              accelerate's SeedableRandomSampler                 seed + epoch
    batch_rebalance     transformers' BatchRebalanceSampler                42 + epoch
    group_by_length     LengthGroupedSampler, in mega-batches              torch's generator
    sequential          not drawn: the order of the data set

    A padded run takes a slice of this order in each optimizer step.

    Args:
        strategy: a `train_sampling_strategy` of transformers.
        lengths: tokens of every document, ``(documents,)``.
        seed: the seed that `order_seed` returns.
        epoch: number of the epoch, from 0.
        documents_per_rank: documents of a rank in an optimizer step; `group_by_length` sorts in
            multiples of it.
    """
    number = len(lengths)
    if strategy == "sequential":
        return np.arange(number)
    if strategy != "group_by_length":
        generator = torch.Generator().manual_seed(seed + epoch)
        return torch.randperm(number, generator=generator).numpy()
    # Its epochs follow from the seed if nothing else draws from torch's generator: a dataloader
    # draws a seed for its workers, then the sampler a permutation.
    generator = torch.Generator().manual_seed(seed)
    for before in range(epoch + 1):
        torch.empty((), dtype=torch.int64).random_(generator=generator)  # the seed of workers
        if before < epoch:
            torch.randperm(number, generator=generator)
    sizes = lengths.tolist()
    return np.asarray(get_length_grouped_indices(sizes, documents_per_rank, generator=generator))


def packing_seed(args: TrainingArguments) -> int:
    """Return the seed of bins and windows: `data_seed`, or `seed` if there is none."""
    return args.seed if args.data_seed is None else args.data_seed


def order_seed(strategy: str, *, data_seed: int | None, torch_seed: int) -> int:
    """Return the seed from which transformers draws the order of documents.

    `torch_seed` is that of torch's global generator when training starts, usually `args.seed`.
    """
    if strategy == "batch_rebalance":
        return 42  # whatever the seed of the run
    return torch_seed if strategy == "group_by_length" or data_seed is None else data_seed


@dataclass(frozen=True, eq=False)
class MixtureDraw:
    """The documents that each epoch of a mixture draws, with repetitions.

    Attributes:
        source_ids: the source of every document, ``(documents,)`` integers from 0.
        counts: documents of each source that an epoch draws, ``(sources,)`` int64.
        seed: decides the order in which remainders are drawn.

    Examples:
        >>> draw = MixtureDraw(np.array([0, 0, 1, 1, 1, 1]), np.array([4, 2]), seed=0)
        >>> len(draw), draw.documents(0).tolist(), draw.documents(1).tolist()
        (6, [0, 0, 1, 1, 4, 5], [0, 0, 1, 1, 2, 3])
    """

    source_ids: np.ndarray
    counts: np.ndarray
    seed: int

    def __len__(self) -> int:
        """Return the number of documents of an epoch, the same in all of them."""
        return int(self.counts.sum())

    @cached_property
    def sizes(self) -> np.ndarray:
        """Documents of each source, at least 1, ``(sources,)`` int64."""
        return np.maximum(np.bincount(self.source_ids, minlength=len(self.counts)), 1)

    @property
    def is_same_every_epoch(self) -> bool:
        """Whether every epoch draws the same documents: no source has a remainder."""
        return not (self.counts % self.sizes).any()

    def documents(self, epoch: int) -> np.ndarray:
        """Return the documents of an epoch, ascending, ``(len(self),)`` int64."""
        times = (self.counts // self.sizes)[self.source_ids]
        for source in np.flatnonzero(self.counts % self.sizes).tolist():
            rng = np.random.default_rng((_MIX_SEED, self.seed, source))
            order = rng.permutation(np.flatnonzero(self.source_ids == source))
            number = int(self.counts[source]) % len(order)
            times[order[(epoch * number + np.arange(number)) % len(order)]] += 1
        return np.repeat(np.arange(len(self.source_ids)), times)


def numbers_of(documents: ArrowDocuments, curriculum: str) -> np.ndarray:
    """Return the number of each document, ``(documents,)``.

    Args:
        documents: the training set.
        curriculum: "length", or a column of `documents.dataset` with a number for each; a minus
            before it says that the largest come first.

    Raises:
        ValueError: there is no such column, or it does not hold numbers.
    """
    name = curriculum.removeprefix("-")
    dataset = documents.dataset
    if name == LENGTH:
        return documents.lengths()
    stored = np.full(len(dataset.data), "")
    if name in dataset.column_names:
        stored = dataset.data.column(name).to_numpy()
    numbers = documents.in_order(stored)
    if numbers.dtype.kind not in "iufb" or np.isnan(numbers).any():
        raise ValueError(
            f"curriculum={curriculum!r} must name a column with a number for each document, and "
            f"the training set has {dict(dataset.features)}; fill it in, or set 'length'"
        )
    return numbers


def stages_of(
    numbers: np.ndarray,
    lengths: np.ndarray,
    *,
    capacity: int | None,
    descending: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Return the stage of each document, ``(documents,)`` int64 from 0.

    Args:
        numbers: by which documents are ordered, ``(documents,)``.
        lengths: tokens of each, ``(documents,)`` integers.
        capacity: tokens that a bin may hold; None where nothing is packed into bins.
        descending: the largest number comes first.
        seed: draws the order of documents with equal numbers.

    Examples:
        >>> stages_of(np.array([3, 9, 4, 1]), np.array([5, 5, 5, 5]), capacity=None).tolist()
        [16, 48, 32, 0]
    """
    tokens = int(lengths.sum())
    most = _MOST_STAGES
    if capacity is not None:
        most = min(most, max(tokens // (capacity * _BINS_OF_A_STAGE), 2))
    drawn = np.random.default_rng(seed).permutation(len(numbers))
    ranked = np.unique(numbers, return_inverse=True)[1].ravel()  # also of infinite numbers
    order = drawn[np.argsort((-ranked if descending else ranked)[drawn], kind="stable")]
    before = np.cumsum(lengths[order], dtype=np.int64) - lengths[order]
    stages = np.empty(len(numbers), np.int64)
    stages[order] = before * most // max(tokens, 1)
    return stages
