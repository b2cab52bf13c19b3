"""A forward and a backward through PyTorch's FlashAttention on meta tensors, which have no values.

The operator checks its arguments by its real schema, and its real shape function runs. Any read of
a value raises, as it would make the host wait for a GPU.
"""

import pytest
import torch
from helpers.packed_models import install
from helpers.tiny import documents_of_lengths, tiny_model

from trl_packing import PackedCollator

# MLA, experts, windows, sinks, learned positions, norms in several places.
NAMES = ["llama", "mistral", "qwen3", "qwen3_moe", "gemma3_text", "gpt_oss", "deepseek_v3"]
NAMES += ["olmo3", "glm4_moe", "cohere2", "opt"]


@pytest.fixture
def model_on_meta(monkeypatch):
    """Return a function that returns a tiny model in bf16 with varlen installed, on meta."""

    def make(name, checkpointing=None):
        model = tiny_model(name, dtype=torch.bfloat16).to("meta").train()
        if checkpointing is not None:
            model.gradient_checkpointing_enable({"use_reentrant": checkpointing})
        if checkpointing:
            model.enable_input_require_grads()
        return install(model, "varlen", gpu=monkeypatch)

    # Autocast is not known on meta.
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    return make


def meta_batch(shares_prefixes=False):
    rows = documents_of_lengths([20, 3, 9, 1])
    if shares_prefixes:
        rows = [{"input_ids": rows[0]["input_ids"][:12] + row["input_ids"]} for row in rows]
    batch = PackedCollator(shares_prefixes=shares_prefixes)(rows).to("meta")
    names = ("labels", "target_counts")
    return {name: value for name, value in batch.items() if name not in names}


@pytest.mark.parametrize("name", NAMES)
def test_a_step_reads_no_value_of_the_device(name, model_on_meta, monkeypatch):
    if name == "opt":
        # Before it, OPT makes a mask of ones and asks the device whether all are ones.
        pytest.importorskip("transformers", "5.23")
    calls = 0
    forward = torch.ops.aten._flash_attention_forward

    def counted(*args, **kwargs):
        nonlocal calls
        calls += 1
        return forward(*args, **kwargs)

    monkeypatch.setattr(torch.ops.aten, "_flash_attention_forward", counted)
    for checkpointing, shares_prefixes in ((None, False), (False, True), (True, False)):
        calls = 0
        model = model_on_meta(name, checkpointing)
        model(**meta_batch(shares_prefixes)).logits.float().sum().backward()
        passes = 1 if checkpointing is None else 2  # the backward computes layers again
        assert calls == passes * model.config.num_hidden_layers
    assert all(weight.grad is not None for weight in model.parameters())


def test_a_read_of_a_value_is_found(model_on_meta):
    batch = meta_batch()
    del batch["max_length_q"]
    model = model_on_meta("llama")
    with pytest.raises(RuntimeError, match="meta tensor"):
        model(
            **{
                name: value.clone() if torch.is_tensor(value) else value
                for name, value in batch.items()
            }
        )
