"""Every YAML file of `recipes/` parses with the recipe that it names; a mistake is one line."""

import re

import pytest
import yaml
from helpers.recipes import FOLDER, RECIPES, YAMLS, commands_of, module, parse


@pytest.mark.parametrize("name", YAMLS)
def test_a_yaml_file_parses_with_the_recipe_that_it_names(name):
    recipes = {*commands_of(name)}
    assert recipes
    written = yaml.safe_load((FOLDER / name).read_text())
    for recipe in recipes & {*RECIPES, "sft_packed"}:
        _, args = parse(recipe, ["--config", str(FOLDER / name)])
        for key in {"max_length", "learning_rate", "gradient_accumulation_steps"} & written.keys():
            assert getattr(args, key) == written[key]
    if engine := re.search(r"--config_file recipes/(\S+)", (FOLDER / name).read_text()):
        # Activations are checkpointed by FSDP or by the trainer; both is an error of transformers.
        config = yaml.safe_load((FOLDER / engine[1]).read_text())
        by_engine = config.get("fsdp_config", {}).get("fsdp_activation_checkpointing", False)
        assert by_engine != written.get("gradient_checkpointing", True)


WRONG = [
    ("max_lenght: 5", "max_lenght"),
    ("max_length: 8", "gives 'max_length' twice; keep one"),
    ("null: 8", "the key None, which is no name of an option"),
    ("dataset_test_split: [a, b]", "dataset_test_split=.* must be one value"),
    ("datasets: a.jsonl", "datasets must be a list of entries"),
    ("datasets: [{path: a, chat: 'false'}]", "entry 1: chat='false' must be true or false"),
]


@pytest.mark.parametrize(("line", "words"), WRONG)
def test_a_key_or_a_value_that_cannot_be_is_refused(tmp_path, line, words):
    path = tmp_path / "wrong.yaml"
    path.write_text((FOLDER / "full_0.1b.yaml").read_text() + line + "\n")
    with pytest.raises(ValueError, match=words):
        parse("sft_packed", ["--config", str(path)])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_refusal_of_a_recipe_is_one_line_without_a_traceback(recipe, tmp_path):
    given = ["--model_name_or_path", "nothing", "--dataset_name", str(tmp_path / "nothing.jsonl")]
    for words, sentence in (
        (["--model_name_or_path", "nothing"], "name the model and the data: --model_name"),
        ([*given, "--max_length", "one"], "invalid int value: 'one'"),
        ([*given, "--config", str(tmp_path / "nothing.yaml")], "nothing.yaml"),
    ):
        with pytest.raises(SystemExit) as refusal:
            module(recipe).main(words)
        said = refusal.value.code
        assert said.startswith(f"{recipe}.py: ")
        assert "\n" not in said
        assert sentence in said
