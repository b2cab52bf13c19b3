"""Every document exactly once an epoch on any ranks, and the same steps however they are cut."""

from itertools import combinations

import numpy as np
import pytest
from harness import make_trainer
from helpers.steps import assert_exactly_once
from helpers.tiny import documents_of_lengths
from hypothesis import given, settings
from hypothesis import strategies as st

from trl_packing import PackedBatchSampler
from trl_packing.packing.bins import STRATEGIES

CAPACITY = 32
RANKS = [1, 2, 3, 8]

lengths_of_documents = st.lists(st.integers(1, CAPACITY), min_size=8, max_size=60)
layouts = {
    "bins_per_batch": st.integers(1, 4),
    "accumulation": st.integers(1, 4),
    "strategy": st.sampled_from(list(STRATEGIES)),
    "seed": st.integers(0, 100),
    "shuffle": st.booleans(),
    "balance_window": st.integers(1, 9),
    "attention_cost": st.sampled_from([0.0, 0.02]),
}


def all_ranks(lengths, num_ranks, epoch=0, **options) -> list[list[list[int]]]:
    """Return what each rank yields in `epoch`: its micro-batches, each a list of documents."""
    ranks = []
    for rank in range(num_ranks):
        sampler = PackedBatchSampler(lengths, num_ranks=num_ranks, rank=rank, **options)
        sampler.set_epoch(epoch)
        ranks.append(list(sampler))
        assert len(sampler) == len(ranks[-1])
    return ranks


def steps(ranks, accumulation) -> list[set[int]]:
    """Return the documents of each optimizer step."""
    slots = [{d for of_rank in ranks for d in of_rank[at]} for at in range(len(ranks[0]))]
    starts = range(0, len(slots), accumulation)
    return [set.union(*slots[at : at + accumulation]) for at in starts]


def chat_lengths(number: int, capacity: int) -> np.ndarray:
    """Return `number` distinct log-normal lengths in random order."""
    rng = np.random.default_rng(0)
    distinct = np.unique(rng.lognormal(6, 0.8, 10 * number).astype(int).clip(16, capacity))
    return rng.permutation(rng.choice(distinct, number, replace=False))


# --- packed ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("num_ranks", RANKS)
@settings(max_examples=25, deadline=None)
@given(lengths=lengths_of_documents, epoch=st.integers(0, 3), layout=st.fixed_dictionaries(layouts))
def test_every_document_is_seen_exactly_once_and_within_capacity(num_ranks, lengths, epoch, layout):
    ranks = all_ranks(lengths, num_ranks, epoch, capacity=CAPACITY, **layout)
    assert_exactly_once(ranks, len(lengths))
    budget = layout["bins_per_batch"] * CAPACITY
    tokens = [sum(lengths[d] for d in batch) for of_rank in ranks for batch in of_rank]
    assert max(tokens) <= budget


def test_the_trainer_packs_wrapped_pieces_into_full_rows(tmp_path):
    """675 tokens are 22 rows of 32, less pieces of one token: a cut leaves them no target."""
    rows = documents_of_lengths([3 + (i * 11) % 29 for i in range(41)])
    trainer = make_trainer(tmp_path, rows, packing_strategy="wrapped", max_length=32)
    assert trainer.packing_report.tokens > 660
    assert trainer.packing_report.bins == 22


packed = {name: layouts[name] for name in ("bins_per_batch", "strategy")}
packings = st.builds(dict, capacity=st.just(CAPACITY), **packed)
numbers = st.builds(dict, documents_per_step=st.integers(4, 20))


