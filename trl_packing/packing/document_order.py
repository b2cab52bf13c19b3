"""The order in which a padded run of transformers draws its documents, epoch by epoch.

    train_sampling_strategy    drawn by                                    seed of an epoch
    random                     accelerate's SeedableRandomSampler          seed + epoch
    batch_rebalance            transformers' BatchRebalanceSampler         42 + epoch
    group_by_length            LengthGroupedSampler, in mega-batches       torch's generator
    sequential                 not drawn: the order of the data set

A padded run takes this order in slices, one slice per optimizer step. A padding-free run with the
same order therefore trains on the same documents at every step (transformers 5.23, accelerate
1.15).
"""

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.trainer_pt_utils import get_length_grouped_indices

#: The seed that transformers gives `BatchRebalanceSampler`, whatever the seed of the run.
REBALANCE_SEED = 42


def document_order(
    strategy: str, lengths: np.ndarray, *, seed: int, epoch: int, documents_per_rank: int
) -> np.ndarray:
    """Return all documents in the order of training in `epoch`, ``(documents,)`` int64.

    Args:
        strategy: a `train_sampling_strategy` of transformers.
        lengths: tokens of every document, ``(documents,)``.
        seed: the seed that `order_seed` returns.
        epoch: number of the epoch, from 0.
        documents_per_rank: documents of a rank in an optimizer step; `group_by_length` sorts in
            multiples of it.
    """
    if strategy == "sequential":
        return np.arange(len(lengths))
    if strategy == "group_by_length":
        return _grouped_by_length(lengths, documents_per_rank, seed, epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(len(lengths), generator=generator).numpy()


def packing_seed(args: TrainingArguments) -> int:
    """Return the seed of bins and windows: `data_seed`, or `seed` if there is none."""
    return args.seed if args.data_seed is None else args.data_seed


def order_seed(strategy: str, *, data_seed: int | None, torch_seed: int) -> int:
    """Return the seed from which transformers draws the order of documents.

    Args:
        strategy: a `train_sampling_strategy` of transformers.
        data_seed: `args.data_seed`.
        torch_seed: seed of torch's global generator when training starts, usually `args.seed`.
    """
    if strategy == "batch_rebalance":
        return REBALANCE_SEED
    if strategy == "group_by_length" or data_seed is None:
        return torch_seed
    return data_seed


def _grouped_by_length(
    lengths: np.ndarray, documents_per_rank: int, seed: int, epoch: int
) -> np.ndarray:
    """Return the documents with similar lengths next to each other.

    `LengthGroupedSampler` draws from torch's global generator, so its epochs follow from the seed
    only if nothing else draws from that generator. This order assumes so: every dataloader draws a
    seed for its workers first, then the sampler draws a permutation.
    """
    generator = torch.Generator().manual_seed(seed)
    for _ in range(epoch):
        _draw_seed_of_workers(generator)
        torch.randperm(len(lengths), generator=generator)
    _draw_seed_of_workers(generator)
    order = get_length_grouped_indices(lengths.tolist(), documents_per_rank, generator=generator)
    return np.asarray(order)


def _draw_seed_of_workers(generator: torch.Generator) -> None:
    torch.empty((), dtype=torch.int64).random_(generator=generator)
