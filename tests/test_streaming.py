"""A stream is packed as it is read: no document lost or repeated on any ranks and workers."""

import time

import numpy as np
import pytest
from datasets import Dataset, IterableDataset
from datasets.distributed import split_dataset_by_node
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils.data import DataLoader

from trl_packing.streaming import PackedStream, pack_stream

CAPACITY = 32

# Two workers are tested on machines with one core too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


def documents(lengths) -> list[dict]:
    """Documents of these lengths; every token of document i is i."""
    return [{"input_ids": [i] * length} for i, length in enumerate(lengths)]


def names(batch) -> list[int]:
    return [document["input_ids"][0] for document in batch]


def assert_exactly_once(ranks, num_documents):
    """Every document in exactly one micro-batch; all ranks have equally many micro-batches."""
    assert sorted(d for batches in ranks for b in batches for d in names(b)) == list(
        range(num_documents)
    )
    assert len({len(batches) for batches in ranks}) == 1


def read_all(source, num_ranks, num_workers=0, capacity=CAPACITY, **options):
    """Return the micro-batches that a dataloader of each rank delivers."""
    return [
        list(
            DataLoader(
                PackedStream(source, capacity, num_ranks=num_ranks, rank=rank, **options),
                batch_size=None,
                num_workers=num_workers,
                collate_fn=list,
            )
        )
        for rank in range(num_ranks)
    ]


# --- bins -----------------------------------------------------------------------------------------


def test_a_document_goes_to_the_tightest_open_bin():
    lengths = (20, 25, 6, 12, 7)  # 6 fits beside 20 and 25, and tighter beside 25; 12 fills 20
    packed = [names(b) for b in pack_stream(documents(lengths), CAPACITY)]
    assert packed == [[0, 3], [1, 2], [4]]


def test_the_fullest_bin_leaves_when_all_are_open():
    packed = [names(b) for b in pack_stream(documents((20, 25, 22, 10)), CAPACITY, open_bins=2)]
    assert packed == [[1], [2, 3], [0]]


@settings(max_examples=100, deadline=None)
@given(lengths=st.lists(st.integers(1, CAPACITY), max_size=60), open_bins=st.integers(1, 8))
def test_bins_hold_every_document_once_and_no_more_than_capacity(lengths, open_bins):
    packed = list(pack_stream(documents(lengths), CAPACITY, open_bins))
    assert sorted(d for b in packed for d in names(b)) == list(range(len(lengths)))
    assert all(sum(len(d["input_ids"]) for d in b) <= CAPACITY for b in packed)


def test_rows_packed_before_stay_as_they_are():
    rows = [
        {"input_ids": [0] * 5, "seq_lengths": [3, 2]},
        {"input_ids": [1] * 4, "seq_lengths": [4]},
    ]
    assert list(pack_stream(rows, CAPACITY)) == [[rows[0]], [rows[1]]]


@pytest.mark.parametrize("row", [{}, {"seq_lengths": [20, 20]}])
def test_a_document_or_row_beyond_capacity_is_an_error(row):
    stream = [*documents([3]), {"input_ids": [1] * 40, **row}]
    with pytest.raises(
        ValueError, match="document 1 of the stream has 40 tokens but capacity is 32"
    ):
        list(pack_stream(stream, CAPACITY))


def test_chat_lengths_fill_bins_to_99_percent():
    """Log-normal lengths, mean 550; 99.6 % was measured."""
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 20_000).astype(int).clip(8, 4096)
    number = sum(1 for _ in pack_stream([{"input_ids": range(n)} for n in lengths], 4096))
    assert lengths.sum() / (number * 4096) >= 0.99


def test_the_search_for_a_bin_does_not_grow_with_the_open_bins():
    """0.5 µs a document were measured with any number of open bins; a linear search takes 50."""
    lengths = np.random.default_rng(0).lognormal(6, 0.8, 20_000).astype(int).clip(8, 4096)
    stream = [{"input_ids": range(n)} for n in lengths]
    start = time.process_time()
    list(pack_stream(stream, 4096, open_bins=2048))
    assert (time.process_time() - start) / len(stream) < 20e-6


