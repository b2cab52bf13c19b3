"""The script and the options that a command without its launcher means."""

import json
from pathlib import Path

import pytest
from helpers.recipes import FOLDER

from trl_packing.tools.command import training_command
from trl_packing.tools.command.given_options import GivenOptions
from trl_packing.tools.command.training_command import TrainingCommand, model_of_words

RUN = ("--model", "m", "--data", "d.jsonl")


def recipe_of(*words: str) -> str:
    return Path(TrainingCommand.from_words(words).script).stem


@pytest.mark.parametrize(
    ("words", "recipe"),
    [
        (RUN, "full"),
        ((*RUN, "--learning_rate", "1e-4", "--bf16", "--no_remove_unused_columns"), "full"),
        ((*RUN, "--lora_r", "8"), "lora"),
        ((*RUN, "--merged_dir", "x"), "dora"),
        ((*RUN, "--counts_right", "true"), "evaluation"),
        ((*RUN, "--shuffle_buffer", "10"), "streaming"),
        ((*RUN, "--prompt_column", "q"), "sft_packed"),
        ((*RUN, "--use_peft"), "sft_packed"),
        ((*RUN, "--num_documents", "10"), "compare_packing"),
        (("recipes/dora.py", *RUN), "dora"),
        (("-m", "trl_packing.recipes.dora", *RUN), "dora"),
        ((str(FOLDER / "dora.py"), *RUN), "dora"),
        (("--config", str(FOLDER / "lora_8b.yaml")), "lora"),
        (("--config", str(FOLDER / "chat_data.yaml")), "chat_data"),
        # The recipe that the file names has no such option.
        (("--config", str(FOLDER / "chat_data.yaml"), "--prompt_column", "q"), "sft_packed"),
    ],
)
def test_the_recipe_is_named_or_found_by_the_file_or_the_options(words, recipe, monkeypatch):
    monkeypatch.chdir(FOLDER.parent)
    assert recipe_of(*words) == recipe


@pytest.mark.parametrize("missing", ["peft", "bitsandbytes"])
def test_without_the_packages_of_an_adapter_the_data_are_still_shown(missing, monkeypatch):
    found = training_command.find_spec
    monkeypatch.setattr(
        training_command, "find_spec", lambda name: None if name == missing else found(name)
    )
    words = ["recipes/qlora.py", "--config", str(FOLDER / "qlora_70b.yaml"), "--lora_r", "8"]
    command = TrainingCommand.from_words(words)
    assert Path(command.script).stem == "full"
    assert f"({missing} is not installed)" in command.why
    assert command.in_file is not None
    assert not {"lora_r", "lora_alpha"} & {*command.in_file, *command.words}
    assert command.in_file["max_length"] == 4096


def test_a_copy_of_a_recipe_elsewhere_is_the_users_own_script(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.py").write_text("print('mine')")
    command = TrainingCommand.from_words(["lora.py", "--model", "m", "--own-option", "1"])
    assert command.script == "lora.py"
    assert command.words == ("--model", "m", "--own-option", "1")


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ((*RUN, "--max_lenght", "5"), "--max_lenght is unknown; did you mean --max_length?"),
        ((*RUN, "--max_lenght=5"), "did you mean --max_length?"),
        ((*RUN, "--lora_r", "8", "--counts_right", "1"), "no recipe takes --counts_right and "),
        (("recipes/loar.py",), "did you mean lora.py?"),
        (("-m", "no.such.module"), "there is no module no.such.module"),
        ((*RUN, "--config"), "--config takes one YAML file"),
        (("-x", *RUN), "'-x' belongs to no option"),
        (("--model", "m"), "name the model and the data"),
    ],
)
def test_a_command_that_means_no_script_is_refused(words, sentence):
    with pytest.raises(ValueError, match=sentence.replace("?", r"\?")):
        TrainingCommand.from_words(words)


def test_abbreviations_are_those_of_argparse():
    options = GivenOptions.from_words(["--max_len", "5", "--max-steps=3", "--bf16"])
    spelled = options.spelled_out(["max_length", "max_steps", "bf16", "bf16_full_eval"])
    assert spelled.on_line == {"max_length": ["5"], "max_steps": ["3"], "bf16": []}
    with pytest.raises(ValueError, match="--max is unknown"):
        GivenOptions.from_words(["--max", "5"]).spelled_out(["max_length", "max_steps"])


def test_the_revision_joins_what_is_given_for_the_model(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_init_kwargs:\n  dtype: bfloat16\n")
    words = ["--config", str(file), *RUN, "--revision", "v2"]
    command = TrainingCommand.from_words(words)
    given = command.words[command.words.index("--model_init_kwargs") + 1]
    assert json.loads(given) == {"dtype": "bfloat16", "revision": "v2"}
    name, args = model_of_words([*words, "--attention", "varlen", "--max-length", "64"])
    assert (name, args.attention, args.max_length) == ("m", "varlen", 64)
    assert args.model_init_kwargs == {"dtype": "bfloat16", "revision": "v2"}
    sft = TrainingCommand.from_words([*RUN, "--prompt_column", "q", "--revision", "v2"])
    assert sft.words[-2:] == ("--model_revision", "v2")


def test_the_environment_of_a_file_is_kept(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("env:\n  A: 1\nmax_length: 64\n")
    command = TrainingCommand.from_words(["--config", str(file), *RUN])
    assert command.in_file == {"env": {"A": 1}, "max_length": 64}
