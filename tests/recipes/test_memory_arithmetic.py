"""The memory tables in the YAML files of `recipes/` add up, and count what a model needs."""

import re

import pytest
import torch
from helpers.recipes import (
    FOLDER,
    YAMLS,
)
from transformers import (
    AutoModelForCausalLM,
    LlamaConfig,
    Qwen3Config,
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


def test_the_memory_arithmetic_of_all_big_models_adds_up_and_a_wrong_one_is_seen():
    assert len(TABLES) >= 7
    for name in TABLES:
        assert_adds_up((FOLDER / name).read_text())
    text = (FOLDER / "lora_8b.yaml").read_text()
    for right, wrong in (("16.4 GB", "61.4 GB"), ("about 20 GB", "about 12 GB")):
        with pytest.raises(AssertionError):
            assert_adds_up(text.replace(right, wrong))


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
