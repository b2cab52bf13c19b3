"""Sources of a stream have the same numbers on all ranks, whichever rank meets them first."""

import threading
from concurrent.futures import ThreadPoolExecutor

import numpy as np
import pytest
import torch
from datasets import Dataset

from trl_packing import PackedCollator
from trl_packing.documents.host_row import host_row
from trl_packing.streaming.loader import StreamBatches
from trl_packing.streaming.reader import StreamSettings
from trl_packing.streaming.source_names import SourceColumn, SourceNames

COLLATE = PackedCollator(tensors_only=True)


def document(source, length=4):
    return {"input_ids": [7] * length, "kind": source}


def batch_of(*sources, **options):
    """Return a micro-batch of documents of 1, 2, … tokens, and the names of its sources."""
    documents = [document(source, n) for n, source in enumerate(sources, start=1)]
    numbered, names = SourceColumn("kind", **options).numbered(documents)
    return COLLATE(numbered), names


def names_of(**options):
    return SourceNames(SourceColumn("kind"), **{"most": 3, **options})


def sources_of(batch, names):
    """Return the source of each document, as the CPU copy and the tensor of the row have it."""
    found = [names.names[n] if n >= 0 else None for n in host_row(batch).sources]
    per_token = np.repeat(host_row(batch).sources, host_row(batch).lengths)
    assert batch["source_ids"][0].tolist() == per_token.tolist()
    return found


def test_documents_of_several_micro_batches_keep_their_sources():
    names = names_of()
    for sources in (("web", "code", "web"), ("books", "web"), ("code", "books", "code")):
        batch, found = batch_of(*sources)
        if names.lacks(found):
            names.agree(found)
        names.renumber(batch, found)
        assert sources_of(batch, names) == [*sources]
    assert names.names == ("web", "code", "books")
    # The control: numbers of a micro-batch are not those of the run.
    batch, _ = batch_of("code", "books")
    assert sources_of(batch, names) != ["code", "books"]


@pytest.mark.parametrize(
    ("values", "options", "expected"),
    [
        ((3, 1, 3), {}, ["3", "1", "3"]),
        ((True, False), {}, ["True", "False"]),
        ((np.int64(3), np.str_("a")), {}, ["3", "a"]),
        ((1, 0, -1), {"classes": ["web", "code"]}, ["code", "web", None]),
        (("web", None, 0.5, ["a"]), {}, ["web", None, None, None]),
    ],
    ids=["numbers", "booleans", "of NumPy", "classes", "no names"],
)
def test_values_of_the_column_become_names(values, options, expected, caplog):
    names = names_of()
    batch, found = batch_of(*values, **options)
    names.agree(found)
    names.renumber(batch, found)
    assert sources_of(batch, names) == expected
    assert ("have no 'kind', or a value that is neither" in caplog.text) == (None in expected)


def test_padding_of_a_row_belongs_to_no_source():
    numbered, found = SourceColumn("kind").numbered([document("web", 3)])
    batch = PackedCollator(tensors_only=True, pad_to_multiple_of=8)(numbered)
    names = names_of()
    names.agree(["code", *found])
    names.renumber(batch, found)
    assert batch["source_ids"][0].tolist() == [1, 1, 1, *[-1] * 5]


def test_too_many_sources_are_not_told_apart(caplog):
    names = names_of(most=2)
    batch, found = batch_of("a", "b")
    names.agree(found)
    assert names.names == ("a", "b")
    assert not caplog.text
    batch, found = batch_of("b", "c")
    assert names.lacks(found)
    names.agree(found)
    names.renumber(batch, found)
    assert names.names == ()
    assert sources_of(batch, names) == [None, None]
    assert "'kind' of the stream has more than 2 different values" in caplog.text
    assert not names.lacks(["d"])


class Ranks:
    """Threads that agree, and pass values to each other, as ranks do."""

    def __init__(self, number):
        self.values = [None] * number
        self.barrier = threading.Barrier(number, timeout=60)

    def gather_on(self, rank):
        def gather(value):
            self.values[rank] = value
            self.barrier.wait()
            found = list(self.values)
            self.barrier.wait()
            return found

        return gather

    def agree_on(self, rank):
        return lambda value: max(self.gather_on(rank)(value))


@pytest.mark.parametrize("accumulation", [1, 2])
def test_ranks_number_the_sources_of_each_other_alike(accumulation):
    """The shards have other sources, and one of them ends first."""
    shards = [["a", "a", "b", "a"], ["c", "d", "c", "c", "a", "e", "d", "c"]]
    rows = [document(source) for shard in shards for source in shard]
    # `Dataset.to_iterable_dataset` cuts shards of equal size.
    stream = Dataset.from_list(rows[:4]).to_iterable_dataset(1)
    other = Dataset.from_list(rows[4:]).to_iterable_dataset(1)
    ranks = Ranks(2)

    def read(rank):
        names = names_of(most=9, gather=ranks.gather_on(rank))
        batches = StreamBatches(
            [stream, other][rank],
            StreamSettings(None, bins_per_batch=1),
            COLLATE,
            accumulation=accumulation,
            agree=ranks.agree_on(rank),
            sources=names,
        )
        made = list(batches)
        return names.names, [sources_of(b, names) if "source_ids" in b else [] for b in made]

    with ThreadPoolExecutor(2) as pool:
        first, second = pool.map(read, range(2))
    assert first[0] == second[0]
    assert sorted(first[0]) == ["a", "b", "c", "d", "e"]
    assert [s for batch in first[1] for s in batch] == shards[0]
    assert [s for batch in second[1] for s in batch] == shards[1]
    assert len(first[1]) == len(second[1]) == 8


def test_documents_of_a_stream_without_sources_are_unchanged():
    batches = list(StreamBatches([document("a")] * 3, StreamSettings(32), COLLATE))
    assert all("source_ids" not in batch for batch in batches)
    assert torch.equal(batches[0]["input_ids"], torch.full((1, 12), 7))