@settings(max_examples=40, deadline=None)
@given(lengths=lengths_of_documents, epoch=st.integers(0, 2), options=packings | numbers)
def test_steps_are_the_same_for_1x4_2x2_and_4x1(lengths, epoch, options):
    one, two, four = (
        steps(all_ranks(lengths, n, epoch, accumulation=4 // n, **options), 4 // n)
        for n in (1, 2, 4)
    )
    assert one == two == four


# --- a step is a number of documents --------------------------------------------------------------

cuts = {"accumulation": st.integers(1, 3), "shuffle": st.booleans()}


@pytest.mark.parametrize("num_ranks", RANKS)
@settings(max_examples=40, deadline=None)
@given(lengths_of_documents, st.integers(0, 3), st.fixed_dictionaries(cuts), st.integers(-5, 20))
def test_steps_hold_what_is_asked_for(num_ranks, lengths, epoch, cut, extra):
    per_step = max(num_ranks * cut["accumulation"] + extra, 1)
    ranks = all_ranks(lengths, num_ranks, epoch, documents_per_step=per_step, **cut)
    assert_exactly_once(ranks, len(lengths))
    *full, last = [len(step) for step in steps(ranks, cut["accumulation"])]
    assert full == [per_step] * (len(full))
    assert 1 <= last <= per_step


def test_a_step_of_documents_is_cut_into_micro_batches_of_equal_cost():
    """The costliest of 8 micro-batches over their mean, 64 documents a step."""
    lengths = chat_lengths(640, 2048)
    c = 1 / (12 * 1024)

    def worst(batches):
        costs = np.array([(lengths[b] + c * lengths[b] ** 2.0).sum() for b in batches])
        return (costs.reshape(-1, 8).max(1) / costs.reshape(-1, 8).mean(1)).mean()

    options = {"documents_per_step": 64, "num_ranks": 2, "accumulation": 4, "attention_cost": c}
    sampler = PackedBatchSampler(lengths, **options)
    assert worst(sampler.micro_batches()) < 1.02
    assert worst(np.arange(640).reshape(80, 8)) > 1.2  # in contiguous chunks


def test_rows_that_stay_as_they_are_come_in_another_order_every_epoch():
    sampler = PackedBatchSampler([3] * 40, rows=True)
    orders = []
    for epoch in range(3):
        sampler.set_epoch(epoch)
        orders.append([row for batch in sampler for row in batch])
    assert len(set(map(tuple, orders))) == 3
    assert all(sorted(order) == [*range(40)] for order in orders)


@settings(max_examples=30, deadline=None)
@given(st.integers(6, 40), st.integers(1, 3), st.integers(1, 3), st.integers(1, 2))
def test_drop_last_leaves_out_unfilled_micro_batches(number, num_ranks, accumulation, batch_size):
    per_step = batch_size * accumulation * num_ranks
    options = {"documents_per_step": per_step, "accumulation": accumulation, "drop_last": True}
    ranks = all_ranks([5] * number, num_ranks, **options)
    batches = [batch for of_rank in ranks for batch in of_rank]
    used = [document for batch in batches for document in batch]
    assert len(set(used)) == len(used) == number - number % (batch_size * num_ranks)
    assert {*map(len, batches)} == {batch_size}


# --- refusals and plugging in ---------------------------------------------------------------------


KINDS = [{"capacity": CAPACITY}, {"documents_per_step": 8}, {"rows": True}]


@pytest.mark.parametrize("options", KINDS)
def test_ranks_without_documents_have_empty_micro_batches(options):
    ranks = all_ranks([5], 4, shuffle=False, **options)
    assert ranks == [[[0]], [[]], [[]], [[]]]


BAD_ARGUMENTS = [
    ({"capacity": 8, "num_ranks": 2, "rank": 2}, "rank=2 is not one of 2 ranks"),
    ({"documents_per_step": 4, "drop_last": True}, "drop_last=True drops all 3 documents"),
]


@pytest.mark.parametrize(("options", "sentence"), BAD_ARGUMENTS)
def test_bad_arguments_are_named(options, sentence):
    with pytest.raises(ValueError, match=sentence):
        PackedBatchSampler([5, 3, 2], **options)


def test_hardly_any_two_documents_meet_again_in_the_next_epoch():
    """The bound of the issue is 20 %; 0.6 % was measured."""
    sampler = PackedBatchSampler(chat_lengths(1000, 4096), 4096)
    found = []
    for epoch in (0, 1, 0):
        sampler.set_epoch(epoch)
        found.append({pair for batch in sampler for pair in combinations(sorted(batch), 2)})
    assert len(found[0] & found[1]) <= 0.02 * len(found[0])
    assert found[2] == found[0], "the control: an epoch is drawn alike"


@pytest.mark.parametrize("strategy", ["bfd", "next_fit", "greedy"])
def test_without_shuffling_every_epoch_is_the_same(strategy):
    sampler = PackedBatchSampler(chat_lengths(50, 1024), 1024, strategy=strategy, shuffle=False)
    first = list(sampler)
    sampler.set_epoch(7)
    assert list(sampler) == first
