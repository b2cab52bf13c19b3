"""Gradients of a run that shares prefixes are those of its documents, one at a time.

The kinds of steps and losses are ways and options of tests/test_oracle.py; here are the families.

The reference (`harness.alone`) puts each document through the untouched model by itself, and knows
nothing of rows. Gradients of documents that see their siblings, or lose their prefix, are apart by
more than 0.1 (the negative controls).
"""

import numpy as np
import pytest
from harness import assert_exact
from helpers.by_hand import by_hand
from helpers.shared_prefixes import (
    FAMILIES,
    build_model,
    forked_documents,
    one_shared_step,
    relative_error,
)

from trl_packing.packing import tree_row
from trl_packing.training.prefix_sharing import PrefixSharing

FAST = [("llama", False, "token"), ("deepseek_v3", True, "document")]
ALL = [(n, lora, by) for n in FAMILIES for lora in (False, True) for by in ("token", "document")]


def assert_is_one_at_a_time(step, expected, *, shares=1.5):
    """The loss and gradients of the documents, in rows that computed fewer tokens."""
    assert step.trainer._isolation.sharing.reason is None
    assert step.computed * shares < step.tokens, "too little was shared to show anything"
    assert_exact(step, expected)


@pytest.mark.parametrize(
    ("name", "lora", "weighting"),
    [case if case in FAST else pytest.param(*case, marks=pytest.mark.slow) for case in ALL],
)
def test_families_train_each_document_as_alone(name, lora, weighting, tmp_path):
    model, documents = build_model(name, lora=lora), forked_documents(weighted=True)
    step = one_shared_step(model, documents, tmp_path, loss_weighting=weighting)
    assert step.documents == len(documents)
    assert_is_one_at_a_time(step, by_hand(model, documents, weighting=weighting))


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(8))
def test_other_documents_train_as_alone(seed, tmp_path):
    model, documents = build_model("qwen3"), forked_documents(seed + 1, weighted=True)
    step = one_shared_step(model, documents, tmp_path)
    assert_is_one_at_a_time(step, by_hand(model, documents))


@pytest.mark.slow
def test_a_bf16_step_is_as_close_as_bf16_allows(tmp_path):
    """Autocast keeps 8 bits; the same run without sharing is as far from float32."""
    model, documents = build_model("llama"), forked_documents()
    expected = by_hand(model, documents)[1]
    errors = {
        mode: relative_error(
            one_shared_step(
                model, documents, tmp_path / mode, prefix_sharing=mode, bf16=True
            ).gradients,
            expected,
        )
        for mode in ("bin", "off")
    }
    assert errors["bin"] < 1.3 * errors["off"] < 0.1


# --- the negative controls ------------------------------------------------------------------------


def _chain(tree):
    """Every segment sees all tokens before it: its siblings too."""
    ends = tree["cu_seqlens"][1:].astype(np.int64)
    return [np.arange(end) for end in ends]


def _no_prefix(tree):
    """Every segment sees only itself."""
    starts, ends = tree["cu_seqlens"][:-1], tree["cu_seqlens"][1:]
    return [np.arange(start, end) for start, end in zip(starts, ends, strict=True)]


def _with_keys(keys_of):
    def spoil(tree):
        keys = keys_of(vars(tree))
        lengths = np.cumsum([0, *map(len, keys)]).astype(np.int32)
        return {"cu_seqlens_k": lengths, "key_index": np.concatenate(keys).astype(np.int64)}

    return spoil


SPOILED = {
    "siblings see each other": _with_keys(_chain),
    "branches lose their prefix": _with_keys(_no_prefix),
    "positions go on": lambda tree: {"position_ids": np.arange(len(tree.position_ids))},
}


@pytest.mark.parametrize(
    "fault", [k if "see" in k else pytest.param(k, marks=pytest.mark.slow) for k in SPOILED]
)
def test_a_spoiled_row_fails_the_same_comparison_and_the_check(fault, tmp_path, monkeypatch):
    make = tree_row.build_prefix_tree

    def spoiled(*args, **options):
        tree = make(*args, **options)
        return type(tree)(**{**vars(tree), **SPOILED[fault](tree)})

    monkeypatch.setattr(tree_row, "build_prefix_tree", spoiled)
    model, documents = build_model("llama"), forked_documents()
    checked = one_shared_step(model, documents, tmp_path / "checked")
    assert "LEAK" in checked.trainer._isolation.sharing.reason
    assert checked.computed == checked.tokens
    expected = by_hand(model, documents)
    assert_exact(checked, expected)

    monkeypatch.setattr(PrefixSharing, "_failure", lambda *args: None)
    unchecked = one_shared_step(model, documents, tmp_path / "unchecked")
    assert relative_error(unchecked.gradients, expected[1]) > 0.1
    with pytest.raises(AssertionError):
        assert_is_one_at_a_time(unchecked, expected)


def test_weights_that_count_once_fail_the_same_comparison(tmp_path, monkeypatch):
    make = tree_row.share_prefixes

    def once(*args):
        row = make(*args)
        weights = row.batch["loss_weights"]
        row.batch["loss_weights"] = (weights > 0).to(weights.dtype)
        return row

    monkeypatch.setattr("trl_packing.packing.collator.share_prefixes", once)
    model, documents = build_model("llama"), forked_documents()
    step = one_shared_step(model, documents, tmp_path)
    assert relative_error(step.gradients, by_hand(model, documents)[1]) > 0.1
