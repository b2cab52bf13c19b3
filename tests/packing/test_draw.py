"""Each document as often as the share of its source says, on any ranks, in fair steps."""

import numpy as np
import pytest
from helpers.steps import steps_in
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import PackedBatchSampler
from trl_packing.packing.draw import MixtureDraw, drawn_by_epochs, drawn_by_weight

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


def test_documents_drawn_independently_are_not_as_often_as_their_share():
    """Control: the same numbers with replacement, as a weighted sampler draws them."""
    draw = draw_of([(50, 50), (40, 20)])
    rng = np.random.default_rng(0)
    drawn = np.concatenate([rng.integers(0, 50, 50), rng.integers(50, 90, 20)])
    with pytest.raises(AssertionError):
        assert_as_often_as_its_share(np.bincount(drawn, minlength=90), draw, 1)


def test_remainders_go_on_where_the_epoch_before_stopped():
    draw = draw_of([(9, 3)], seed=4)
    epochs = [set(draw.documents(epoch).tolist()) for epoch in range(3)]
    assert set.union(*epochs) == set(range(9))
    assert epochs[0] != set(draw_of([(9, 3)], seed=5).documents(0).tolist()), "a seed changes them"


def test_weights_are_shares_of_what_the_sources_hold_together():
    sizes = np.array([100, 300])
    assert drawn_by_weight([1, 1], sizes, sizes).tolist() == [200, 200]
    assert drawn_by_weight([0, 1], sizes, sizes).tolist() == [0, 400]
    tokens = np.array([5000, 3000])  # 50 and 10 a document
    drawn = drawn_by_weight([3, 1], sizes, tokens)
    assert (drawn * tokens / sizes).tolist() == [6000, 2000]


def test_a_temperature_of_1_draws_every_document_once_and_a_high_one_evens_sources_out():
    sizes = np.array([1000, 10])
    assert drawn_by_weight([1000, 10], sizes, sizes, 1.0).tolist() == [1000, 10]
    of_square_root = drawn_by_weight([1000, 10], sizes, sizes, 2.0)
    assert of_square_root.tolist() == [round(1010 * 10 / 11), round(1010 / 11)]
    assert drawn_by_weight([1000, 10], sizes, sizes, 1e9).tolist() == [505, 505]


def test_extreme_weights_temperatures_and_epochs_neither_overflow_nor_draw_nothing():
    sizes = np.array([1000, 500])
    assert drawn_by_weight([1e308, 1e308], sizes, sizes).tolist() == [750, 750]
    assert drawn_by_weight([1000, 500], sizes, sizes, 0.001).tolist() == [1500, 1]
    drawn = drawn_by_epochs(np.array([1e300, 1.0]), sizes)
    assert drawn[0] > 1e15
    assert drawn[1] == 500


# --- in the sampler -------------------------------------------------------------------------------

LAYOUTS = {
    "packed": {"capacity": CAPACITY},
    "next_fit": {"capacity": CAPACITY, "strategy": "next_fit"},
    "greedy": {"capacity": CAPACITY, "strategy": "greedy"},
    "documents": {"documents_per_step": 12},
}


def lengths_of(number: int, seed: int = 0) -> np.ndarray:
    return np.random.default_rng(seed).integers(1, CAPACITY + 1, number)


def samplers(ranks, accumulation, layout, draw, epochs=4):
    lengths = lengths_of(len(draw.source_ids))
    options = {"accumulation": accumulation, "draw": draw, "epochs": epochs, **LAYOUTS[layout]}
    return [
        PackedBatchSampler(lengths, num_ranks=ranks, rank=rank, **options) for rank in range(ranks)
    ]


MIXED = draw_of([(40, 100), (100, 33), (7, 0), (20, 20)], seed=3)


@pytest.mark.parametrize("layout", LAYOUTS)
def test_all_ranks_together_train_exactly_what_the_epoch_draws(layout):
    for ranks, accumulation in ((1, 4), (2, 2), (4, 1)):
        of_ranks = samplers(ranks, accumulation, layout, MIXED)
        for epoch in range(4):
            batches = []
            for sampler in of_ranks:
                sampler.set_epoch(epoch)
                batches.append(list(sampler))
                assert len(batches[-1]) == len(sampler) == len(of_ranks[0])
            seen = sorted(d for batches in batches for batch in batches for d in batch)
            assert seen == MIXED.documents(epoch).tolist()


def test_an_epoch_beyond_the_planned_ones_is_not_trained_in_part():
    """Epoch 0 draws the short documents, and the epochs after it the long ones."""
    draw = draw_of([(100, 50)])
    lengths = np.full(100, CAPACITY)
    lengths[draw.documents(0)] = 1
    sampler = PackedBatchSampler(lengths, CAPACITY, draw=draw, epochs=1)
    assert sum(map(len, sampler)) == 50
    sampler.set_epoch(1)
    with pytest.raises(RuntimeError, match="epoch 1 of the mixture needs 50 micro-batches"):
        list(sampler)
    planned = PackedBatchSampler(lengths, CAPACITY, draw=draw, epochs=2)
    assert len(planned) == len(list(planned)) == 50


# --- fair steps -----------------------------------------------------------------------------------


def two_sources(draw_counts=(3000, 2000)):
    """Return lengths and the draw of two sources of other lengths: long answers and short ones."""
    rng = np.random.default_rng(1)
    lengths = np.concatenate([rng.lognormal(6.2, 0.6, 1500), rng.lognormal(4.5, 0.6, 6000)]).astype(
        int
    )
    return lengths.clip(8, 2048), draw_of([(1500, draw_counts[0]), (6000, draw_counts[1])])


def test_a_step_of_documents_holds_each_source_in_proportion():
    """Within two documents of 64, and no document comes twice in a step."""
    lengths, draw = two_sources()
    sampler = PackedBatchSampler(lengths, documents_per_step=64, accumulation=4, draw=draw)
    for epoch in range(2):
        sampler.set_epoch(epoch)
        for step in list(steps_in(sampler))[:-1]:
            documents = np.concatenate(step)
            assert abs((draw.source_ids[documents] == 0).sum() - 64 * 0.6) <= 2
            assert len(np.unique(documents)) == 64
