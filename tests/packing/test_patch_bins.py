"""Bins of documents with images hold neither more tokens nor more patches than their limits."""

import numpy as np
import pytest

from trl_packing.packing.sampler import ImageLoads, PackedBatchSampler

CAPACITY = 2048


def photographs(number=1500):
    """Return lengths and patches of documents: two in three have an image of up to 1,200 tokens."""
    rng = np.random.default_rng(0)
    tokens = np.clip(np.exp(rng.normal(5.5, 0.8, number)), 4, 1200).astype(int)
    tokens *= rng.random(number) < 2 / 3
    return tokens + rng.integers(20, 300, number), 4 * tokens


def sampler_of(lengths, patches, most, capacity=CAPACITY, **options):
    loads = ImageLoads((patches > 0).astype(int), patches // 4, patches, most)
    return PackedBatchSampler(lengths, capacity, loads=loads, **options)


@pytest.mark.parametrize("strategy", ["bfd", "greedy", "next_fit"])
def test_no_bin_exceeds_a_limit_and_every_document_is_in_one(strategy):
    lengths, patches = photographs()
    sampler = sampler_of(lengths, patches, 5000, strategy=strategy)
    unlimited = sampler_of(lengths, patches, None, strategy=strategy)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        plan = sampler.plan()
        assert len(plan) == sampler.num_bins
        assert sorted(plan.indices.tolist()) == list(range(len(lengths)))
        assert max(patches[documents].sum() for documents in plan) <= 5000
        tokens = [lengths[documents].sum() for documents in plan]
        assert tokens == plan.tokens.tolist()
        assert max(tokens) <= CAPACITY
    # Tokens alone do not keep the limit.
    assert max(patches[documents].sum() for documents in unlimited.plan()) > 5000


def test_a_document_beyond_the_limit_shares_its_bin_with_no_other():
    sampler = sampler_of(np.full(6, 2), np.array([9, 4, 4, 1, 0, 0]), 8, capacity=8)
    assert [0] in [documents.tolist() for documents in sampler.plan()]
