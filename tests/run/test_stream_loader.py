"""Ranks end a stream with the same step, and go on from the position that they saved."""

import threading
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from itertools import islice
from pathlib import Path

import pytest
from datasets import Dataset, IterableDataset
from helpers.steps import assert_exactly_once
from helpers.streams import CAPACITY, LENGTHS, SOURCES, documents, names, sharded
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.fitting import Overflow, fit_and_count
from trl_packing.data.stream import fit_stream
from trl_packing.packing.bins import STRATEGIES
from trl_packing.run.stream import StreamBatches, StreamSettings

# Two workers are tested on machines with one core too.
pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")


OF_SETTINGS = ("bins_per_batch", "num_ranks", "seed", "strategy")


def stream_of(source, *, capacity=CAPACITY, **options):
    given = {name: options.pop(name) for name in OF_SETTINGS if name in options}
    made = StreamSettings(capacity, **{"seed": 0, "window_bins": 4} | given)
    return StreamBatches(source, made, list, **options)


def read(source, **options) -> list[list[int]]:
    return [names(batch) for batch in stream_of(source, **options)]


def on_ranks(num_ranks, work):
    """Return what `work` returns on each rank, all at the same time.

    It gets `num_ranks`, `rank` and `agree`, which a rank that stops answering ends for the others.
    """
    values = [0] * num_ranks
    barrier = threading.Barrier(num_ranks, timeout=600)

    def agree(rank: int, value: int) -> int:
        values[rank] = value
        barrier.wait()
        largest = max(values)
        barrier.wait()
        return largest

    with ThreadPoolExecutor(num_ranks) as pool:
        futures = [
            pool.submit(work, num_ranks=num_ranks, rank=rank, agree=partial(agree, rank))
            for rank in range(num_ranks)
        ]
        return [future.result() for future in futures]


def read_all(source, num_ranks, **options) -> list[list[list[int]]]:
    return on_ranks(num_ranks, lambda **rank: read(source(), **rank, **options))


# --- steps ----------------------------------------------------------------------------------------


some_lengths = st.lists(st.integers(1, CAPACITY), min_size=8, max_size=60)
LAYOUTS = {"bins_per_batch": st.integers(1, 3), "accumulation": st.integers(1, 3)}
LAYOUTS |= {"capacity": st.sampled_from([CAPACITY, None]), "seed": st.sampled_from([None, 0])}
LAYOUTS |= {"strategy": st.sampled_from(list(STRATEGIES))}


@settings(max_examples=30, deadline=None)
@given(some_lengths, st.integers(1, 4), st.integers(1, 8), st.fixed_dictionaries(LAYOUTS))
def test_ranks_have_equally_many_micro_batches(lengths, num_ranks, num_shards, layout):
    ranks = read_all(lambda: sharded(lengths, num_shards), num_ranks, **layout)
    assert_exactly_once(ranks, len(lengths), layout["accumulation"])
    if layout["capacity"] is not None:
        tokens = [sum(lengths[d] for d in batch) for batches in ranks for batch in batches]
        assert max(tokens) <= layout["bins_per_batch"] * CAPACITY


NUMBERS = [(1, 2, 4), (2, 0, 1), (2, 0, 4)]


@pytest.mark.parametrize(("num_ranks", "num_workers", "num_shards"), NUMBERS)
def test_what_is_read_and_lost_is_counted_once(num_ranks, num_workers, num_shards):
    """Two documents of every nine are too long, and the last shards hold nothing else."""
    rows = [row | {"labels": row["input_ids"]} for row in documents([9, 30, 14, 21] * 9 + [40] * 9)]
    data = Dataset.from_list(rows)
    overflow = Overflow("drop", 29)
    source = fit_stream(data.to_iterable_dataset(num_shards), overflow)
    list(source.take(3))  # the isolation check reads some first
    counts = []
    for rank in range(num_ranks):
        stream = stream_of(source, num_ranks=num_ranks, rank=rank, num_workers=num_workers)
        assert list(stream)
        counts.append(stream.counts)
    expected = fit_and_count(data, overflow)[1]
    if num_ranks == 2 and num_shards == 1:  # both read all of it
        assert max(counts, key=lambda c: c.before.documents) == expected
    else:
        assert sum(counts, PreparationCounts()) == expected


def test_a_stream_without_documents_is_an_error():
    nothing = sharded([9], 1).filter(lambda document: False)
    with pytest.raises(ValueError, match="the stream has no documents left to train on"):
        read(nothing, num_workers=1)


def test_a_rank_without_any_document_takes_part():
    def source():
        return sharded([CAPACITY, CAPACITY, 0, 0], 2).filter(lambda row: row["input_ids"])

    assert read_all(source, 2, seed=None) == [[[0], [1]], [[], []]]


