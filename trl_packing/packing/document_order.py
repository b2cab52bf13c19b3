"""The order in which a padded run of transformers draws its documents, epoch by epoch.

    train_sampling_strategy    drawn by                                    seed of an epoch
    random                     accelerate's SeedableRandomSampler          seed + epoch
    batch_rebalance            transformers' BatchRebalanceSampler         42 + epoch
    group_by_length            LengthGroupedSampler, in mega-batches       torch's generator
    sequential                 nothing: the order of the data set

A padded run takes the order in slices, a slice an optimizer step. Drawing the same order here lets
two runs, padded and padding-free, train on the same documents at every step
(transformers 5.23, accelerate 1.15).
"""

import numpy as np
import torch
from transformers.trainer_pt_utils import get_length_grouped_indices

#: The seed that transformers gives `BatchRebalanceSampler`, whatever the seed of the run.
REBALANCE_SEED = 42


def document_order(
    strategy: str, lengths: np.ndarray, *, seed: int, epoch: int, documents_per_rank: int
) -> np.ndarray:
    """Return all documents in the order of training in `epoch`, ``(documents,)`` int64.

    strategy: a `train_sampling_strategy` of transformers.
    lengths: tokens of every document, ``(documents,)``.
    seed: what `order_seed` returns.
    documents_per_rank: of an optimizer step; `group_by_length` sorts in multiples of it.
    """
    if strategy == "sequential":
        return np.arange(len(lengths))
    if strategy == "group_by_length":
        return _grouped_by_length(lengths, documents_per_rank, seed, epoch)
    generator = torch.Generator().manual_seed(seed + epoch)
    return torch.randperm(len(lengths), generator=generator).numpy()


def order_seed(strategy: str, *, data_seed: int | None, torch_seed: int) -> int:
    """Return the seed from which transformers draws the order of documents.

    torch_seed: that of torch's global generator when training starts, `args.seed` as a rule.
    """
    if strategy == "batch_rebalance":
        return REBALANCE_SEED
    if strategy == "group_by_length" or data_seed is None:
        return torch_seed
    return data_seed


def _grouped_by_length(
    lengths: np.ndarray, documents_per_rank: int, seed: int, epoch: int
) -> np.ndarray:
    """Return documents of similar length next to each other.

    `LengthGroupedSampler` draws from torch's global generator. Its epochs follow from the seed only
    where nothing else draws from it, and this is that order: every dataloader draws a seed for its
    workers first, then the sampler a permutation.
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
