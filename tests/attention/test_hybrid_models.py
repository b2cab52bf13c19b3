"""Hybrid models stay packed where their recurrent kernels take boundaries, and are checked.

Without `causal_conv1d` and `fla`, transformers refuses packed rows, and documents are padded. The
doubles have the arguments of those packages (`seq_idx`, `cu_seqlens`), and run transformers' own
functions on one document after another.
"""

import importlib
import inspect
import re

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from harness import alone, assert_exact, run

MODULES = {
    "qwen3_5_text": "transformers.models.qwen3_5.modeling_qwen3_5",
    "lfm2": "transformers.models.lfm2.modeling_lfm2",
}


def install_kernels(module, monkeypatch, leaks=False):
    """Put doubles of both packages in place of what transformers found; return their calls."""
    calls = []
    conv = inspect.unwrap(module.causal_conv1d_fn)

    def lengths_of(seq_idx, size):
        calls.append(seq_idx)
        if seq_idx is None or leaks:
            return [size]
        return torch.unique_consecutive(seq_idx[0], return_counts=True)[1].tolist()

    def causal_conv1d_fn(x, weight, bias=None, activation=None, seq_idx=None, **_):
        options = {} if activation is None else {"activation": activation}
        parts = x.split(lengths_of(seq_idx, x.shape[-1]), -1)
        return torch.cat([conv(part, weight, bias, **options) for part in parts], -1)

    monkeypatch.setattr(module, "causal_conv1d_fn", causal_conv1d_fn)
    if not hasattr(module, "torch_chunk_gated_delta_rule"):
        return calls
    rule = inspect.unwrap(module.torch_chunk_gated_delta_rule)

    def chunk_gated_delta_rule(q, k, v, *, g, beta, cu_seqlens=None, **options):
        options = {x: options[x] for x in ("use_qk_l2norm_in_kernel",) if x in options}
        calls.append(cu_seqlens)
        is_apart = cu_seqlens is not None and not leaks
        lengths = cu_seqlens.diff().tolist() if is_apart else [q.shape[1]]
        parts = zip(*(x.split(lengths, 1) for x in (q, k, v, g, beta)), strict=True)
        made = [rule(*part[:3], g=part[3], beta=part[4], **options)[0] for part in parts]
        return torch.cat(made, 1), None

    monkeypatch.setattr(module, "torch_chunk_gated_delta_rule", chunk_gated_delta_rule)
    return calls


@pytest.mark.parametrize("kernels", ["with", "without", "leaking"])
@pytest.mark.parametrize("name", ["lfm2", pytest.param("qwen3_5_text", marks=pytest.mark.slow)])
def test_a_hybrid_model_stays_packed_if_its_kernels_take_boundaries(
    name, kernels, monkeypatch, tmp_path
):
    rng = np.random.default_rng(0)
    most = tiny_model(name).config.vocab_size
    rows = [rng.integers(3, most, n).tolist() for n in (9, 20, 5, 30)]
    documents = [{"input_ids": ids, "labels": ids} for ids in rows]
    expected, calls = alone(tiny_model(name), documents), []
    if kernels != "without":
        module = importlib.import_module(MODULES[name])
        calls = install_kernels(module, monkeypatch, leaks=kernels == "leaking")
    found = run(tiny_model(name), documents, tmp_path)
    attention = found.trainer.attention
    assert attention.backend == ("documents" if kernels == "with" else "padded")
    if kernels == "with":
        assert all(call is not None for call in calls[-2:]), "the step's rows are packed"
    # Without kernels, transformers 5.17 leaks where 5.23 raises.
    reasons = {"without": r"refused \(ValueError: |leaks by", "leaking": "leaks by"}
    assert re.search(reasons.get(kernels, "cpu, float32"), attention.reason)
    assert_exact(found, expected)
