"""PyTorch's varlen attention gets the right arguments; doubles stand in for its kernels."""

import pytest
import torch
from helpers import varlen_double
from helpers.dense import assert_equals_dense, boundaries, inputs

from trl_packing.attention.interface import KernelOptions
from trl_packing.attention.varlen import varlen_attention

OPTIONS = [{}, {"window": 1}, {"window": 64}, {"window": 4, "sinks": torch.arange(4.0) - 1}]


@pytest.mark.parametrize("kv_heads", [1, 4])
@pytest.mark.parametrize("options", OPTIONS, ids=str)
def test_varlen_attention_equals_dense_attention(options, kv_heads, monkeypatch):
    calls = varlen_double.install(monkeypatch)
    assert_equals_dense(varlen_attention, inputs(kv_heads=kv_heads), **options)
    left = options.get("window", 0) - 1
    b = boundaries().tolist()
    assert calls == [(b, b, 30, 30, left, left < 0)]


def test_varlen_attention_refuses_what_the_kernel_lacks():
    with pytest.raises(NotImplementedError, match=r"softcap=2\.0.*'documents'"):
        varlen_attention(*inputs(), boundaries(), KernelOptions(0.4, softcap=2.0))
