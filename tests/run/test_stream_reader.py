"""A stream is packed in windows as it is read: no document lost or repeated by any reader."""

from unittest import mock

import numpy as np
import pytest
from datasets.distributed import split_dataset_by_node
from helpers.steps import assert_exactly_once
from helpers.streams import CAPACITY, LENGTHS, names, sharded

from trl_packing.run.stream import PackedStream, StreamSettings, part_of_rank


def read(source, capacity=CAPACITY, *, window_bins=4, rank=0, **options):
    """Return the documents of the micro-batches of one rank, by name."""
    where = {name: options.pop(name) for name in ("epoch", "place") if name in options}
    made = StreamSettings(capacity, window_bins=window_bins, **options)
    return [names(batch) for batch, *_ in PackedStream(source, made, rank=rank, **where)]


# --- windows --------------------------------------------------------------------------------------


def test_bins_of_a_window_leave_in_random_order():
    """Documents of one bin each, as of a sorted file; without a seed they stay sorted."""
    ordered = [name for (name,) in read(sharded([CAPACITY] * 64, 1), window_bins=64)]
    shuffled = [name for (name,) in read(sharded([CAPACITY] * 64, 1), window_bins=64, seed=0)]
    assert ordered == sorted(ordered) == sorted(shuffled)
    assert abs(np.corrcoef(shuffled, np.arange(64))[0, 1]) < 0.3


def test_a_stream_that_shuffles_is_told_the_epoch():
    source = sharded([CAPACITY] * 30, 1).shuffle(seed=0, buffer_size=10)
    epochs = [read(source, window_bins=2, epoch=epoch) for epoch in (0, 1, 1)]
    assert epochs[0] != epochs[1] == epochs[2]
    for epoch in epochs:
        assert_exactly_once([epoch], 30)


# --- ranks ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(("num_shards", "expected"), [(4, [20, 20]), (3, [40, 40])])
def test_a_rank_prepares_only_the_documents_of_its_shards(num_shards, expected):
    prepare = [mock.Mock(side_effect=dict) for _ in range(2)]
    for rank in range(2):
        read(sharded([9] * 40, num_shards).map(prepare[rank]), rank=rank, num_ranks=2)
    assert [of_rank.call_count for of_rank in prepare] == expected


def test_ranks_that_do_not_pack_read_the_shards_of_a_padded_run():
    """accelerate calls `shard` for them; packed, shards come from all over the stream."""
    source = sharded(range(1, 61), 4)
    for rank in range(2):
        theirs = names(source.shard(2, rank))
        assert names(part_of_rank(source, 2, rank, packs=False)) == theirs
        assert names(part_of_rank(source, 2, rank, packs=True)) != theirs


WHOLE_ONLY = {
    "take": lambda source: source.take(20),
    "row numbers": lambda source: source.filter(lambda row, i: i < 20, with_indices=True),
    "whole batches": lambda source: source.map(
        lambda batch: batch, batched=True, batch_size=9, drop_last_batch=True
    ),
}


@pytest.mark.parametrize("change", WHOLE_ONLY)
def test_a_stream_whose_parts_are_not_the_whole_is_not_divided(change):
    source = WHOLE_ONLY[change](sharded([9 + i % 5 for i in range(40)], 4))
    whole = sorted(names(source))
    ranks = [read(source, rank=rank, num_ranks=2) for rank in range(2)]
    assert sorted(name for batches in ranks for batch in batches for name in batch) == whole
    parts = [names(source.shard(2, index)) for index in range(2)]
    assert sorted(parts[0] + parts[1]) != whole, "the control: dividing it changes it"


def test_a_stream_divided_among_ranks_before_is_refused():
    source = split_dataset_by_node(sharded([9] * 8, 2), rank=0, world_size=2)
    with pytest.raises(ValueError, match="divided among ranks already"):
        PackedStream(source.select_columns(["input_ids"]), StreamSettings(CAPACITY, num_ranks=2))


# --- places ---------------------------------------------------------------------------------------


def test_a_place_in_other_documents_is_refused():
    made = StreamSettings(CAPACITY, window_bins=6, seed=0)
    place = list(PackedStream(sharded(LENGTHS, 3), made))[20][1]
    with pytest.raises(ValueError, match="the stream continues with other documents than when the"):
        read(sharded(LENGTHS[::-1], 3), window_bins=6, seed=0, place=place)
