"""Gradients of a run that shares prefixes are those of its documents, one at a time.

The reference (`harness.alone`) puts each document through the untouched model by itself, and knows
nothing of rows. Gradients of documents that see their siblings, or lose their prefix, are apart by
more than 0.1 (the negative controls).
"""

import numpy as np
import pytest
from datasets import Dataset
from harness import assert_exact
from helpers.by_hand import LOSSES, by_hand
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


STEPS = {
    "accumulated": {"per_device_train_batch_size": 3, "gradient_accumulation_steps": 3},
    "padding-free": {"packing": False, "per_device_train_batch_size": 19},
    "padding-free, accumulated": {
        "packing": False,
        "per_device_train_batch_size": 7,
        "gradient_accumulation_steps": 3,
    },
    "documents_per_step": {"documents_per_step": 19, "per_device_train_batch_size": 3},
    "padded to 64": {"pad_to_multiple_of": 64},
    "square root": {"loss_weighting": "sqrt"},
    "gradient checkpointing": {"gradient_checkpointing": True},
    "a worker": {"dataloader_num_workers": 1},
    "first-fit bins": {"packing_strategy": "bfd_split", "overflow": "split"},
    "groups": {"prefix_sharing": "group"},
    "groups, accumulated": {
        "prefix_sharing": "group",
        "prefix_group_size": 4,
        "per_device_train_batch_size": 2,
        "gradient_accumulation_steps": 4,
    },
    "groups, padding-free": {
        "prefix_sharing": "group",
        "packing": False,
        "per_device_train_batch_size": 7,
        "gradient_accumulation_steps": 3,
    },
    "groups, documents_per_step": {
        "prefix_sharing": "group",
        "documents_per_step": 19,
        "per_device_train_batch_size": 3,
    },
}
QUICK = ("accumulated", "groups, padding-free")


@pytest.mark.parametrize(
    "options",
    [v if k in QUICK else pytest.param(v, marks=pytest.mark.slow) for k, v in STEPS.items()],
    ids=STEPS,
)
def test_every_kind_of_step_trains_each_document_as_alone(options, tmp_path):
    model, documents = build_model("llama"), forked_documents(weighted=True)
    step = one_shared_step(model, documents, tmp_path, **options)
    assert step.documents == len(documents)
    weighting = options.get("loss_weighting", "token")
    assert_is_one_at_a_time(step, by_hand(model, documents, weighting=weighting), shares=1.2)


@pytest.mark.parametrize(
    "loss", ["dft", *(pytest.param(k, marks=pytest.mark.slow) for k in LOSSES if k != "dft")]
)
@pytest.mark.parametrize("weighted", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_every_loss_trains_each_document_as_alone(loss, weighted, tmp_path):
    model, documents = build_model("llama"), forked_documents(weighted=weighted)
    step = one_shared_step(model, documents, tmp_path, **LOSSES[loss])
    assert_is_one_at_a_time(step, by_hand(model, documents, loss))


@pytest.mark.parametrize("workers", [0, pytest.param(1, marks=pytest.mark.slow)])
@pytest.mark.parametrize("packing", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_a_stream_trains_each_document_as_alone(workers, packing, tmp_path):
    model, documents = build_model("llama"), forked_documents(weighted=True)
    stream = Dataset.from_list(documents).to_iterable_dataset()
    size = 12 if packing else 19
    options = {"max_steps": 1, "packing": packing, "dataloader_num_workers": workers}
    step = one_shared_step(model, stream, tmp_path, per_device_train_batch_size=size, **options)
    assert step.documents == len(documents)
    assert_is_one_at_a_time(step, by_hand(model, documents))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_compiled_step_trains_each_document_as_alone(name, tmp_path):
    model, documents = build_model(name), forked_documents()
    options = {"torch_compile": True, "torch_compile_backend": "aot_eager"}
    step = one_shared_step(model, documents, tmp_path, **options)
    assert_is_one_at_a_time(step, by_hand(model, documents))


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
