"""The index of prefixes knows the length of every row that shares them."""

import numpy as np
from datasets import Dataset, concatenate_datasets
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_index import PrefixIndex


def random_rows(rng, number=40, *, own_labels=False):
    prompts = [rng.integers(5, 9, rng.integers(10, 60)).tolist() for _ in range(4)]
    rows = []
    for _ in range(number):
        ids = prompts[rng.integers(4)][: rng.integers(10, 60)]
        ids = ids + rng.integers(5, 9, rng.integers(0, 6)).tolist()
        labels = [-100 if i < len(ids) // 2 else token for i, token in enumerate(ids)]
        if own_labels and rng.random() < 0.3:
            labels[rng.integers(len(labels))] = 3
        rows.append({"input_ids": ids, "labels": labels})
    return rows


def lengths_of_rows(documents, rows):
    """Return the tokens of each row as the collator makes it."""
    collate = PackedCollator(shares_prefixes=True)
    return [collate(documents.__getitems__(row))["input_ids"].shape[1] for row in rows]


def assert_knows(documents, rng, number=30):
    index = PrefixIndex.of(documents)
    lengths = documents.lengths()
    sizes = rng.integers(1, min(12, len(documents)), number)
    rows = [rng.permutation(len(documents))[:size].tolist() for size in sizes]
    computed = index.computed_tokens(lengths, np.concatenate(rows), np.cumsum([0, *sizes]))
    assert computed.tolist() == lengths_of_rows(documents, rows)


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6))
def test_computed_tokens_are_those_of_the_rows(seed):
    rng = np.random.default_rng(seed)
    columns = ["input_ids", "labels"]
    assert_knows(ArrowDocuments(Dataset.from_list(random_rows(rng)), columns), rng)


def test_labels_of_their_own_are_not_shared():
    rng = np.random.default_rng(1)
    rows = random_rows(rng, own_labels=True)
    documents = ArrowDocuments(Dataset.from_list(rows), ["input_ids", "labels"])
    assert not PrefixIndex.of(documents).common.any()
    assert not PrefixIndex.of_loaded(rows).common.any()
    without = PrefixIndex.of(ArrowDocuments(Dataset.from_list(rows), ["input_ids"])).common
    assert without.sum() > 0
    assert "key_index" not in PackedCollator(shares_prefixes=True)(rows)


def test_chunks_and_indices_of_the_table_are_followed():
    rng = np.random.default_rng(3)
    parts = [Dataset.from_list(random_rows(rng, number)) for number in (7, 1, 12, 30)]
    dataset = concatenate_datasets(parts)
    assert dataset.data.column("input_ids").num_chunks == 4
    for chosen in (dataset, dataset.shuffle(seed=1), dataset.select(range(5, 45, 2))):
        assert_knows(ArrowDocuments(chosen, ["input_ids", "labels"]), rng)
