"""The recipes: their YAML files, modules, arguments, and the output that they promise."""

import importlib
import re
from pathlib import Path
from types import ModuleType
from typing import Any

from trl_packing import PackedSFTConfig

ROOT = Path(__file__).parents[2]
FOLDER = ROOT / "recipes"

# A recipe → the YAML file that its test runs.
_NAMED_ALIKE = ("chat_data", "tool_calling", "every_turn", "response_template", "streaming")
_NAMED_ALIKE += ("resuming", "evaluation", "shared_prefixes")
RECIPES = {name: name for name in _NAMED_ALIKE} | {"vision": "vision_8b"}
YAMLS = sorted(path.name for path in FOLDER.glob("*.yaml"))


def module(recipe: str) -> ModuleType:
    return importlib.import_module(f"trl_packing.recipes.{recipe}")


def commands_of(name: str) -> list[str]:
    """Return the recipes that the comment at the top of a YAML file runs it with."""
    return re.findall(rf"recipes/(\w+)\.py --config recipes/{name}", (FOLDER / name).read_text())


def parse(recipe: str, arguments: list[str]) -> tuple[Any, PackedSFTConfig]:
    words = [*arguments, "--use_cpu", "true", "--bf16", "false"]
    if recipe == "sft_packed":
        return module(recipe).parse(words)[:2]
    return module("recipe_run").parse(words, module(recipe).Arguments)


def expected_output(recipe: str) -> list[str]:
    """Return the lines that a recipe promises: the last indented part of its docstring.

    That of a YAML file, named with its ending, is the indented part of its comment.
    """
    if recipe.endswith(".yaml"):
        text = (FOLDER / recipe).read_text().partition("# Expected output")[2]
        lines = re.findall(r"(?m)^#   (.*)", text)
        return [line.strip() for line in lines]
    text = (module(recipe).__doc__ or "").rstrip()
    assert "\nExpected output" in text, f"{recipe}.py has no expected output"
    found = re.search(r"(?:\n(?:    [^\n]*)?)+$", text)
    assert found is not None
    return [line.strip() for line in found[0].splitlines() if line.strip()]


def pattern_of(line: str) -> str:
    """Return what matches `line` with other numbers and folders, and anything for "…".

    What the model itself writes, before and after, is anything too.
    """
    line = re.sub("^(before|after)  .*", r"\1  …", line)
    pattern = re.escape(re.sub(r"outputs/[\w./-]*\w", "FOLDER", re.sub("─+", "─", line)))
    pattern = re.sub(r"\d[\d,]*(?:\\\.\d+)?(?:e\\-\d+)?", r"-?[\\d.,]+(?:e[+-]?\\d+)?", pattern)
    pattern = pattern.replace("FOLDER", r"\S+")
    pattern = re.sub(r"(?:\\ )+", r"\\s+", pattern)
    return pattern.replace("─", "─+").replace("…", ".*")


def assert_prints(recipe: str, output: str) -> None:
    """Assert that `output` has the expected lines, in their order."""
    at = 0
    for line in expected_output(recipe):
        if line == "…":
            continue
        found = re.compile(pattern_of(line)).search(output, at)
        assert found is not None, f"not printed, or not here: {line!r}\n{output[at:]}"
        at = found.end()
