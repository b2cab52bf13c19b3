"""Rows at the edges of sharing: one document, equal ones, labels of their own, a group too large.

Each run is one optimizer step, compared with its documents one at a time, as in
test_prefix_gradients.py.
"""

import numpy as np
import pytest
from architectures.tiny_models import DOCUMENT_IDS
from harness import assert_exact
from helpers.by_hand import by_hand
from helpers.shared_prefixes import build_model, one_shared_step, relative_error

from trl_packing.documents.labels import IGNORE_INDEX

CAPACITY = 128


def draw(rng, length):
    return rng.integers(DOCUMENT_IDS.start + 7, DOCUMENT_IDS.stop, length).tolist()


def answers(number, *, prompt=40, answer=20, trains_prompt=(), seed=0):
    """Return answers to one prompt; those of `trains_prompt` train their prompt too."""
    rng = np.random.default_rng(seed)
    question = draw(rng, prompt)
    rows = [question + draw(rng, answer) for _ in range(number)]
    return [
        {"input_ids": ids, "labels": ids if i in trains_prompt else masked(ids, prompt)}
        for i, ids in enumerate(rows)
    ]


def masked(ids, prompt):
    return [IGNORE_INDEX] * prompt + ids[prompt:]


def with_labels_of_their_own(documents):
    """Train other tokens than those of the document: `(id + 1)` behind each prompt."""
    return [d | {"labels": [x if x < 0 else x + 1 for x in d["labels"]]} for d in documents]


def with_weights(documents):
    rng = np.random.default_rng(1)
    return [
        d | {"loss_weights": (rng.integers(1, 9, len(d["input_ids"])) / 4).tolist()}
        for d in documents
    ]


EQUAL = answers(1) * 6
# name -> documents, and whether they share anything.
CASES = {
    "one document": (answers(1), False),
    "equal documents": (EQUAL, True),
    "equal documents with other weights": (with_weights(EQUAL), True),
    "equal documents with labels of their own": (with_labels_of_their_own(EQUAL), False),
    "labels of their own in some": (answers(3) + with_labels_of_their_own(answers(3)), True),
    "prompts that some documents train": (answers(5, trains_prompt=(1, 4)), True),
    "a document that another one begins with": ([*answers(2), *answers(2, answer=30)], True),
}
FAST = ("one document", "labels of their own in some")


@pytest.mark.parametrize("sharing", ["bin", pytest.param("group", marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case", [name if name in FAST else pytest.param(name, marks=pytest.mark.slow) for name in CASES]
)
def test_unusual_documents_train_as_alone(case, sharing, tmp_path):
    documents, shares = CASES[case]
    model = build_model("llama")
    step = one_shared_step(model, documents, tmp_path, prefix_sharing=sharing)
    assert_is_one_at_a_time(step, model, documents)
    assert (step.computed < step.tokens) == shares


@pytest.mark.parametrize("most", [64, pytest.param(3, marks=pytest.mark.slow)])
def test_a_group_that_is_larger_than_a_bin_is_cut_and_trains_as_alone(most, tmp_path):
    """Ten answers to a prompt compute 240 tokens; each bin of 128 repeats the prompt of 40."""
    documents = [row for seed in range(3) for row in answers(10, seed=seed)]
    model, one_bin = build_model("llama"), {"per_device_train_batch_size": 1}
    groups = {"prefix_sharing": "group", "prefix_group_size": most, "max_length": CAPACITY}
    step = one_shared_step(
        model, documents, tmp_path, gradient_accumulation_steps=12, **groups, **one_bin
    )
    assert_is_one_at_a_time(step, model, documents)
    sizes = [row.num_tokens for row in step.rows]
    assert max(sizes) <= CAPACITY
    assert len(sizes) >= 9
    assert 3 * 240 < step.computed == sum(sizes) < 0.7 * step.tokens


def test_labels_of_their_own_that_share_fail_the_same_comparison(tmp_path, monkeypatch):
    """The negative control: documents that agree on tokens, and not on labels, are merged."""
    monkeypatch.setattr(
        "trl_packing.packing.tree_row._groups", lambda flat, starts: [0] * len(starts)
    )
    documents, model = CASES["labels of their own in some"][0], build_model("llama")
    step = one_shared_step(model, documents, tmp_path)
    assert relative_error(step.gradients, by_hand(model, documents)[1]) > 0.1


def assert_is_one_at_a_time(step, model, documents):
    assert step.documents == len(documents)
    assert_exact(step, by_hand(model, documents))
