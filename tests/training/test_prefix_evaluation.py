"""An evaluation on rows with shared prefixes gives the metrics of its documents, one at a time."""

import math

import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_step import tiny_tokenizer
from datasets import Dataset
from harness import SMOOTHING, bound_of, in_dtype, losses_of_tokens
from helpers.by_hand import LOSSES
from helpers.one_step import ONE_STEP
from helpers.shared_prefixes import build_model, forked_documents

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.packing import tree_row


def with_sources(documents):
    """Siblings of one prefix belong to different sources, which train its positions together."""
    return [d | {"source": "abc"[number % 3]} for number, d in enumerate(documents)]


def metrics_by_hand(model, documents, loss="nll", weighting="token"):
    """Return each metric of documents alone in float64, and how far float32 is from it."""
    rounded, exact = (
        metrics_in(dtype, model, documents, loss, weighting)
        for dtype in (torch.float32, torch.float64)
    )
    return {name: (value, abs(rounded[name] - value)) for name, value in exact.items()}


@torch.no_grad()
def metrics_in(dtype, model, documents, loss, weighting):
    """Return loss, entropy and accuracy, and the loss of each source, of documents alone."""
    sums: dict[str, list[float]] = {}
    entropies, hits, count = 0.0, 0, 0
    for document in documents:
        ids, labels = (torch.tensor(document[key]) for key in ("input_ids", "labels"))
        trained = labels[1:] != IGNORE_INDEX
        with in_dtype(model.eval(), dtype) as ready:
            logits = ready(input_ids=ids[None]).logits[0, :-1][trained]
        targets = labels[1:][trained]
        weights = torch.tensor(document.get("loss_weights", [1.0] * len(ids)))[1:][trained]
        n = float(weights.sum())
        divisor = {"token": 1.0, "document": n, "sqrt": math.sqrt(n)}[weighting] or 1.0
        weights = weights.double() * document.get("loss_weight", 1.0) / divisor
        losses = losses_of_tokens(logits, targets, loss).double()
        for name in ("", "_" + document.get("source", "")):
            total = sums.setdefault(name, [0.0, 0.0])
            total[0] += float((weights * losses).sum())
            total[1] += float(weights.sum())
        log_probs = F.log_softmax(logits, -1)
        entropies -= float((log_probs.exp() * log_probs).sum())
        hits += int((logits.argmax(-1) == targets).sum())
        count += len(targets)
    return {
        **{f"eval_loss{name}": loss / total for name, (loss, total) in sums.items()},
        "eval_entropy": entropies / count,
        "eval_mean_token_accuracy": hits / count,
    }


CASES = {
    "packed": {},
    "a row for two bins": {"per_device_eval_batch_size": 2},
    "padding-free": {"eval_packing": False, "per_device_eval_batch_size": 7},
    "weights of documents": {"loss_weighting": "document"},
    "dft": LOSSES["dft"],
    "smoothed": LOSSES["smoothed"],
    "a worker": {"dataloader_num_workers": 1},
}
QUICK = ("weights of documents",)


def evaluate(model, documents, folder, saved, *, stream=False, **options):
    options = {"prefix_sharing": "bin", "per_device_eval_batch_size": 8} | options
    dataset = Dataset.from_list(documents)
    trainer = PackedSFTTrainer(
        model,
        PackedSFTConfig(**ONE_STEP | {"output_dir": str(folder), "max_length": 128} | options),
        train_dataset=dataset,
        eval_dataset=dataset.to_iterable_dataset() if stream else dataset,
        processing_class=tiny_tokenizer(),
    )
    trainer.evaluate()
    assert trainer._isolation.sharing.reason is None
    return trainer.state.log_history[-1]


@pytest.fixture
def saved(monkeypatch):
    """Return [tokens of documents, tokens computed] of all rows of this process that share."""
    counts, make = [0, 0], tree_row.build_prefix_tree

    def counted(*args, **options):
        tree = make(*args, **options)
        counts[0] += int(tree.offsets[-1])
        counts[1] += len(tree.position_ids)
        return tree

    monkeypatch.setattr(tree_row, "build_prefix_tree", counted)
    return counts


def assert_same_metrics(found, expected):
    for name, (value, error) in expected.items():
        if not name.endswith("_"):
            assert found[name] == pytest.approx(value, rel=0, abs=bound_of(value, error)), name


@pytest.mark.parametrize(
    "options",
    [v if k in QUICK else pytest.param(v, marks=pytest.mark.slow) for k, v in CASES.items()],
    ids=CASES,
)
@pytest.mark.parametrize("sources", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_metrics_are_those_of_documents_alone(options, sources, tmp_path, saved):
    model, documents = build_model("qwen3"), forked_documents(weighted=True)
    if sources:
        documents = with_sources(documents)
        options = options | {"source_column": "source"}
    found = evaluate(model, documents, tmp_path, saved, **options)
    if "dataloader_num_workers" not in options:  # a worker counts in its own process
        assert saved[1] < 0.8 * saved[0]
    loss = next((n for n, o in LOSSES.items() if o and o.items() <= options.items()), "nll")
    weighting = options.get("loss_weighting", "token")
    expected = metrics_by_hand(model, documents, loss, weighting)
    if "label_smoothing_factor" in options:
        assert options["label_smoothing_factor"] == SMOOTHING
        expected = {n: v for n, v in expected.items() if "loss" in n}
    assert_same_metrics(found, expected)


@pytest.mark.slow
@pytest.mark.parametrize("eval_packing", [True, False])
def test_a_stream_is_evaluated_as_its_documents_alone(eval_packing, tmp_path, saved):
    model, documents = build_model("llama"), forked_documents(weighted=True)
    found = evaluate(model, documents, tmp_path, saved, stream=True, eval_packing=eval_packing)
    assert saved[1] < 0.8 * saved[0]
    assert_same_metrics(found, metrics_by_hand(model, documents))


def test_counts_of_a_shared_position_that_are_lost_fail_the_same_comparison(
    tmp_path, saved, monkeypatch
):
    """The control: entropy and accuracy need the documents that train each position."""
    share = tree_row.share_prefixes

    def lost(*args):
        row = share(*args)
        row.batch["target_counts"].clamp_(max=1)
        return row

    monkeypatch.setattr("trl_packing.packing.collator.share_prefixes", lost)
    model, documents = build_model("llama"), forked_documents()
    found = evaluate(model, documents, tmp_path, saved)
    with pytest.raises(AssertionError):
        assert_same_metrics(found, metrics_by_hand(model, documents))
