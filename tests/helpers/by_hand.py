"""Documents with weights, and one optimizer step on them, for comparison with `harness.alone`.

by_hand(model, documents, loss, weighting)     `harness.alone`
one_step(model, documents, folder, **options)  `harness.run`: loss and gradients of one step
assert_same_step(found, expected)              `harness.assert_exact`, or two runs to 1e-4
assert_reports(metrics, expected)              metrics of a log, or of an evaluation
"""

import copy

import pytest
import torch
from harness import SMOOTHING, Alone, assert_exact, make_trainer, relative_error
from harness import alone as by_hand
from harness import run as one_step

from helpers.one_step import ONE_STEP
from helpers.tiny import documents_of_lengths, tiny_model

__all__ = ["SMOOTHING", "by_hand", "one_step"]

TOLERANCE = 1e-4  # relative, float32; without the weights, gradients are off by tens of percent
LEARNING_RATE = 0.05  # of plain SGD, in runs that tell their parameters and not their gradients

LOSSES = {
    "nll": {},
    "dft": {"loss_type": "dft"},
    "smoothed": {"label_smoothing_factor": SMOOTHING},
    "dft, which is not smoothed": {"loss_type": "dft", "label_smoothing_factor": SMOOTHING},
}
# Micro-batches of unequal weight: 8 documents of 3 to 60 tokens, bins of 80.
LAYOUTS = {
    "three of a bin": {"per_device_train_batch_size": 1, "gradient_accumulation_steps": 3},
    "three of 3, 3 and 2 documents": {
        "per_device_train_batch_size": 3,
        "gradient_accumulation_steps": 3,
        "packing": False,
    },
}


def weighted(documents, seed=1, least=0):
    generator = torch.Generator().manual_seed(seed)
    made = []
    for d in documents:
        drawn = torch.randint(least, 9, (len(d["input_ids"]),), generator=generator)
        made.append(d | {"loss_weights": (drawn / 4).tolist()})
    return made


def unweighted(documents):
    columns = ("loss_weights", "loss_weight")
    return [{k: v for k, v in d.items() if k not in columns} for d in documents]


#: Eight documents of three sources, one of them without any weight.
OF_SOURCES = documents_of_lengths((20, 5, 11, 38, 12, 33, 3, 29), prompt=2)
SOURCES = ["web", "code", "web", "books", "code", "web", "web", "code"]
DOCUMENT_WEIGHTS = [1.0, 0.5, 3.0, 0.25, 2.0, 0.0, 1.5, 1.0]


def assert_reports(metrics, expected, tolerance=TOLERANCE):
    for name, value in expected.items():
        assert metrics[name] == pytest.approx(value, rel=tolerance), name


def trainer_for(model, train, folder, **options):
    options = {**ONE_STEP, "max_length": 80, "per_device_train_batch_size": 8, **options}
    return make_trainer(folder, train, copy.deepcopy(model), **options)


def assert_same_step(found, expected, tolerance=TOLERANCE):
    if isinstance(expected, Alone):
        assert_exact(found, expected)
    else:
        assert found[0] == pytest.approx(expected[0], rel=tolerance)
        assert relative_error(found[1], expected[1]) < tolerance


def assert_is_one_step_of(result, expected) -> None:
    """`result` of `distributed.train.run` on a tiny llama: the loss, and where it went by SGD."""
    loss, gradients = expected
    assert result["losses"] == pytest.approx([loss], rel=TOLERANCE)
    for name, start in tiny_model("llama").named_parameters():
        moved = (start.detach() - result["parameters"][name]) / LEARNING_RATE
        torch.testing.assert_close(moved, gradients[name], rtol=0, atol=TOLERANCE, msg=name)
