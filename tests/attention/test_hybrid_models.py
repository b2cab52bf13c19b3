"""Hybrid models stay packed where their recurrent kernels take boundaries, and are checked.

Without `causal_conv1d`, transformers refuses packed rows, and documents are padded. The double has
the argument of that package (`seq_idx`), and runs transformers' own function on one document after
another.
"""

import inspect
import re

import pytest
import torch
from harness import alone, assert_exact, run
from helpers.tiny import documents_of_lengths, tiny_model
from transformers.models.lfm2 import modeling_lfm2

DOCUMENTS = documents_of_lengths((9, 20, 5, 30))


def install_kernel(monkeypatch, leaks):
    """Put the double in place of what transformers found; return its calls."""
    calls = []
    conv = inspect.unwrap(modeling_lfm2.causal_conv1d_fn)

    def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None, **_):
        calls.append(seq_idx)
        lengths = [x.shape[-1]]
        if seq_idx is not None and not leaks:
            lengths = torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()
        return torch.cat([conv(part, weight, bias) for part in x.split(lengths, -1)], -1)

    monkeypatch.setattr(modeling_lfm2, "causal_conv1d_fn", causal_conv1d_fn)
    return calls


@pytest.mark.parametrize("kernels", ["with", "without", "leaking"])
def test_a_hybrid_model_stays_packed_if_its_kernels_take_boundaries(kernels, monkeypatch, tmp_path):
    expected = alone(tiny_model("lfm2"), DOCUMENTS)
    calls = []
    if kernels != "without":
        calls = install_kernel(monkeypatch, leaks=kernels == "leaking")
    found = run(tiny_model("lfm2"), DOCUMENTS, tmp_path)
    attention = found.trainer.attention
    assert attention.backend == ("documents" if kernels == "with" else "padded")
    if kernels == "with":
        assert all(call is not None for call in calls[-2:]), "the step's rows are packed"
    # Without kernels, transformers 5.17 leaks where 5.23 raises.
    reasons = {"without": r"refused \(ValueError: |leaks by", "leaking": "leaks by"}
    assert re.search(reasons.get(kernels, "cpu, float32"), attention.reason)
    assert_exact(found, expected)
