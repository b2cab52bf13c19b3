"""A document alone, the reference of the check, must fit where the run itself fits."""

import sys
from types import SimpleNamespace

import pytest
import torch
from helpers.tiny import tiny_config

from trl_packing.isolation.probes import longest_alone, probes

GIB = 2**30
HEADS = {"num_attention_heads": 32, "num_key_value_heads": 8, "head_dim": 128}
WINDOW = {"sliding_window": 4096}
T4, A100 = (7, 5), (8, 0)


MEMORY = [
    ("llama", {}, torch.float16, A100, "sdpa", sys.maxsize),
    ("llama", {}, torch.float16, T4, "sdpa", 4_096),  # 8 bytes × 32 heads for each pair
    ("llama", {}, torch.float32, A100, "sdpa", 4_096),
    ("llama", {"head_dim": 512}, torch.bfloat16, A100, "sdpa", 4_096),
    ("llama", {"num_key_value_heads": 32}, torch.float16, T4, "sdpa", sys.maxsize),
    ("mistral", WINDOW, torch.bfloat16, A100, "sdpa", 37_837),  # a mask of 3 bytes
    ("llama", {}, torch.bfloat16, A100, "eager", 4_729),  # 6 bytes × 32 heads
    ("llama", {}, torch.bfloat16, A100, "flash_attention_2", sys.maxsize),
    ("mistral", WINDOW, torch.float32, None, "sdpa", 29_308),  # a CPU: 5 bytes
]


@pytest.mark.parametrize(("name", "changes", "dtype", "capability", "native", "tokens"), MEMORY)
def test_a_document_alone_is_as_long_as_native_attention_has_memory_for(
    name, changes, dtype, capability, native, tokens, monkeypatch
):
    monkeypatch.setattr(torch.cuda, "mem_get_info", lambda *_: (14 * GIB, 15 * GIB))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: capability)
    config = tiny_config(name, **HEADS | changes)
    config._attn_implementation = native
    weight = SimpleNamespace(dtype=dtype, is_cuda=capability is not None, device="cuda")
    weight.element_size = lambda: dtype.itemsize
    model = torch.nn.Embedding(9, 1)
    model.config = config
    monkeypatch.setattr(model, "parameters", lambda: iter([weight]))
    assert longest_alone(model) == tokens
    if tokens < 8_192:  # the longest of the run stays in the packed rows, where memory is no issue
        longest = [0] * 8_192
        made = probes(model, [longest], 8_192)
        assert max(len(probe.document["input_ids"]) for probe in made) <= tokens
        assert max(len(x["input_ids"]) for x in made[1].packed[0].documents) == len(longest)
