"""A prefix tree holds every document: its tokens on its path, its targets once, nothing else."""

import numpy as np
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
    row_ids = tree.as_row(np.concatenate(documents))
    seen = keys_of_rows(tree)
    assert len(seen) == len(row_ids) == len(tree.position_ids)
    targets_of = np.split(tree.targets, tree.offsets[1:-1])
    for document, targets in zip(documents, targets_of, strict=True):
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
    total = tree.sum_targets(np.concatenate(weights))
    assert np.isclose(total.sum(), sum(w[1:].sum() for w in weights))
