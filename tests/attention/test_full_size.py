"""Every architecture as transformers publishes its defaults: full size, on the meta device.

A trainer asks a model for its head sizes, windows and thresholds before it trains.
Layers may differ in each of them, and reading one number of such a model is an error.
"""

import pytest
import torch
from architectures.tiny_models import NotBuilt, full_size_model, names
from architectures.tiny_tables import VARIANTS
from helpers.flash_attn_double import pretend_cuda

from trl_packing.attention import model_facts
from trl_packing.attention.backends import resolve_attention
from trl_packing.packing.collator import StaticShapes

# Of each, the attention to try first on a GPU in bf16 and the lengths at which it changes, by its
# model card.
BY_HAND = {
    "deepseek_v32": ("model", []),  # an index
    "dots3_note_text": ("model", [512]),  # 128 heads, 64 with a window
    "gemma2": ("varlen", [4096]),  # soft-cap: its trial fails
    "gemma4_text": ("varlen", [512]),  # heads of 256; of 512 without a window, by document
    "gpt_oss": ("varlen", [128, 4096]),
    "inkling2_text": ("varlen", [1024, 128_000]),
    "llama4_text": ("model", [8192]),
    "mimo_v2_flash": ("varlen", [129]),  # keys of 192, values of 128; sinks
}


SLOW = sorted(set(names()) - VARIANTS.keys() - BY_HAND.keys())
ALL = [*BY_HAND, *(pytest.param(name, marks=pytest.mark.slow) for name in SLOW)]


@pytest.mark.parametrize("name", ALL)
def test_a_full_size_model_answers(name, monkeypatch):
    try:
        model = full_size_model(name)
    except NotBuilt as reason:
        pytest.skip(str(reason)[:150])
    on_cpu = resolve_attention(model, device="cpu", dtype=torch.float32)
    pretend_cuda(monkeypatch)
    half = resolve_attention(model, device="cuda", dtype=torch.bfloat16)
    assert half.backend in (on_cpu.backend, "varlen")
    lengths = model_facts.length_constants(model)
    windows = model_facts.layer_values(model_facts.text_config(model), "sliding_window")
    assert {*filter(None, windows), *model_facts.rope_thresholds(model)} <= set(lengths)
    assert 0 < StaticShapes.for_model(model, 2048, longest=1024).longest_tail <= 1024
    if name in BY_HAND:
        assert (half.backend, lengths) == BY_HAND[name]
