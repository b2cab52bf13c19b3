"""A recipe that cannot run says why in one line."""

import re
from importlib.util import find_spec

import pytest
import torch
from helpers.recipes import FOLDER, RECIPES, module

from trl_packing.tools.command.exit_messages import exits_in_one_line

DEMOS = ["every_turn", "shared_prefixes", "vision"]  # without arguments, these train a small model


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in DEMOS])
def test_without_a_model_it_says_what_is_missing(recipe, capsys):
    with pytest.raises(SystemExit) as refusal:
        module(recipe).main([])
    missing = "the following arguments are required: --model_name_or_path, --dataset_name"
    assert refusal.value.code == f"{recipe}.py: {missing}"
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("recipe", DEMOS)
def test_a_demo_with_only_data_says_what_is_missing(recipe, tmp_path):
    with pytest.raises(SystemExit, match="needs --model_name_or_path and --dataset_name"):
        module(recipe).main(["--dataset_name", str(tmp_path / "nothing.jsonl")])


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_refusal_is_one_line_without_a_traceback(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "bad.yaml").write_text("learning_rate: [1")
    (tmp_path / "unknown.yaml").write_text("lerning_rate: 1.0e-4")
    given = ["--model_name_or_path", "nothing", "--dataset_name", str(tmp_path / "nothing.jsonl")]
    if recipe == "qlora":
        given += ["--use_cpu", "true"]
    lacks_package = recipe == "qlora" and find_spec("bitsandbytes") is None
    for options, sentence in (
        (["--nonsense", "1"], "--nonsense"),
        (["--max_lenght", "1"], "--max_lenght is unknown; did you mean --max_length?"),
        (["--max_length", "one"], "argument --max_length: invalid int value: 'one'"),
        (["--lr_scheduler_type", "cosin"], "'cosin'; did you mean cosine?"),
        (["--train_on", "assistant", "--assistant_only_loss", "true"], "both say what is trained"),
        (["--config", str(tmp_path / "nothing.yaml")], "nothing.yaml"),
        (["--config", str(tmp_path / "bad.yaml")], "bad.yaml"),
        (["--config", str(tmp_path / "unknown.yaml")], "lerning_rate"),
        ([], "bitsandbytes is not installed" if lacks_package else "nothing.jsonl"),
    ):
        with pytest.raises(SystemExit) as refusal:
            module(recipe).main([*given, *options])
        said = refusal.value.code
        assert said.startswith(f"{recipe}.py: ")
        assert "\n" not in said
        assert sentence in said


def test_an_error_inside_a_training_step_keeps_its_traceback():
    def training_step():
        raise ValueError("a shape is wrong")

    @exits_in_one_line
    def main(function):
        function()

    with pytest.raises(ValueError, match="a shape is wrong"):
        main(training_step)
    with pytest.raises(SystemExit, match=r"^test_refusals.py: invalid literal"):
        main(lambda: int("x"))


def test_a_rank_says_its_number_and_an_unexpected_error_its_type(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "1")

    @exits_in_one_line
    def main():
        return {}["no key"]

    with pytest.raises(SystemExit) as refusal:
        main()
    assert refusal.value.code == (
        "test_refusals.py (rank 1): KeyError: 'no key' (TRL_PACKING_TRACEBACK=1 shows where)"
    )


def test_qlora_without_cuda_is_one_sentence(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(SystemExit) as refusal:
        module("qlora").main(["--config", str(FOLDER / "qlora_70b.yaml")])
    assert re.fullmatch(r"qlora.py: .*CUDA.*lora.py.*--use_cpu true", str(refusal.value))


def test_qlora_without_bitsandbytes_says_what_to_install(monkeypatch):
    qlora = module("qlora")
    monkeypatch.setattr(qlora, "find_spec", lambda name: None)
    arguments = ["--config", str(FOLDER / "qlora_70b.yaml"), "--use_cpu", "true"]
    with pytest.raises(SystemExit, match=r"pip install 'trl-packing\[qlora\]'"):
        qlora.main(arguments)
