"""The script and the options that a command without its launcher means."""

import pytest
from helpers.recipes import FOLDER, module

from trl_packing.tools.training_command import TrainingCommand

RUN = ("--model", "m", "--data", "d.jsonl")


def test_a_script_runs_as_it_is_and_without_one_it_is_sft_packed(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "lora.py").write_text("print('mine')")
    own = TrainingCommand.from_words(["lora.py", "--model", "m", "--own-option", "1"])
    assert (own.script, own.words) == ("lora.py", ("--model", "m", "--own-option", "1"))
    assert own.is_named
    assert own.options == {}
    none = TrainingCommand.from_words([*RUN, "--split=train[:4]", "--revision", "v2"])
    assert (none.script, none.is_named) == (str(FOLDER / "sft_packed.py"), False)
    assert none.options == {
        "model_name_or_path": "m",
        "dataset_name": "d.jsonl",
        "dataset_train_split": "train[:4]",
        "model_revision": "v2",
    }
    data_args, _, model_args = module("sft_packed").parse(none.words)
    assert (data_args.dataset_train_split, model_args.model_revision) == ("train[:4]", "v2")
    # Outside of a checkout, the path of a recipe is found in the package.
    recipe = TrainingCommand.from_words(["recipes/chat_data.py", "--data", "d"])
    assert recipe.script == str(FOLDER / "chat_data.py")
    assert recipe.options == {"dataset_name": "d"}


def test_a_model_is_found_without_data_and_with_its_revision(tmp_path):
    file = tmp_path / "run.yaml"
    file.write_text("model_init_kwargs:\n  low_cpu_mem_usage: true\nbf16: true\n")
    words = ["--config", str(file), "--model", "m", "--revision", "v2"]
    command = TrainingCommand.from_words(
        [*words, "--attention", "varlen", "--max-length", "64"], needs_data=False
    )
    name, args = command.model_and_settings()
    assert (name, args.attention, args.max_length) == ("m", "varlen", 64)
    assert args.model_init_kwargs["revision"] == "v2"
    assert args.model_init_kwargs["low_cpu_mem_usage"] is True
    with pytest.raises(ValueError, match="name the model"):
        TrainingCommand.from_words(["--max_length", "64"], needs_data=False).model_and_settings()
