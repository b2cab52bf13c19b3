"""Groups of documents with a long common prefix: which documents, and bins and steps of them."""

import numpy as np
import pytest
from datasets import Dataset
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.sampler import PackedBatchSampler


def arrow(documents):
    return ArrowDocuments(Dataset.from_dict({"input_ids": documents}), ["input_ids"])


def grouped(documents, capacity=4096, most=8):
    documents = arrow(documents)
    return group_documents(PrefixIndex.of(documents), documents.lengths(), capacity, most)


def sets_of(groups):
    return [set(x.tolist()) for x in np.split(groups.documents, groups.offsets[1:-1])]


def answers(prompts, number, *, prompt=60, answer=20, system=0, seed=0):
    """Return documents in random order, and the prompt of each."""
    rng = np.random.default_rng(seed)
    start = rng.integers(5, 90, system).tolist()
    questions = [start + rng.integers(5, 90, prompt).tolist() for _ in range(prompts)]
    of = rng.permutation(np.repeat(np.arange(prompts), number))
    return [questions[q] + rng.integers(5, 90, answer).tolist() for q in of], of


def test_a_prompt_of_most_documents_makes_no_group():
    documents, _ = answers(10, 4, system=100, prompt=5)
    assert set(map(len, sets_of(grouped(documents)))) == {1}
    # Control: of less than half of the documents, it does.
    others, _ = answers(50, 1, seed=1)
    assert max(map(len, sets_of(grouped(documents + others)))) == 8


def test_documents_that_share_only_a_class_meet_at_random():
    """Tool definitions of a third of the documents; their questions begin with few common words."""
    rng = np.random.default_rng(0)
    tools = [rng.integers(5, 90, 100).tolist() for _ in range(3)]
    words = rng.integers(5, 90, (4, 6)).tolist()
    of = rng.integers(0, 4, 240)
    documents = [tools[i % 3] + words[of[i]] + rng.integers(5, 90, 20).tolist() for i in range(240)]
    found = sets_of(grouped(documents))
    assert sorted(map(len, found)) == [8] * 30
    assert all(len({i % 3 for i in group}) == 1 for group in found)
    mixed = [len({of[i] for i in group}) for group in found]
    assert np.mean(mixed) > 2.5, "groups are neighbors in the alphabet"


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 10**6), st.sampled_from([70, 120, 4000]), st.integers(1, 9))
def test_every_document_is_in_one_group_that_fits(seed, capacity, most):
    rng = np.random.default_rng(seed)
    roots = [rng.integers(5, 7, 60) for _ in range(3)]
    documents = [roots[rng.integers(3)][: rng.integers(1, 60)].tolist() for _ in range(50)]
    documents = [x + rng.integers(5, 7, rng.integers(0, 10)).tolist() for x in documents]
    groups = grouped(documents, capacity, most)
    assert sorted(groups.documents.tolist()) == list(range(50))
    assert np.diff(groups.offsets).max() <= most
    assert groups.tokens.max() <= capacity
    rows = np.split(groups.documents, groups.offsets[1:-1])
    assert groups.tokens.tolist() == [computed(arrow(documents), row.tolist()) for row in rows]


# --- bins and steps -------------------------------------------------------------------------------


def computed(documents, chosen):
    row = PackedCollator(shares_prefixes=True)(documents.__getitems__(chosen))
    return row["input_ids"].shape[1]


@pytest.mark.parametrize("strategy", ["bfd", "greedy", "next_fit"])
def test_bins_hold_whole_groups_and_count_computed_tokens(strategy):
    lists, _ = answers(40, 6, system=30)
    groups = grouped(lists, 300)
    documents = arrow(lists)
    sampler = PackedBatchSampler(
        documents.lengths(), 300, strategy=strategy, groups=groups, bins_per_batch=1
    )
    apart = PackedBatchSampler(documents.lengths(), 300, strategy=strategy)
    assert len(sampler) < 0.5 * len(apart)
    for epoch in range(3):
        sampler.set_epoch(epoch)
        plan = sampler.plan()
        assert len(plan) == sampler.num_bins
        assert sorted(plan.indices.tolist()) == list(range(240))
        for chosen, tokens in zip(plan, plan.tokens.tolist(), strict=True):
            assert tokens == computed(documents, chosen.tolist()) <= 300
            whole = np.diff(groups.offsets)[np.unique(groups.numbers[chosen])]
            assert whole.sum() == len(chosen)


@pytest.mark.parametrize("most", [8, 1000])
@pytest.mark.parametrize("system", [0, 700])
def test_the_keys_of_a_row_are_few_for_each_of_its_tokens(most, system):
    """Kernels gather the keys of every segment: a long prompt with many short answers has most."""
    documents, _ = answers(4, 200, prompt=800 - system, answer=8, system=system)
    groups = grouped(documents, 1024, most)
    collate = PackedCollator(shares_prefixes=True)
    plan = groups.pack(1024, "bfd", (0,))
    ratios = []
    for bin_ in np.split(plan.indices, plan.offsets[1:-1]):
        row = collate([{"input_ids": documents[n]} for n in bin_])
        assert row["input_ids"].shape[1] <= 1024
        ratios.append(len(row["key_index"]) / 1024)
    # 8 of documents, and a document more where a group is cut; a document has up to two segments.
    assert max(ratios) <= 2 * 9
    assert np.median(ratios) > (2 if most == 8 and not system else 5), "rows still share"
    # The control: nothing but tokens limits a row of as many answers as fit.
    whole = collate([{"input_ids": document} for document in sorted(documents)[:28]])
    assert len(whole["key_index"]) > 20 * 1024
