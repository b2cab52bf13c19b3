"""Gradients of the head where positions of several documents weigh more than others."""

import pytest
import torch
from harness import TWO_RUNS

from trl_packing.loss import lm_head

POSITIONS, HIDDEN, VOCABULARY = 12, 5, 9


def gradients(weights, score):
    generator = torch.Generator().manual_seed(0)
    shapes = (POSITIONS, HIDDEN), (VOCABULARY, HIDDEN), (VOCABULARY,)
    tensors = [torch.randn(shape, generator=generator).requires_grad_() for shape in shapes]
    targets = torch.randint(VOCABULARY, (POSITIONS,), generator=generator)
    (score(*tensors, targets) * weights).sum().backward()
    return [tensor.grad for tensor in tensors]


def by_autograd(hidden, weight, bias, targets):
    logits = hidden @ weight.t() + bias
    return logits.log_softmax(-1).gather(-1, targets[:, None])[:, 0]


@pytest.fixture
def scored(monkeypatch):
    """Return the number of positions of each call that computes logits."""
    sizes, logits = [], lm_head._logits

    def counted(hidden, *rest):
        sizes.append(len(hidden))
        return logits(hidden, *rest)

    monkeypatch.setattr(lm_head, "_logits", counted)
    return sizes


@pytest.mark.parametrize(
    ("heavier", "sizes"),
    [
        ({}, [12]),
        ({0: 16.0, 7: 0.5}, [12, 2]),
        ({i: 2.0 + i for i in range(11)}, [12, 12]),
    ],
)
def test_few_heavier_positions_are_scored_again_alone(heavier, sizes, scored):
    weights = torch.ones(POSITIONS)
    weights[list(heavier)] = torch.tensor(list(heavier.values()))

    def ours(*tensors):
        return lm_head.TrainedLogProbs.apply(*tensors, 1.0, None)[0]

    found = gradients(weights, ours)
    assert scored == sizes
    for ours_, plain in zip(found, gradients(weights, by_autograd), strict=True):
        torch.testing.assert_close(ours_, plain, rtol=TWO_RUNS, atol=TWO_RUNS)
