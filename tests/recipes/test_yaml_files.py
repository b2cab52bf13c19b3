"""Every YAML file of `recipes/` parses with the recipe that it names."""

import re
from typing import Any

import pytest
import yaml
from helpers.recipes import FOLDER, RECIPES, YAMLS, commands_of, parse


def runs() -> list[Any]:
    """Return every pair of a YAML file and a recipe that its comment names."""
    pairs = [(name, recipe) for name in YAMLS for recipe in {*commands_of(name)}]
    known = (*RECIPES, "sft_packed")
    return [pytest.param(*pair, id=" ".join(pair)) for pair in pairs if pair[1] in known]


@pytest.mark.parametrize(("name", "recipe"), runs())
def test_a_yaml_file_parses_with_the_recipe_that_it_names(name, recipe):
    _, args = parse(recipe, ["--config", str(FOLDER / name)])
    written = yaml.safe_load((FOLDER / name).read_text())
    for key in ("max_length", "learning_rate", "gradient_accumulation_steps"):
        if key in written:
            assert getattr(args, key) == written[key]


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_file_names_a_command_that_is_there(name):
    recipes = commands_of(name)
    assert recipes
    assert all((FOLDER / f"{recipe}.py").exists() for recipe in recipes)


@pytest.mark.parametrize(
    ("line", "words"),
    [
        ("max_lenght: 5", "--max_lenght is unknown; did you mean --max_length?"),
        ("shuffle_buffer: 8", "'?shuffle_buffer"),
        ("packing_strategy: best", "packing_strategy"),
        ("max_length: 8", "gives 'max_length' twice; keep one"),
        ("5: 8", "the key 5, which is no name of an option"),
        ("null: 8", "the key None, which is no name of an option"),
        ("tokenizer_name_or_path: [a, b]", "tokenizer_name_or_path"),
        ("dataset_test_split: [a, b]", "dataset_test_split=.* must be one value"),
        ("datasets: a.jsonl", "datasets must be a list of entries"),
        ("datasets: [5]", "datasets, entry 1: .* its keys are path, name"),
        ("datasets: [{path: 5}]", "entry 1: path=5 must be a text"),
        ("- a", "cannot be read"),
    ],
)
def test_a_key_or_a_value_that_cannot_be_is_refused(tmp_path, line, words):
    path = tmp_path / "wrong.yaml"
    path.write_text((FOLDER / "full_0.1b.yaml").read_text() + line + "\n")
    with pytest.raises(ValueError, match=words):
        parse("sft_packed", ["--config", str(path)])


ENGINES = [
    (name, found[1])
    for name in YAMLS
    if (found := re.search(r"--config_file recipes/(\S+)", (FOLDER / name).read_text()))
]


@pytest.mark.parametrize(("name", "engine_name"), ENGINES)
def test_a_yaml_file_checkpoints_activations_once(name, engine_name):
    """By accelerate's FSDP or by the training arguments: both is an error of transformers."""
    if not (FOLDER / engine_name).exists():
        pytest.skip(f"no {engine_name} here yet")
    engine = yaml.safe_load((FOLDER / engine_name).read_text())
    by_engine = engine.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
    by_trainer = yaml.safe_load((FOLDER / name).read_text()).get("gradient_checkpointing", True)
    assert by_engine != by_trainer
