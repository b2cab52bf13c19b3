"""A field of a configuration is read over all layers, which may differ in it."""

import pytest
import torch

from trl_packing.attention.block_mask import packed_mask
from trl_packing.attention.model_facts import (
    layer_config,
    layer_values,
)

transformers = pytest.importorskip("transformers")


@pytest.fixture
def gemma4():
    if not hasattr(transformers, "Gemma4TextConfig"):
        pytest.skip("this transformers has no Gemma 4")
    layers = {1: {"sliding_window": 16}, 5: {"head_dim": 512}}
    return transformers.Gemma4TextConfig(
        num_hidden_layers=6, sliding_window=64, per_layer_config=layers
    )


def test_every_layer_says_its_own(gemma4):
    with pytest.raises(RuntimeError, match="per-layer attribute"):  # which getattr does not catch
        getattr(gemma4, "head_dim", None)
    assert layer_values(gemma4, "head_dim") == [256] * 5 + [512]
    assert layer_values(gemma4, "sliding_window") == [64, 16, 64, 64, 64, 64]
    assert layer_values(gemma4, "qk_head_dim", "head_dim") == [256] * 5 + [512]
    assert layer_values(gemma4, "no_such_field") == []
    assert layer_config(gemma4, 5).head_dim == 512


def test_one_mask_for_a_kind_of_layer_is_refused_where_its_windows_differ(gemma4):
    with pytest.raises(NotImplementedError, match=r"several sizes of sliding_window: \[16, 64\]"):
        packed_mask([3, 2], gemma4, torch.float32)
    alike = transformers.Gemma4TextConfig(num_hidden_layers=6, sliding_window=2)
    assert packed_mask([3, 2], alike, torch.float32).keys() == set(alike.layer_types)
