"""The segments of a row name exactly the documents that hold their tokens."""

from itertools import pairwise

import numpy as np
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.packing.prefix_tree import build_prefix_tree
from trl_packing.tools.rows.packed_rows import levels_of, segments_of

DOCUMENTS = st.lists(
    st.lists(st.integers(0, 2), min_size=1, max_size=8).map(np.array), min_size=1, max_size=9
)


@settings(max_examples=300, deadline=None)
@given(DOCUMENTS, st.sampled_from([1, 3]))
def test_the_segments_of_a_document_add_up_to_it(documents, min_shared):
    tree = build_prefix_tree(documents, min_shared=min_shared)
    ids, segments = tree.place(np.concatenate(documents)), segments_of(tree)
    assert [s.start for s in segments] == tree.cu_seqlens[:-1].tolist()
    for place, document in enumerate(tree.order.tolist()):
        held = [s for s in segments if place in s.holders]
        parts = [ids[s.start : s.stop] for s in held]
        assert np.array_equal(np.concatenate(parts), documents[document])
        assert [s.position for s in held] == np.cumsum([0, *map(len, parts)])[:-1].tolist()
        assert held[0].parent is None
        assert all(segments[b.parent] is a for a, b in pairwise(held))
        assert [levels_of(segments)[segments.index(s)] for s in held] == list(range(len(held)))


@settings(max_examples=200, deadline=None)
@given(DOCUMENTS)
def test_a_copy_is_no_target(documents):
    tree = build_prefix_tree(documents)
    no_target = np.isin(np.arange(tree.offsets[-1]), tree.offsets)  # the first tokens
    targets = set(tree.targets[~no_target].tolist())
    roots = {s.start for s in segments_of(tree) if s.parent is None}
    copies = {s.start for s in segments_of(tree) if s.repeats}
    assert copies == set(range(tree.starts[-1])) - targets - roots


def test_a_document_that_goes_on_from_another_repeats_nothing():
    tree = build_prefix_tree([np.array([1, 2]), np.array([1, 2, 3])])
    assert [s.repeats for s in segments_of(tree)] == [False, False]
    tree = build_prefix_tree([np.array([1, 2, 4]), np.array([1, 2, 3])])
    assert [s.repeats for s in segments_of(tree)] == [False, False, True]
