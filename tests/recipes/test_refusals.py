"""A recipe that cannot run says why in one line."""

import pytest
import torch
from helpers.recipes import RECIPES, module

from trl_packing.tools.options import exits_in_one_line

DEMOS = ["every_turn", "shared_prefixes", "vision"]  # without arguments, these train a small model


@pytest.mark.parametrize("recipe", [name for name in RECIPES if name not in DEMOS])
def test_without_a_model_it_says_what_is_missing(recipe, capsys):
    with pytest.raises(SystemExit) as refusal:
        module(recipe).main([])
    assert refusal.value.code.startswith(f"{recipe}.py: name the model and the data: --model_name")
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_refusal_is_one_line_without_a_traceback(recipe, tmp_path, monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    (tmp_path / "bad.yaml").write_text("learning_rate: [1")
    (tmp_path / "unknown.yaml").write_text("lerning_rate: 1.0e-4")
    given = ["--model_name_or_path", "nothing", "--dataset_name", str(tmp_path / "nothing.jsonl")]
    for options, sentence in (
        (["--nonsense", "1"], "--nonsense"),
        (["--max_lenght", "1"], "--max_lenght is unknown; did you mean --max_length?"),
        (["--max_length", "one"], "argument --max_length: invalid int value: 'one'"),
        (["--lr_scheduler_type", "cosin"], "'cosin'"),
        (["--train_on", "assistant", "--assistant_only_loss", "true"], "both say what is trained"),
        (["--config", str(tmp_path / "nothing.yaml")], "nothing.yaml"),
        (["--config", str(tmp_path / "bad.yaml")], "bad.yaml"),
        (["--config", str(tmp_path / "unknown.yaml")], "lerning_rate"),
        ([], "nothing"),
    ):
        with pytest.raises(SystemExit) as refusal:
            module(recipe).main([*given, *options])
        said = refusal.value.code
        assert said.startswith(f"{recipe}.py: ")
        assert "\n" not in said
        assert sentence in said


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
