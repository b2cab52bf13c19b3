"""The harness finds faults and forgives rounding; mutations are where they were written for."""

import ast
from pathlib import Path

import mutations
import pytest
from harness import alone, assert_exact
from helpers.tiny import documents_of_lengths, tiny_model

HERE = Path(__file__).parent
#: float32 rounds at 6e-8, and sums add up: below this, a bound is a guess about other machines.
LEAST = 1e-5
BOUNDS = ("rel", "abs", "atol", "rtol", "tolerance")


@pytest.fixture(scope="module")
def expected():
    return alone(tiny_model("llama"), documents_of_lengths([9, 20, 4], prompt=2))


def test_a_thousandth_is_a_fault_and_rounding_is_none(expected):
    loss, gradients = expected
    name = "model.layers.0.mlp.up_proj.weight"
    rounded = 1 + 2**-20
    assert_exact((loss * rounded, gradients | {name: gradients[name] * rounded}), expected)
    for found in ((loss * 1.001, gradients), (loss, gradients | {name: gradients[name] * 1.001})):
        with pytest.raises(AssertionError):
            assert_exact(found, expected)
    with pytest.raises(AssertionError, match=r"lm_head.weight has no gradient"):
        assert_exact((loss, {n: g for n, g in gradients.items() if "head" not in n}), expected)


def small_bounds(tree):
    """Return the lines of literal bounds below `LEAST`."""
    for node in ast.walk(tree):
        numbers = []
        if isinstance(node, ast.keyword) and node.arg in BOUNDS:
            numbers = [node.value]
        elif isinstance(node, ast.Compare):
            numbers = [node.left, *node.comparators]
        elif isinstance(node, ast.Assign) and "TOLERANCE" in ast.unparse(node.targets[0]):
            numbers = [node.value]
        for number in numbers:
            literals = [n.value for n in ast.walk(number) if isinstance(n, ast.Constant)]
            if any(isinstance(n, float) and 0 < n < LEAST for n in literals):
                yield number.lineno


def test_a_bound_below_what_rounding_explains_has_a_reason_on_its_line():
    bare = []
    for path in HERE.rglob("*.py"):
        text = path.read_text()
        lines = text.splitlines()
        bare += [
            f"{path.relative_to(HERE)}:{at}"
            for at in small_bounds(ast.parse(text))
            if "#" not in lines[at - 1]
        ]
    assert not bare, f"take assert_exact or TWO_RUNS of harness.py, or give a reason: {bare}"
    assert {*small_bounds(ast.parse("assert a == approx(b, rel=2e-6)"))} == {1}, "the control"


@pytest.mark.parametrize(("file", "name", "old", "new"), [row[1:] for row in mutations.table()])
def test_a_mutation_is_once_in_its_function_and_layout_does_not_matter(file, name, old, new):
    text = (HERE.parent / "trl_packing" / file).read_text()
    other_layout = ast.unparse(ast.parse(text))
    mutated = mutations.mutated(text, name, old, new)
    assert mutated == mutations.mutated(other_layout, name, old, new) != other_layout
    with pytest.raises(ValueError, match="is 0 times in"):  # it is not there any more
        mutations.mutated(mutated.replace(name.split(".")[-1], "gone"), name, old, new)
