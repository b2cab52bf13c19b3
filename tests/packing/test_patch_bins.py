"""Bins of documents with images hold neither more tokens nor more patches than their limits."""

from itertools import chain, combinations

import numpy as np
import pytest

from trl_packing.packing.bins import pack
from trl_packing.packing.patch_bins import ImageLoads, PatchBins
from trl_packing.packing.sampler import PackedBatchSampler

CAPACITY = 2048


def photographs(number=1500, seed=0):
    """Return lengths and patches of documents: two in three have an image of up to 1,200 tokens."""
    rng = np.random.default_rng(seed)
    tokens = np.clip(np.exp(rng.normal(5.5, 0.8, number)), 4, 1200).astype(int)
    tokens *= rng.random(number) < 2 / 3
    return tokens + rng.integers(20, 300, number), 4 * tokens


def loads_of(patches, *, limit=None):
    """Return loads with these patches."""
    return ImageLoads((patches > 0).astype(int), patches // 4, patches, limit)


def partners(plan):
    return {pair for documents in plan for pair in combinations(sorted(documents.tolist()), 2)}


@pytest.mark.parametrize("strategy", ["bfd", "greedy", "next_fit"])
def test_no_bin_exceeds_a_limit_and_every_document_is_in_one(strategy):
    lengths, patches = photographs()
    bins = PatchBins(lengths, patches, CAPACITY, 5000, strategy)
    for seed in (None, (0, 0), (0, 1)):
        plan = bins.pack(seed)
        assert sorted(plan.indices.tolist()) == list(range(len(lengths)))
        assert max(lengths[documents].sum() for documents in plan) <= CAPACITY
        assert max(patches[documents].sum() for documents in plan) <= 5000
        assert [lengths[documents].sum() for documents in plan] == plan.tokens.tolist()
    # Tokens alone do not keep the limit.
    assert max(patches[documents].sum() for documents in pack(lengths, CAPACITY)) > 5000


@pytest.mark.parametrize("strategy", ["bfd", "greedy"])
def test_epochs_have_equally_many_bins_and_other_partners(strategy):
    lengths, patches = photographs()
    bins = PatchBins(lengths, patches, CAPACITY, 5000, strategy)
    plans = [bins.pack((0, epoch)) for epoch in range(3)]
    assert len({len(plan) for plan in plans}) == 1
    if strategy == "bfd":  # "greedy" keeps the order of lengths
        pairs = [partners(plan) for plan in plans]
        assert len(pairs[0] & pairs[1]) < 0.05 * len(pairs[0])


def test_bins_are_nearly_as_few_as_tokens_and_patches_allow():
    lengths, patches = photographs()
    for most in (4800, 5000, 20_000):
        number = len(PatchBins(lengths, patches, CAPACITY, most).pack(None))
        assert number <= 1.04 * max(patches.sum() / most, lengths.sum() / CAPACITY)


def test_a_document_beyond_the_limit_shares_its_bin_with_no_other_image():
    lengths, patches = np.full(6, 2), np.array([9, 4, 4, 1, 0, 0])
    for seed in range(5):
        for documents in PatchBins(lengths, patches, 8, 8).pack(seed):
            assert patches[documents].sum() <= 9
            assert 0 not in documents or patches[documents].sum() == 9


@pytest.mark.parametrize("kind", [{"capacity": CAPACITY}, {"documents_per_step": 32}])
def test_ranks_and_accumulation_train_the_same_steps(kind):
    lengths, patches = photographs(300)
    loads = loads_of(patches, limit=5000)
    one = PackedBatchSampler(lengths, **kind, loads=loads, accumulation=4)
    two = [
        PackedBatchSampler(lengths, **kind, loads=loads, accumulation=2, num_ranks=2, rank=rank)
        for rank in range(2)
    ]
    merged = [list(chain(*pair)) for pair in zip(*map(list, two), strict=True)]
    assert _in_steps(list(one), 4) == _in_steps(merged, 2)


def _in_steps(batches, size):
    """Return the documents of each step, in ascending order."""
    return [sorted(chain(*batches[at : at + size])) for at in range(0, len(batches), size)]
