"""Attributes that are set for the length of a block."""

from types import SimpleNamespace

import pytest
import torch

from trl_packing.attention.state import restore_state, temporarily


def test_attributes_have_their_old_values_after_the_block_also_when_it_raises():
    thing = SimpleNamespace(a=1, b=2)
    seen = []

    def block():
        with temporarily(thing, a=3, b=None):
            seen.append((thing.a, thing.b))
            raise KeyError

    with pytest.raises(KeyError):
        block()
    assert seen == [(3, None)]
    assert (thing.a, thing.b) == (1, 2)


def test_an_attribute_that_is_not_there_is_refused_before_anything_is_set():
    thing = SimpleNamespace(a=1)
    with pytest.raises(AttributeError, match="typo"), temporarily(thing, a=2, typo=3):
        pass
    assert thing.a == 1


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
