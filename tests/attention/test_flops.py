"""The counted operations equal those that PyTorch's counter sees, where it can see them.

The counter sees eager attention as products of whole T × T matrices, so of a document of T tokens
T · T pairs where T · (T + 1) / 2 are seen.
"""

import numpy as np
import pytest
import torch
from architectures.tiny_models import tiny_model
from peft import LoraConfig, PromptTuningConfig, get_peft_model
from torch.utils.flop_counter import FlopCounterMode

from trl_packing.attention.flops import NotCountable, model_flops
from trl_packing.packing.prefix_tree import share_prefixes

T = 24


def eager_model(name):
    model = tiny_model(name)
    if name != "bloom":
        model.set_attn_implementation("eager")
    if name in EXPERTS:  # one expert a product: the counter does not see grouped ones
        model.set_experts_implementation("eager")
    return model


def seen(model):
    """Return the operations of matrices and of attention, forward and backward, on `T` tokens."""
    ids = torch.arange(T)[None] + 6
    with FlopCounterMode(display=False) as counter:
        model(input_ids=ids, labels=ids, use_cache=False).loss.backward()
    counts = counter.get_flop_counts()["Global"]
    attention = sum(n for op, n in counts.items() if str(op) in ("aten.bmm", "aten.baddbmm"))
    return sum(counts.values()) - attention, attention


# Heads: of two sizes and without keys of their own (gemma4), in two numbers (laguna).
DENSE = ["llama", "gpt2", "gemma2", "phi3", "bloom", "gemma4_text"]
EXPERTS = ["mixtral", "qwen3_moe", "deepseek_v3", "laguna"]


@pytest.mark.parametrize("name", [*DENSE, *EXPERTS])
def test_what_a_token_meets(name):
    model = eager_model(name)
    counted = model_flops(model)
    matrices, attention = seen(model)
    # The counter's model scores every token, the last one too.
    assert counted.per_token * T + counted.per_target * T == matrices
    assert sum(counted.per_pair.values()) * T * T == attention
    pairs = sum(
        flops * sum(min(i + 1, window or T) for i in range(T))
        for window, flops in counted.per_pair.items()
    )
    assert counted.of(np.array([T]), T) == matrices + pairs


@pytest.mark.parametrize("name", ["llama", "gemma2"])
def test_a_shared_prefix_is_counted_once(name):
    rng = np.random.default_rng(0)
    prefix, sizes = rng.integers(6, 40, 30), [(30, 9), (30, 4), (25, 3), (18, 20), (30, 0), (0, 12)]
    documents = [np.concatenate([prefix[:n], rng.integers(6, 40, m)]) for n, m in sizes]
    flat = dict.fromkeys(("input_ids", "labels"), np.concatenate(documents))
    batch, host = share_prefixes(flat, [len(d) for d in documents], 8, 0)
    counted = model_flops(tiny_model(name))
    targets = int(host.is_trained.sum())
    # By hand: each token of the row has a depth, and sees the tokens up to it.
    depths = batch["position_ids"][0, : host.num_tokens - host.padding].numpy()
    expected = counted.per_token * len(depths) + counted.per_target * targets
    for window, flops in counted.per_pair.items():
        expected += flops * np.minimum(depths + 1, window or 10**9).sum()
    assert counted.of(host.segments, targets, host.keys) == pytest.approx(expected)
    lengths = host.lengths
    assert lengths.tolist() == [len(d) for d in documents]
    assert expected < 0.8 * counted.of(lengths, lengths.sum() - len(lengths))


def test_lora_needs_no_gradient_of_frozen_weights():
    whole = model_flops(tiny_model("llama"))
    adapted = get_peft_model(
        eager_model("llama"), LoraConfig(r=2, target_modules=["q_proj", "v_proj"])
    )
    counted = model_flops(adapted)
    matrices, _ = seen(adapted)
    ours = (counted.per_token + counted.per_target) * T
    # The input of the first layer has no gradient, which only its first adapter is known to need:
    # k and v and the adapter of v of that layer are counted more.
    assert 0 <= ours / matrices - 1 < 0.05
    assert 0.6 < ours / ((whole.per_token + whole.per_target) * T) < 0.75


def adapted(config, *more):
    model = get_peft_model(tiny_model("llama"), config)
    for name in more:
        model.add_adapter(name, LoraConfig(r=4))
    return model


def test_other_models_and_adapters_are_not_counted():
    for name in ("mamba", "qwen3_next", "lfm2", "jamba", "gemma3"):
        with pytest.raises(NotCountable):
            model_flops(tiny_model(name))
    with pytest.raises(NotCountable, match="PROMPT_TUNING"):
        model_flops(adapted(PromptTuningConfig(task_type="CAUSAL_LM", num_virtual_tokens=2)))
    with pytest.raises(NotCountable, match="LORA"):
        model_flops(adapted(LoraConfig(r=2), "other"))
