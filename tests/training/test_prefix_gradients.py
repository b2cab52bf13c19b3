"""A step, and an evaluation, that shares prefixes is that of its documents, one at a time.

The kinds of steps and losses, and the models, are rows of tests/test_oracle.py; here are rows at
the edges of sharing. The reference (`harness.alone`) puts each document through the
untouched model by itself, and knows nothing of rows. Gradients of documents that see their
siblings, or lose their prefix, are apart by more than 0.1 (the negative controls).
"""

import re
from itertools import pairwise

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_models import DOCUMENT_IDS
from datasets import Dataset
from harness import (
    alone,
    assert_exact,
    bound_of,
    in_dtype,
    losses_of_tokens,
    make_trainer,
    relative_error,
)
from helpers.by_hand import LOSSES
from helpers.combinations import fast
from helpers.one_step import ONE_STEP
from helpers.shared_prefixes import (
    forked_documents,
    one_shared_step,
    share_unchecked,
    siblings_see_each_other,
    spoil_rows,
    spoil_trees,
    with_keys,
)
from helpers.tiny import tiny_model

# --- rows at the edges ----------------------------------------------------------------------------

CAPACITY = 128


def answers(number, *, seed=0, labels_plus=0):
    """Return answers to one prompt; with `labels_plus=1` they train other tokens than their own."""
    rng = np.random.default_rng(seed)
    ids = rng.integers(DOCUMENT_IDS.start + 7, DOCUMENT_IDS.stop, 40 + number * 20)
    rows = []
    for answer in np.split(ids[40:], number):
        labels = [-100] * 40 + (answer + labels_plus).tolist()
        rows.append({"input_ids": [*ids[:40].tolist(), *answer.tolist()], "labels": labels})
    return rows


def with_weights(documents):
    rng = np.random.default_rng(1)
    weights = [(rng.integers(1, 9, len(d["input_ids"])) / 4).tolist() for d in documents]
    return [d | {"loss_weights": w} for d, w in zip(documents, weights, strict=True)]


# name -> documents, and whether they share anything.
CASES = {
    "equal documents with other weights": (with_weights(answers(1) * 6), True),
    "equal documents with labels of their own": (answers(1, labels_plus=1) * 6, False),
    "labels of their own in some": (answers(3) + answers(3, labels_plus=1), False),
}


@pytest.mark.parametrize("sharing", fast(("bin", "group"), ("bin",)))
@pytest.mark.parametrize("case", fast(CASES, ("labels of their own in some",)))
def test_unusual_documents_train_as_alone(case, sharing, tmp_path):
    (documents, shares) = CASES[case]
    model = tiny_model("llama")
    step = one_shared_step(model, documents, tmp_path, prefix_sharing=sharing)
    assert_exact(step, alone(model, documents))
    assert step.documents == len(documents)
    assert (step.computed < step.tokens) == shares


# --- evaluation -----------------------------------------------------------------------------------


@torch.no_grad()
def metrics_in(dtype, model, documents, loss="nll", weighting="token"):
    """Return loss, entropy and accuracy, and the loss of each source, of documents alone."""
    sums: dict[str, np.ndarray] = {}

    def add(name, *parts):
        sums[name] = sums.get(name, np.zeros(2)) + [float(part) for part in parts]

    for document in documents:
        ids, labels = (torch.tensor(document[key]) for key in ("input_ids", "labels"))
        trained = labels[1:] != -100
        with in_dtype(model.eval(), dtype) as ready:
            logits = ready(input_ids=ids[None]).logits[0, :-1][trained]
        targets = labels[1:][trained]
        weights = torch.tensor(document["loss_weights"])[1:][trained]
        divisor = {"token": 1.0, "document": float(weights.sum())}[weighting] or 1.0
        weights = weights.double() * document["loss_weight"] / divisor
        losses = losses_of_tokens(logits, targets, loss).double()
        for name in ("eval_loss", f"eval_loss_{document['source']}"):
            add(name, (weights * losses).sum(), weights.sum())
        log_probs = F.log_softmax(logits, -1)
        add("eval_entropy", -(log_probs.exp() * log_probs).sum(), len(targets))
        hits = (logits.argmax(-1) == targets).sum()
        add("eval_mean_token_accuracy", hits, len(targets))
    return {name: float(total / number) for name, (total, number) in sums.items()}


EVALUATIONS = {
    "padding-free": {"eval_packing": False, "per_device_eval_batch_size": 7},
    "weights of documents": {"loss_weighting": "document"},
    "dft": LOSSES["dft"],
    "smoothed": LOSSES["smoothed"],
    "a stream": {"source_column": None},
}


