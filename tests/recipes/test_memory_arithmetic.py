"""The memory tables in the YAML files of `recipes/` add up, and count what a model needs."""

import re
from typing import Any

import pytest
import torch
from helpers.recipes import (
    FOLDER,
    YAMLS,
)
from helpers.recipes import module as recipe_module
from transformers import (
    AutoModelForCausalLM,
    AutoModelForImageTextToText,
    LlamaConfig,
    Qwen3Config,
    Qwen3VLConfig,
)

TABLES = [name for name in YAMLS if "# Memory" in (FOLDER / name).read_text()]


def value(expression: str) -> float:
    """Return the bytes that "2 B × 8,192 tokens × 4,096 / 8" comes to."""
    plain = expression.replace("tokens", "").replace(" B", "").replace("×", "*").replace(",", "")
    assert re.fullmatch(r"[\d.e*/ ]+", plain), expression
    return eval(plain)


def table_of(text: str) -> tuple[list[tuple[str, float]], float]:
    """Return the rows of a memory table, expression and GB, and its total in GB."""
    rows = [
        (found[1], float(found[2]))
        for found in re.finditer(r"(?m)^#   .*?\s{2,}([\d.]+ .*?)\s{2,}([\d.]+) GB$", text)
    ]
    total = re.search(r"(?m)^# +about ([\d.]+) GB$", text)
    assert total is not None
    return rows, float(total[1])


def assert_adds_up(text: str) -> None:
    rows, total = table_of(text)
    assert len(rows) >= 4
    for expression, gigabytes in rows:
        assert value(expression) / 1e9 == pytest.approx(gigabytes, abs=0.051), expression
    assert sum(gigabytes for _, gigabytes in rows) == pytest.approx(total, abs=0.51)


@pytest.mark.parametrize("name", TABLES)
def test_the_memory_arithmetic_adds_up(name):
    assert_adds_up((FOLDER / name).read_text())


def test_all_big_models_have_their_arithmetic_and_a_wrong_one_is_seen():
    assert len(TABLES) >= 7
    text = (FOLDER / "lora_8b.yaml").read_text()
    with pytest.raises(AssertionError):
        assert_adds_up(text.replace("16.4 GB", "61.4 GB"))
    with pytest.raises(AssertionError):
        assert_adds_up(text.replace("about 20 GB", "about 12 GB"))


LLAMA_70B = LlamaConfig(
    vocab_size=128256,
    hidden_size=8192,
    intermediate_size=28672,
    num_hidden_layers=80,
    num_attention_heads=64,
    num_key_value_heads=8,
)

QWEN3_8B = Qwen3Config(
    vocab_size=151936,
    hidden_size=4096,
    intermediate_size=12288,
    num_hidden_layers=36,
    num_attention_heads=32,
    num_key_value_heads=8,
)


@pytest.mark.parametrize(
    ("config", "all_weights", "ends", "layer", "matrices", "rank_16"),
    [
        (LLAMA_70B, 70.55e9, 2.10e9, 0.856e9, 68.45e9, 207e6),
        (QWEN3_8B, 8.19e9, 1.24e9, 0.193e9, 6.95e9, 43.6e6),
    ],
    ids=["70B", "8B"],
)
def test_the_arithmetic_counts_the_parameters(config, all_weights, ends, layer, matrices, rank_16):
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    counted = {
        all_weights: model.num_parameters(),
        ends: model.lm_head.weight.numel() + model.get_input_embeddings().weight.numel(),
        layer: sum(p.numel() for p in model.model.layers[0].parameters()),
        matrices: sum(m.weight.numel() for m in linear),
        rank_16: 16 * sum(m.in_features + m.out_features for m in linear),
    }
    for written, number in counted.items():
        assert written == pytest.approx(number, rel=0.005)


# The shapes of Qwen/Qwen3-VL-8B-Instruct.
QWEN3_VL_8B = Qwen3VLConfig(
    text_config={
        name: getattr(QWEN3_8B, name)
        for name in (
            *("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers"),
            *("num_attention_heads", "num_key_value_heads"),
        )
    },
    vision_config={"out_hidden_size": 4096},
)


def test_the_arithmetic_counts_the_vision_language_model():
    with torch.device("meta"):
        model = AutoModelForImageTextToText.from_config(QWEN3_VL_8B)
    tower = model.model.visual
    assert model.num_parameters() == pytest.approx(8.77e9, rel=0.005)
    assert tower.num_parameters() == pytest.approx(0.58e9, rel=0.01)
    matrices = [
        module
        for name, module in model.named_modules()
        if re.fullmatch(recipe_module("vision").LANGUAGE_MODEL, name)
    ]
    rank_16 = 16 * sum(m.in_features + m.out_features for m in matrices)
    assert rank_16 == pytest.approx(43.6e6, rel=0.005)
    vision = QWEN3_VL_8B.vision_config
    assert (len(tower.blocks), vision.hidden_size, vision.patch_size) == (27, 1152, 16)
    pixels = 3 * vision.temporal_patch_size * vision.patch_size**2
    patches = 4096 * vision.spatial_merge_size**2
    text = (FOLDER / "vision_8b.yaml").read_text()
    assert f"4 B × {patches:,} × {pixels:,}" in text
    assert f"2 B × {patches:,} × {vision.hidden_size:,} × {vision.depth}" in text


def kept_in_a_layer(config: Any, tokens: int, *, lora: bool = False) -> float:
    """Return how many bf16 numbers one decoder layer keeps for its backward pass."""
    model = AutoModelForCausalLM.from_config(config).to(torch.bfloat16)
    if lora:
        from peft import LoraConfig, get_peft_model

        adapted = get_peft_model(model, LoraConfig(r=16, target_modules="all-linear"))
        model = adapted.base_model.model
    hidden = torch.randn(1, tokens, config.hidden_size, dtype=torch.bfloat16, requires_grad=True)
    positions = model.model.rotary_emb(hidden, torch.arange(tokens)[None])
    known = {t.untyped_storage().data_ptr() for t in (*model.parameters(), hidden, *positions)}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.untyped_storage().data_ptr() not in known:
            kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    hooks = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
    with hooks, torch.autocast("cpu", torch.bfloat16):
        model.model.layers[0](hidden, position_embeddings=positions, attention_mask=None)
    return sum(tensor.untyped_storage().nbytes() for tensor in kept.values()) / 2


@pytest.mark.parametrize(
    ("config", "lora", "alone", "with_gradients"),
    [
        (LLAMA_70B, False, 199_000, 285_000),
        (LLAMA_70B, True, 226_000, 312_000),
        (QWEN3_8B, False, 108_000, 145_000),
        (QWEN3_8B, True, 116_000, 153_000),
    ],
)
def test_the_arithmetic_counts_what_a_layer_keeps(config, lora, alone, with_gradients):
    """Measured on a layer an eighth (a quarter) as wide, with the same proportions.

    While a layer is computed backwards, three gradients of its widest activations come on top.
    """
    share = config.hidden_size // 1024
    small = type(config)(
        vocab_size=64,
        hidden_size=1024,
        intermediate_size=config.intermediate_size // share,
        num_hidden_layers=1,
        num_attention_heads=config.num_attention_heads // share,
        num_key_value_heads=config.num_key_value_heads // share,
        head_dim=128,
    )
    kept = [kept_in_a_layer(small, tokens, lora=lora) for tokens in (32, 96)]
    measured = share * (kept[1] - kept[0]) / 64  # without what does not grow with the tokens
    assert alone == pytest.approx(measured, rel=0.05)
    assert with_gradients == pytest.approx(measured + 3 * config.intermediate_size, rel=0.05)
