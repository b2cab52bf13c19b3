"""Attributes that are set for the length of a block."""

import torch

from trl_packing.attention.state import restore_state


def test_buffers_are_restored_but_quantized_weights_are_not_copied(monkeypatch):
    module = torch.nn.Module()
    module.register_buffer("rope", torch.ones(2**20))
    module.register_buffer("count", torch.zeros((), dtype=torch.int64))
    module.register_buffer("qweight", torch.zeros(2**20, dtype=torch.int32))
    copied, clone = [], torch.Tensor.clone
    monkeypatch.setattr(torch.Tensor, "clone", lambda x: copied.append(x.dtype) or clone(x))
    with restore_state(module):
        module.rope.mul_(2)
        module.count += 1
    assert bool((module.rope == 1).all())
    assert int(module.count) == 0
    assert copied == [torch.float32, torch.int64]
