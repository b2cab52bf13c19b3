"""The memory tables in the YAML files of `recipes/` add up."""

import re

import pytest
from helpers.recipes import FOLDER, YAMLS

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
