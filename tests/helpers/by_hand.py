"""A step and an evaluation computed by hand, one document at a time, and the same by the trainer.

by_hand(model, documents, loss, weighting)     Σ w · loss of a token / Σ w, and its gradients
one_step(model, documents, folder, **options)  loss and gradients of one optimizer step
assert_same_step(found, expected)
"""

import copy
import math

import pytest
import torch
import torch.nn.functional as F
from architectures.tiny_step import tiny_tokenizer
from datasets import Dataset

from helpers.one_step import ONE_STEP, Keep
from helpers.tiny import tiny_model
from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.documents.labels import IGNORE_INDEX

TOLERANCE = 1e-4  # relative, float32; without the weights, gradients are off by tens of percent
LEARNING_RATE = 0.05  # of plain SGD, in runs that tell their parameters and not their gradients

SMOOTHING = 0.1
LOSSES = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": SMOOTHING},
    "dft, which is not smoothed": {"loss_type": "dft", "label_smoothing_factor": SMOOTHING},
}
# Micro-batches of unequal weight: 8 documents of 3 to 60 tokens, bins of 80.
LAYOUTS = {
    "one micro-batch": {"per_device_train_batch_size": 4, "gradient_accumulation_steps": 1},
    "three of a bin": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    "three of 3, 3 and 2 documents": {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3,
        "packing": False,
    },
    "TRL's way of truncation": {"max_length": None, "packing": False},
}


def weighted(documents, seed=1, least=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        d
        | {
            "loss_weights": (
                torch.randint(least, 9, (len(d["input_ids"]),), generator=generator) / 4
            ).tolist()
        }
        for d in documents
    ]


def unweighted(documents):
    columns = ("loss_weights", "loss_weight")
    return [{k: v for k, v in d.items() if k not in columns} for d in documents]


def losses_of_tokens(logits, targets, loss):
    if "dft" in loss:
        nll = F.cross_entropy(logits, targets, reduction="none")
        return nll * (-nll).exp().detach()
    smoothing = SMOOTHING if loss == "smoothed" else 0.0
    return F.cross_entropy(logits, targets, reduction="none", label_smoothing=smoothing)


def by_hand(model, documents, loss="nll", weighting="token"):
    """Return the weighted loss of all documents and its gradients, each document alone."""
    model = copy.deepcopy(model).train()
    total, parts = 0.0, []
    for document in documents:
        ids, labels = (torch.tensor(document[key]) for key in ("input_ids", "labels"))
        weights = torch.tensor(document.get("loss_weights", [1.0] * len(ids)))[1:]
        trained = labels[1:] != IGNORE_INDEX
        n = float(weights[trained].sum())
        divisor = {"token": 1.0, "document": n, "sqrt": math.sqrt(n)}[weighting] or 1.0
        weights = weights * (document.get("loss_weight", 1.0) / divisor)
        logits = model(
            input_ids=ids[None], position_ids=torch.arange(len(ids))[None], use_cache=False
        ).logits[0]
        targets = losses_of_tokens(logits[-len(ids) : -1][trained], labels[1:][trained], loss)
        parts.append((weights[trained] * targets).sum())
        total += float(weights[trained].sum())
    value = torch.stack(parts).sum() / total
    value.backward()
    gradients = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return value.item(), gradients


def trainer_for(model, train, folder, *, evaluated=None, callbacks=(), arguments=None, **options):
    return PackedSFTTrainer(
        copy.deepcopy(model),
        PackedSFTConfig(
            **{
                **ONE_STEP,
                "output_dir": str(folder),
                "max_length": 80,
                "per_device_train_batch_size": 8,
                **options,
            }
        ),
        train_dataset=Dataset.from_list(train) if isinstance(train, list) else train,
        eval_dataset=evaluated,
        processing_class=tiny_tokenizer(),
        callbacks=list(callbacks),
        **(arguments or {}),
    )


def one_step(model, documents, folder, **options):
    """Return loss and gradients of the only optimizer step."""
    kept = Keep()
    trainer = trainer_for(model, documents, folder, callbacks=[kept], **options)
    trainer.train()
    return trainer.state.log_history[0]["loss"], kept.gradients


def assert_same_step(found, expected, tolerance=TOLERANCE):
    assert found[0] == pytest.approx(expected[0], rel=tolerance)
    assert found[1].keys() == expected[1].keys()
    largest = max(float(g.abs().max()) for g in expected[1].values())
    assert largest > 0
    for name, gradient in expected[1].items():
        close = {"rtol": 0, "atol": tolerance * largest, "msg": name}
        torch.testing.assert_close(found[1][name], gradient, **close)


def assert_is_one_step_of(result, expected) -> None:
    """`result` of `distributed.train.run` on a tiny llama: the loss, and where it went by SGD."""
    loss, gradients = expected
    assert "error" not in result, result["error"]
    assert result["losses"] == pytest.approx([loss], rel=TOLERANCE)
    for name, start in tiny_model("llama").named_parameters():
        moved = (start.detach() - result["parameters"][name]) / LEARNING_RATE
        torch.testing.assert_close(moved, gradients[name], rtol=0, atol=TOLERANCE, msg=name)