# --- micro-batches of a rank ----------------------------------------------------------------------


@settings(max_examples=60, deadline=None)
@given(
    lengths=st.lists(st.integers(1, CAPACITY), min_size=1, max_size=60),
    num_ranks=st.integers(1, 8),
    bins_per_batch=st.integers(1, 3),
    capacity=st.sampled_from([CAPACITY, None]),
)
def test_every_document_reaches_exactly_one_rank(lengths, num_ranks, bins_per_batch, capacity):
    ranks = read_all(
        documents(lengths), num_ranks, capacity=capacity, bins_per_batch=bins_per_batch
    )
    assert_exactly_once(ranks, len(lengths))
    most = bins_per_batch * CAPACITY
    assert all(sum(len(d["input_ids"]) for d in b) <= most for batches in ranks for b in batches)


@pytest.mark.parametrize("damage", ["dropped", "repeated", "moved"])
def test_the_exactly_once_check_notices_a_damaged_epoch(damage):
    ranks = read_all(documents([10] * 40), 2)
    assert_exactly_once(ranks, 40)
    if damage == "dropped":
        ranks[1][3] = ranks[1][3][1:]
    elif damage == "repeated":
        ranks[0][2] = [*ranks[0][2], ranks[1][0][0]]
    else:
        ranks[0].append(ranks[1].pop())
    with pytest.raises(AssertionError):
        assert_exactly_once(ranks, 40)


def test_the_last_round_is_completed_by_empty_micro_batches():
    ranks = read_all(documents([CAPACITY] * 4), 3)
    assert [[names(b) for b in batches] for batches in ranks] == [[[0], [3]], [[1], []], [[2], []]]


def test_the_last_step_is_completed_for_all_its_accumulated_micro_batches():
    """`Trainer` would carry the gradient of half a step over to the next epoch."""
    ranks = read_all(documents([CAPACITY] * 5), 2, accumulation=2)
    assert [[names(b) for b in batches] for batches in ranks] == [
        [[0], [2], [4], []],
        [[1], [3], [], []],
    ]


def test_without_capacity_a_micro_batch_is_a_number_of_documents():
    (batches,) = read_all(documents([5] * 7), 1, capacity=None, bins_per_batch=3)
    assert [names(b) for b in batches] == [[0, 1, 2], [3, 4, 5], [6]]


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("num_workers", [1, 2])
@pytest.mark.parametrize("num_shards", [1, 2, 3])
def test_workers_divide_the_shards_of_a_data_set(num_ranks, num_workers, num_shards):
    """A `datasets.IterableDataset` gives each worker shards of its own, whether asked to or not."""
    source = Dataset.from_list(documents([9, 30, 14] * 9)).to_iterable_dataset(num_shards)
    assert_exactly_once(read_all(source, num_ranks, num_workers), 27)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_workers_take_turns_on_a_stream_that_each_reads_whole(num_ranks):
    assert_exactly_once(read_all(documents([9, 30, 14] * 9), num_ranks, num_workers=2), 27)


def test_a_stream_that_shuffles_is_told_the_epoch():
    source = Dataset.from_list(documents([9] * 30)).to_iterable_dataset().shuffle(seed=0)
    stream = PackedStream(source, CAPACITY)
    epochs = []
    for epoch in (0, 1, 1):
        stream.set_epoch(epoch)
        epochs.append([names(batch) for batch in stream])
    assert epochs[0] != epochs[1] == epochs[2]


def test_a_stream_divided_among_ranks_before_is_refused():
    source = split_dataset_by_node(
        Dataset.from_list(documents([9] * 8)).to_iterable_dataset(2), rank=0, world_size=2
    )
    with pytest.raises(ValueError, match="divided among ranks already"):
        PackedStream(source.select_columns(["input_ids"]), CAPACITY, num_ranks=2)


def test_a_stream_without_documents_is_an_error():
    source: IterableDataset = Dataset.from_list(documents([9])).to_iterable_dataset()
    nothing = source.filter(lambda document: False)
    with pytest.raises(ValueError, match="the stream has no documents left to train on"):
        list(PackedStream(nothing, CAPACITY))
