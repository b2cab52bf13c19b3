"""Attributes that are set for the length of a block."""

from types import SimpleNamespace

import pytest

from trl_packing.models.state import temporarily


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
