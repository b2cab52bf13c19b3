"""A prefix tree holds every document: its tokens on its path, its targets once, nothing else."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.packing.prefix_tree import build_prefix_tree

DOCUMENTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array), min_size=1, max_size=9
)


def keys_of_rows(tree):
    """Return for each row the rows that it sees."""
    seen = {}
    for s in range(len(tree.cu_seqlens) - 1):
        q0, q1 = tree.cu_seqlens[s : s + 2].tolist()
        keys = tree.key_index[slice(*tree.cu_seqlens_k[s : s + 2])]
        assert keys[len(keys) - (q1 - q0) :].tolist() == list(range(q0, q1))
        for row in range(q0, q1):
            seen[row] = keys[: len(keys) - (q1 - row) + 1].tolist()
    return seen


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.sampled_from([1, 3]))
def test_each_target_is_predicted_behind_exactly_its_document(documents, min_shared):
    tree = build_prefix_tree(documents, min_shared=min_shared)
    row_ids = tree.place(documents)
    seen = keys_of_rows(tree)
    assert len(seen) == len(row_ids) == len(tree.position_ids)
    for document, targets in zip(documents, tree.targets, strict=True):
        for depth in range(1, len(document)):
            row = int(targets[depth])
            assert row_ids[row] == document[depth]
            # Losses compare a position with the label at the next one in the row.
            assert row_ids[seen[row - 1]].tolist() == document[:depth].tolist()
    for row, keys in seen.items():
        assert tree.position_ids[keys].tolist() == list(range(len(keys))), row


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_weights_add_up(documents):
    tree = build_prefix_tree(documents)
    weights = [np.random.default_rng(i).random(len(d)) for i, d in enumerate(documents)]
    total = tree.sum_targets(weights)
    assert np.isclose(total.sum(), sum(w[1:].sum() for w in weights))


def test_a_trie_is_computed_once():
    prompt = list(range(100))
    documents = [np.array([*prompt, 200 + i, 300, 301]) for i in range(16)]
    tree = build_prefix_tree(documents)
    assert len(tree.position_ids) == 99 + 16 * 4
    assert sum(map(len, documents)) == 16 * 103


def test_identical_documents_are_computed_once_and_counted_as_many():
    document = np.arange(5)
    tree = build_prefix_tree([document] * 3)
    assert len(tree.position_ids) == 5
    assert tree.sum_targets([np.ones(5)] * 3).tolist() == [0, 3, 3, 3, 3]


@pytest.mark.parametrize("lengths", [(5, 3), (3, 5), (1, 4), (4, 1)])
def test_a_document_that_is_a_prefix_of_another_adds_nothing(lengths):
    tree = build_prefix_tree([np.arange(n) for n in lengths])
    assert len(tree.position_ids) == max(lengths)
    assert len(tree.cu_seqlens) == 3 or max(lengths) == min(lengths)
