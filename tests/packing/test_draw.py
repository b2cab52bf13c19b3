"""Each document as often as the share of its source says, on any ranks, in fair steps."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import PackedBatchSampler
from trl_packing.packing.draw import MixtureDraw

CAPACITY = 32

sources_and_counts = st.lists(
    st.tuples(st.integers(1, 12), st.integers(0, 30)), min_size=1, max_size=4
).filter(lambda sources: sum(count for _, count in sources) >= 8)


def draw_of(sources, seed=0) -> MixtureDraw:
    """Return the draw of sources with (documents, documents an epoch)."""
    sizes, counts = np.array(sources).T
    return MixtureDraw(np.repeat(np.arange(len(sizes)), sizes), counts, seed)


def times_drawn(draw, epochs) -> np.ndarray:
    drawn = np.concatenate([draw.documents(epoch) for epoch in epochs])
    return np.bincount(drawn, minlength=len(draw.source_ids))


def assert_as_often_as_its_share(times, draw, epochs):
    """Within a source, numbers differ by 1 at most, and they add up to its share."""
    for source, count in enumerate(draw.counts):
        of_source = times[draw.source_ids == source]
        assert of_source.sum() == count * epochs
        assert of_source.max(initial=0) - of_source.min(initial=10**9) <= 1 or not len(of_source)


# --- what an epoch draws --------------------------------------------------------------------------


@settings(deadline=None, max_examples=60)
@given(sources=sources_and_counts, epochs=st.integers(1, 7), seed=st.integers(0, 9))
def test_every_document_is_drawn_as_often_as_its_share_says(sources, epochs, seed):
    draw = draw_of(sources, seed)
    for epoch in range(epochs):
        assert_as_often_as_its_share(times_drawn(draw, [epoch]), draw, 1)
    assert_as_often_as_its_share(times_drawn(draw, range(epochs)), draw, epochs)


# --- in the sampler -------------------------------------------------------------------------------

LAYOUTS = {
    "packed": {"capacity": CAPACITY},
    "next_fit": {"capacity": CAPACITY, "strategy": "next_fit"},
    "documents": {"documents_per_step": 12},
}


MIXED = draw_of([(40, 100), (100, 33), (7, 0), (20, 20)], seed=3)


@pytest.mark.parametrize("layout", LAYOUTS)
@pytest.mark.parametrize(("ranks", "accumulation"), [(1, 4), (4, 1)])
def test_all_ranks_together_train_exactly_what_the_epoch_draws(layout, ranks, accumulation):
    lengths = np.random.default_rng(0).integers(1, CAPACITY + 1, len(MIXED.source_ids))
    options = {"accumulation": accumulation, "draw": MIXED, "epochs": 4, **LAYOUTS[layout]}
    samplers = [
        PackedBatchSampler(lengths, num_ranks=ranks, rank=rank, **options) for rank in range(ranks)
    ]
    for epoch in range(4):
        for sampler in samplers:
            sampler.set_epoch(epoch)
        batches = [list(sampler) for sampler in samplers]
        assert {*map(len, batches)} == {*map(len, samplers)} == {len(batches[0])}
        seen = sorted(d for of_rank in batches for batch in of_rank for d in batch)
        assert seen == MIXED.documents(epoch).tolist()


def test_an_epoch_beyond_the_planned_ones_is_not_trained_in_part():
    """Epoch 0 draws the short documents, and the epochs after it the long ones."""
    draw = draw_of([(100, 50)])
    lengths = np.full(100, CAPACITY)
    lengths[draw.documents(0)] = 1
    sampler = PackedBatchSampler(lengths, CAPACITY, draw=draw, epochs=1)
    assert sum(map(len, sampler)) == 50
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="epoch 1 has more bins than the epochs=1"):
        list(sampler)
    planned = PackedBatchSampler(lengths, CAPACITY, draw=draw, epochs=2)
    assert len(planned) == len(list(planned)) == 50
