"""Streams whose tokens name their documents."""

from datasets import Dataset, IterableDataset

CAPACITY = 32


def documents(lengths) -> list[dict]:
    """Documents of these lengths; every token of document i is i."""
    return [{"input_ids": [i] * length} for i, length in enumerate(lengths)]


def stream_of(rows) -> IterableDataset:
    """A stream that knows neither its columns nor their types before it is read."""
    return IterableDataset.from_generator(lambda: iter(rows))


def sharded(lengths, num_shards: int) -> IterableDataset:
    return Dataset.from_list(documents(lengths)).to_iterable_dataset(num_shards)


def names(batch) -> list[int]:
    return [int(document["input_ids"][0]) for document in batch]


LENGTHS = [3 + (i * 7) % 29 for i in range(90)]


def batched(batch):
    return {"input_ids": [list(ids) for ids in batch["input_ids"]]}


SOURCES = {
    "shards": lambda: sharded(LENGTHS, 3),
    "generator": lambda: stream_of(documents(LENGTHS)),
    "shuffled": lambda: sharded(LENGTHS, 3).shuffle(seed=3, buffer_size=20),
    "shuffled, then mapped": lambda: (
        sharded(LENGTHS, 3).shuffle(seed=3, buffer_size=20).map(batched, batched=True, batch_size=7)
    ),
}