def evaluate(model, folder, documents, stream=False, **options):
    settings = {"source_column": "source", "per_device_eval_batch_size": 8, "max_length": 128}
    dataset = Dataset.from_list(documents)
    trainer = make_trainer(
        folder,
        dataset,
        model,
        evaluated=dataset.to_iterable_dataset() if stream else dataset,
        **ONE_STEP | {"prefix_sharing": "bin"} | settings | options,
    )
    trainer.evaluate()
    assert any("key_index" in batch for batch in trainer.get_eval_dataloader())
    return trainer.state.log_history[-1]


def weighted_documents():
    """Siblings of one prefix belong to different sources, which train its positions together."""
    documents = forked_documents(weighted=True)
    return [d | {"source": "abc"[number % 3]} for number, d in enumerate(documents)]


def assert_same_metrics(found, model, documents, *options, names=None):
    """Hold metrics to those of documents alone in float64, as far as float32 rounds them."""
    rounded, exact = (
        metrics_in(dtype, model, documents, *options) for dtype in (torch.float32, torch.float64)
    )
    for name in names or exact:
        bound = bound_of(exact[name], abs(rounded[name] - exact[name]))
        assert found[name] == pytest.approx(exact[name], rel=0, abs=bound), name


@pytest.mark.parametrize("name", fast(EVALUATIONS, ("weights of documents",)))
def test_metrics_are_those_of_documents_alone(name, tmp_path):
    model = tiny_model("qwen3")
    documents = weighted_documents()
    options = EVALUATIONS[name]
    found = evaluate(model, tmp_path, documents, stream=name == "a stream", **options)
    loss = name if name in ("dft", "smoothed") else "nll"
    weighting = options.get("loss_weighting", "token")
    losses = ["eval_loss", *(f"eval_loss_{source}" for source in "abc")]
    names = {"smoothed": losses, "a stream": losses[:1]}.get(name)
    assert_same_metrics(found, model, documents, loss, weighting, names=names)


def test_counts_of_a_shared_position_that_are_lost_fail_the_same_comparison(tmp_path, monkeypatch):
    """The control: entropy and accuracy need the documents that train each position."""
    spoil_rows(monkeypatch, lambda batch: {"target_counts": batch["target_counts"].clamp(max=1)})
    model = tiny_model("llama")
    documents = weighted_documents()
    found = evaluate(model, tmp_path, documents)
    with pytest.raises(AssertionError):
        assert_same_metrics(found, model, documents)


# --- the negative controls ------------------------------------------------------------------------


def branches_lose_their_prefix(tree):
    return with_keys([np.arange(*ends) for ends in pairwise(tree.cu_seqlens)])


SPOILED = {
    "siblings see each other": siblings_see_each_other,
    "branches lose their prefix": branches_lose_their_prefix,
    "positions go on": lambda tree: {"position_ids": np.arange(len(tree.position_ids))},
}


@pytest.mark.parametrize("fault", fast(SPOILED, ("siblings see each other",)))
def test_a_spoiled_row_fails_the_same_comparison_and_the_check(fault, tmp_path, monkeypatch):
    spoil_trees(monkeypatch, SPOILED[fault])
    model = tiny_model("llama")
    documents = forked_documents()
    checked = one_shared_step(model, documents, tmp_path / "checked")
    assert re.search("LEAK|DIFFER", checked.trainer.packing_report.prefixes.reason)
    assert checked.computed == checked.tokens
    expected = alone(model, documents)
    assert_exact(checked, expected)
    share_unchecked(monkeypatch)
    unchecked = one_shared_step(model, documents, tmp_path / "unchecked")
    assert relative_error(unchecked.gradients, expected[1]) > 0.1
    assert unchecked.computed * 1.5 < unchecked.tokens, "too little was shared to show anything"
    with pytest.raises(AssertionError):
        assert_exact(unchecked, expected)


def test_weights_that_count_once_fail_the_same_comparison(tmp_path, monkeypatch):
    def counted_once(batch):
        weights = batch["loss_weights"]
        return {"loss_weights": (weights > 0).to(weights.dtype)}

    spoil_rows(monkeypatch, counted_once)
    model = tiny_model("llama")
    documents = forked_documents()
    step = one_shared_step(model, documents, tmp_path)
    assert relative_error(step.gradients, alone(model, documents)[1]) > 0.1