def test_a_rank_that_cannot_read_stops_the_others_with_a_sentence():
    lengths = [CAPACITY] * 4 + [CAPACITY + 1] * 4  # the second shard does not fit

    def work(**rank):
        with pytest.raises((ValueError, RuntimeError)) as error:
            read(sharded(lengths, 2), **rank)
        return str(error.value)

    messages = on_ranks(2, work)
    assert messages[0].startswith("another rank cannot read its part of the stream")
    assert "has 33 tokens but capacity is 32" in messages[1]


# --- positions ------------------------------------------------------------------------------------


class Run:
    """Reads epoch after epoch, in steps of `accumulation`, and saves a position after each."""

    def __init__(self, folder, source, accumulation=1, **options):
        self.folder, self.accumulation, self.global_step = folder, accumulation, 0
        self.rank = options.get("rank", 0)
        options |= {"accumulation": accumulation, "global_step": lambda: self.global_step}
        self.stream = stream_of(source, **options)

    def file(self, step: int) -> Path:
        return self.folder / f"{step}_{self.rank}.json"

    def steps(self, last_epoch: int, *, after: int = 0):
        """Return the steps of all epochs up to `last_epoch`, or of those left `after` a step."""
        found = []
        start = 0
        skipped = 0
        if after:
            self.global_step = after
            start, skipped = self.stream.load(self.file(after))
        for epoch in range(start, last_epoch + 1):
            self.stream.set_epoch(epoch)
            batches = iter(self.stream)
            for _ in range(skipped * self.accumulation):
                assert next(batches) == {}
            skipped = 0
            while step := [names(batch) for batch in islice(batches, self.accumulation)]:
                found.append(step)
                self.global_step += 1
                self.stream.save(self.file(self.global_step))
        return found


@pytest.mark.parametrize("kind", SOURCES)
@pytest.mark.parametrize("num_ranks", [1, 3])
def test_a_run_goes_on_from_any_step(kind, num_ranks, tmp_path):
    def work(after=0, **rank):
        run = Run(tmp_path, SOURCES[kind](), accumulation=2, bins_per_batch=2, **rank)
        return run.steps(1, after=after)

    whole = on_ranks(num_ranks, work)
    for after in range(1, len(whole[0]), 8):
        rest = on_ranks(num_ranks, partial(work, after))
        assert rest == [steps[after:] for steps in whole]


def test_a_position_of_another_step_leads_elsewhere(tmp_path):
    """The control of the test before."""
    whole = Run(tmp_path, sharded(LENGTHS, 1)).steps(1)
    assert Run(tmp_path, sharded(LENGTHS, 1)).steps(1, after=5) == whole[5:] != whole[6:]
    (tmp_path / "6_0.json").write_text((tmp_path / "5_0.json").read_text())
    assert Run(tmp_path, sharded(LENGTHS, 1)).steps(1, after=6) != whole[6:]


def test_the_number_of_workers_may_change(tmp_path):
    source = sharded(LENGTHS, 4)
    whole = Run(tmp_path, source, num_workers=2).steps(0)
    assert Run(tmp_path, source, num_workers=0).steps(0, after=7) == whole[7:]


def test_without_a_position_of_each_rank_all_refuse(tmp_path):
    def work(after=0, **rank):
        return Run(tmp_path, sharded(LENGTHS, 3), **rank).steps(2, after=after)

    def resume(**rank):
        with pytest.raises(ValueError, match=r"no position of the stream.*ignore_data_skip=True"):
            work(after=4, **rank)

    on_ranks(2, work)
    (tmp_path / "4_0.json").unlink()
    on_ranks(2, resume)


OTHER_SETTINGS = [
    ({"seed": 1}, "saved with a stream of seed=0, and now it is 1"),
    ({"shards": 4}, "num_shards=3, and now it is 4"),
]


@pytest.mark.parametrize(("change", "message"), OTHER_SETTINGS)
def test_a_position_of_other_settings_is_refused(change, message, tmp_path):
    Run(tmp_path, sharded(LENGTHS, 3)).steps(0)
    source = sharded(LENGTHS, change.pop("shards", 3))
    with pytest.raises(ValueError, match=message):
        Run(tmp_path, source, **change).steps(0, after=3)


def test_an_endless_stream_with_nothing_to_train_is_said_and_ends(caplog):
    def untrained():
        return ({"input_ids": [7, 8, 9], "labels": [-100] * 3} for _ in iter(int, 1))

    stream = fit_stream(IterableDataset.from_generator(untrained), Overflow("truncate", CAPACITY))
    with pytest.raises(ValueError, match=r"last 50,000 documents .*response_template"):
        next(iter(stream))
    assert "last 1,000 documents of the stream have nothing to train" in caplog.text
