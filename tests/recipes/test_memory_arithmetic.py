"""The memory tables in the YAML files of `recipes/` add up, and count what a model needs."""

import re

import pytest
import torch
from helpers.recipes import FOLDER, YAMLS
from transformers import AutoConfig, AutoModelForCausalLM

TABLES = [name for name in YAMLS if "# Memory" in (FOLDER / name).read_text()]


def value(expression: str) -> float:
    """Return the bytes that "2 B × 8,192 tokens × 4,096 / 8" comes to."""
    plain = expression.replace("tokens", "").replace(" B", "").replace("×", "*").replace(",", "")
    assert re.fullmatch(r"[\d.e*/ ]+", plain), expression
    return eval(plain)


def assert_adds_up(text: str) -> None:
    """Hold the rows of a memory table, expression and GB, to their numbers and their total."""
    rows = re.findall(r"(?m)^#   .*?\s{2,}([\d.]+ .*?)\s{2,}([\d.]+) GB$", text)
    total = re.search(r"(?m)^# +about ([\d.]+) GB$", text)
    assert len(rows) >= 4
    for expression, gigabytes in rows:
        assert value(expression) / 1e9 == pytest.approx(float(gigabytes), abs=0.051), expression
    assert sum(float(number) for _, number in rows) == pytest.approx(float(total[1]), abs=0.51)


def test_the_memory_arithmetic_of_all_big_models_adds_up_and_a_wrong_one_is_seen():
    assert len(TABLES) >= 7
    for name in TABLES:
        assert_adds_up((FOLDER / name).read_text())
    text = (FOLDER / "lora_8b.yaml").read_text()
    for right, wrong in (("16.4 GB", "61.4 GB"), ("about 20 GB", "about 12 GB")):
        with pytest.raises(AssertionError):
            assert_adds_up(text.replace(right, wrong))


@pytest.mark.parametrize(
    ("name", "sizes", "counts"),
    [
        ("llama", (128256, 8192, 28672, 80, 64), (70.55e9, 2.10e9, 0.856e9, 68.45e9, 207e6)),
        ("qwen3", (151936, 4096, 12288, 36, 32), (8.19e9, 1.24e9, 0.193e9, 6.95e9, 43.6e6)),
    ],
)
def test_the_arithmetic_counts_the_parameters(name, sizes, counts):
    names = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers")
    names += ("num_attention_heads",)
    shape = dict(zip(names, sizes, strict=True))
    config = AutoConfig.for_model(name, **shape, num_key_value_heads=8)
    with torch.device("meta"):
        model = AutoModelForCausalLM.from_config(config)
    linear = [m for m in model.model.modules() if isinstance(m, torch.nn.Linear)]
    counted = (
        model.num_parameters(),
        model.lm_head.weight.numel() + model.get_input_embeddings().weight.numel(),
        sum(p.numel() for p in model.model.layers[0].parameters()),
        sum(m.weight.numel() for m in linear),
        16 * sum(m.in_features + m.out_features for m in linear),  # adapters of rank 16
    )
    assert counts == pytest.approx(counted, rel=0.005)
