"""`entropy` and `mean_token_accuracy` are means over trained tokens, whatever batches hold them.

The reference scores each document alone, from the logits of the untouched model.
"""

import math
from types import SimpleNamespace

import pytest
import torch
from datasets import Dataset
from harness import make_trainer, run
from helpers.by_hand import TOLERANCE, weighted
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.loss.sums import LossSums, Sums

NAMES = ("entropy", "mean_token_accuracy")
LENGTHS = [60, 3, 40, 9, 33, 5, 22, 50, 12, 4]


def guessed(documents):
    """Write what the model would into every second document, so that some targets are hits."""
    model = tiny_model("llama")
    for document in documents[::2]:
        ids, labels = document["input_ids"], document["labels"]
        for t in range(1, len(ids)):
            ids[t] = int(model(torch.tensor([ids[:t]]), use_cache=False).logits[0, -1].argmax())
            labels[t] = ids[t] if labels[t] != IGNORE_INDEX else IGNORE_INDEX
    return documents


DOCUMENTS = guessed(documents_of_lengths(LENGTHS, prompt=2))


@torch.no_grad()
def alone(documents):
    """Return entropy and accuracy over the trained tokens of `documents`, each alone."""
    model = tiny_model("llama").eval()
    entropy, hits, number = 0.0, 0, 0
    for document in documents:
        ids, labels = (torch.tensor(document[name]) for name in ("input_ids", "labels"))
        logits = model(ids[None], use_cache=False).logits[0, :-1].double().log_softmax(-1)
        trained = labels[1:] != IGNORE_INDEX
        entropy += float(-(logits.exp() * logits).sum(-1)[trained].sum())
        hits += int((logits.argmax(-1) == labels[1:])[trained].sum())
        number += int(trained.sum())
    return {"entropy": entropy / number, "mean_token_accuracy": hits / number}


def documents_of(batch):
    """Return the documents of a recorded micro-batch, the padding too: nothing of it is trained."""
    ids, labels, positions = (
        batch[name].flatten() for name in ("input_ids", "labels", "position_ids")
    )
    starts = (positions == 0).nonzero().flatten().tolist()
    parts = zip(starts, [*starts[1:], len(ids)], strict=True)
    return [{"input_ids": ids[a:b].tolist(), "labels": labels[a:b].tolist()} for a, b in parts]


def assert_means(metrics, expected, prefix=""):
    for name in NAMES:
        assert metrics[prefix + name] == pytest.approx(expected[name], rel=TOLERANCE), name


def trained(folder, *, stream=False, documents=DOCUMENTS, **options):
    rows = Dataset.from_list(documents)
    settings = {"max_length": 64, "per_device_train_batch_size": 1, "num_train_epochs": 2}
    settings |= {"gradient_accumulation_steps": 4, "max_steps": -1}
    data = rows.to_iterable_dataset() if stream else rows
    return run(tiny_model("llama"), data, folder, **settings | options)


RUNS = {
    "packed": {},
    "a stream, whose last step has empty micro-batches": {
        "stream": True,
        "max_steps": 2,
        "gradient_accumulation_steps": 8,
    },
    "padded rows": {"attention": "padded"},
    "weights": {"documents": weighted(DOCUMENTS)},
}
SAVED = {"logging_steps": 2, "num_train_epochs": 5, "save_strategy": "steps", "save_steps": 3}
RUNS |= {"several steps a log, and a save between": SAVED}


@pytest.mark.parametrize("name", RUNS)
def test_training_logs_the_mean_over_trained_tokens(name, tmp_path):
    found = trained(tmp_path, **RUNS[name])
    batches = [step for step in found.batches if step]  # a stream ends without one
    logged = [entry for entry in found.trainer.state.log_history if "entropy" in entry]
    assert len(logged) >= 2
    last = 0
    for entry in logged:
        steps = range(last, entry["step"])
        trained_in = [d for step in steps for b in batches[step] for d in documents_of(b)]
        assert_means(entry, alone(trained_in))
        last = entry["step"]
    assert last == found.trainer.state.global_step
    if "empty" in name:
        empty = [not (b["labels"] != IGNORE_INDEX).any() for b in batches[1]]
        assert {*empty} == {True, False}
    if name == "packed":  # the control: TRL's mean of the means of micro-batches is another number
        means = [alone(documents_of(batch)) for batch in batches[0]]
        as_trl = {name: sum(m[name] for m in means) / len(means) for name in NAMES}
        with pytest.raises(AssertionError):
            assert_means(logged[0], as_trl)


@pytest.mark.parametrize("padded", [False, True])
def test_evaluation_reports_the_mean_over_the_set(padded, tmp_path):
    counted = {"compute_metrics": lambda p: {"rows": len(p.label_ids)}} if padded else {}
    data = Dataset.from_list(DOCUMENTS)
    options = {"max_length": 80, "per_device_eval_batch_size": 3 if padded else 2}
    trainer = make_trainer(tmp_path, DOCUMENTS, evaluated=data, arguments=counted, **options)
    expected = alone(DOCUMENTS)
    assert 0 < expected["mean_token_accuracy"] < 1
    for _ in range(2):
        assert_means(trainer.evaluate(), expected, "eval_")


@pytest.mark.parametrize("sources", [0, 2])
def test_sums_are_read_by_the_names_under_which_they_were_added(sources):
    """Two micro-batches of two trained tokens: the second has a document of source 1."""
    sums = LossSums(sources)
    labels = torch.tensor([[-100, 4, 5, -100]])
    scored = SimpleNamespace(
        entropy=torch.tensor([[1.0, 2.0, 9.0]]),
        is_top1=torch.tensor([[True, False, True]]),
        aux_loss=torch.tensor(0.5),
    )
    batch = {"labels": labels, "loss_weights": torch.tensor([[0.0, 2.0, 1.0, 0.0]])}
    for source in (-1, 1):
        ids = torch.full_like(labels, source)
        sums.add(batch | {"source_ids": ids}, torch.tensor([[3.0, 7.0, math.nan]]), scored)
    found = Sums.of(sums.take().numpy())
    assert found._asdict() == {
        "by_source": [(0, 0, 0), (13, 3, 2)][:sources],
        "entropy": 6,
        "hits": 2,
        "trained": 4,
        "aux_loss": 4,
        "tokens": 8,
        "micro_batches": 2,
        "weight": 6,
        "loss": 26,
    }
    assert sums.take() is None
