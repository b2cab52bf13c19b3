"""The explicit mask of a packed row: documents apart, windows and chunks within each of them."""

from types import SimpleNamespace

import pytest
import torch
import transformers

from trl_packing.attention.block_mask import packed_mask
from trl_packing.attention.model_facts import layer_values

LENGTHS = [7, 1, 5, 12]
WINDOW = 3
TOKENS = [(d, at) for d, length in enumerate(LENGTHS) for at in range(length)]


def expected(rule=lambda at, seen: True):
    """Who sees whom, said token by token: (document, position in it) against the same."""
    return [
        [document == other and seen <= at and rule(at, seen) for other, seen in TOKENS]
        for document, at in TOKENS
    ]


FULL = expected()
SLIDING = expected(lambda at, seen: at - seen < WINDOW)
OF_KIND = {"full_attention": FULL, "sliding_attention": SLIDING}


def seen_by(**config):
    """Read additive masks: 0 where attention is allowed, the lowest number elsewhere."""
    masks = packed_mask(torch.tensor(LENGTHS), SimpleNamespace(**config), torch.float32)
    found = {}
    for kind, additive in masks.items() if isinstance(masks, dict) else [("all", masks)]:
        assert additive.shape == (1, 1, len(TOKENS), len(TOKENS))
        allowed = additive == 0
        assert (additive[~allowed] == torch.finfo(additive.dtype).min).all()
        found[kind] = allowed[0, 0].tolist()
    return found


ONE_KIND = [
    ({}, FULL),
    ({"sliding_window": WINDOW}, SLIDING),  # mistral: all layers, without saying so
    ({"layer_types": ["full_attention"] * 2, "sliding_window": WINDOW}, FULL),
    ({"layer_types": ["sliding_attention"], "sliding_window": None}, FULL),
    # Kinds of layers that no mask reaches: what reaches the others is one mask.
    ({"layer_types": ["linear_attention", "full_attention"]}, FULL),
]


@pytest.mark.parametrize(("config", "wanted"), ONE_KIND, ids=str)
def test_one_kind_of_layer_gets_one_mask(config, wanted):
    assert seen_by(**config) == {"all": wanted}


def test_several_kinds_of_layers_get_a_mask_each():
    kinds = [*OF_KIND, "full_attention"]
    assert seen_by(layer_types=kinds, sliding_window=WINDOW) == OF_KIND
    with pytest.raises(NotImplementedError, match="chunks"):
        seen_by(layer_types=["full_attention", "chunked_attention"], attention_chunk_size=4)


@pytest.mark.parametrize("windows_only", [False, True])
def test_tokens_of_an_image_see_each_other(windows_only):
    """Gemma 3 opens images in all layers, a large Gemma 4 only in those with a window."""
    kinds = ["sliding_attention", "full_attention"]
    config = SimpleNamespace(sliding_window=2, layer_types=kinds, num_hidden_layers=2)
    images = torch.tensor([-1, 0, 0, 1, 1, -1])  # the second document begins with an image
    made = packed_mask([3, 3], config, torch.float32, images=images, windows_only=windows_only)
    closed = packed_mask([3, 3], config, torch.float32)
    opened = {name: torch.nonzero((made[name] != closed[name])[0, 0]).tolist() for name in made}
    ahead = [[1, 2], [3, 4]]  # queries that see the next token, which is of the same image
    assert opened["sliding_attention"] == ahead
    assert opened["full_attention"] == ([] if windows_only else ahead)


@pytest.mark.skipif(not hasattr(transformers, "Gemma4TextConfig"), reason="no Gemma 4")
def test_a_field_is_read_over_all_layers_and_one_mask_is_refused_where_windows_differ():
    layers = {1: {"sliding_window": 16}, 5: {"head_dim": 512}}
    make = transformers.Gemma4TextConfig
    config = make(num_hidden_layers=6, sliding_window=64, per_layer_config=layers)
    assert layer_values(config, "qk_head_dim", "head_dim") == [256] * 5 + [512]
    assert layer_values(config, "sliding_window") == [64, 16, 64, 64, 64, 64]
    with pytest.raises(NotImplementedError, match=r"several sizes of sliding_window: \[16, 64\]"):
        packed_mask([3, 2], config, torch.float32)
    alike = make(num_hidden_layers=6, sliding_window=2)
    assert packed_mask([3, 2], alike, torch.float32).keys() == set(alike.layer_types)
