"""Every recipe trains a tiny model with the YAML file beside it.

It must print what the "Expected output" of its docstring promises: the same words with other
numbers ("…" matches anything).
"""

import re
from pathlib import Path

import pytest
import torch
from harness import TWO_RUNS
from helpers.drop_in import logged
from helpers.prepared import write_rows
from helpers.recipes import FOLDER, RECIPES, assert_prints, module
from helpers.tiny import save_tiny_model, tiny_rows
from safetensors.torch import load_file

from trl_packing import PackedSFTTrainer
from trl_packing.training.checkpoints import MARK

pytestmark = pytest.mark.slow


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


def options(recipe: str, model: str, folder: Path) -> list[str]:
    """Return the arguments of a short run on `model` with the YAML file of the recipe."""
    chats = tiny_rows("conversational_language_modeling", 64)
    sourced = [row | {"source": "gsm8k" if i % 3 else "alpaca"} for i, row in enumerate(chats)]
    rows = sourced if recipe == "evaluation" else tiny_rows("question_answer", 48)
    (folder / "data").mkdir(parents=True, exist_ok=True)
    for name, part in {"train": rows, "test": rows[:12]}.items():
        write_rows(folder / "data" / f"{name}.jsonl", part)
    return [
        *("--config", str(FOLDER / f"{RECIPES.get(recipe, recipe)}.yaml")),
        *("--model_name_or_path", model, "--dataset_name", str(folder / "data")),
        *("--dataset_config", "default", "--dataset_train_split", "train"),
        *("--output_dir", str(folder / "out"), "--max_length", "512"),
        *("--max_steps", "10", "--gradient_accumulation_steps", "1", "--logging_steps", "5"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
    ]


def run(recipe: str, model: str, folder: Path, *further: str) -> PackedSFTTrainer:
    return module(recipe).main([*options(recipe, model, folder), *further])


def decreases(trainer: PackedSFTTrainer) -> bool:
    losses = logged(trainer, "loss")
    return losses[-1] < losses[0]


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


TRAINED = [
    ("full_0.1b", (), None),
    ("lora_0.1b", (), "lora_B"),
    ("lora_0.1b", ("--use_dora", "true"), "magnitude"),
    ("lora_0.1b", ("--load_in_4bit", "true"), "lora_B"),
]


@pytest.mark.parametrize(("name", "further", "trained"), TRAINED)
def test_weights_or_an_adapter_are_trained(name, further, trained, model, tmp_path, capsys):
    if "--load_in_4bit" in further:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    module("sft_packed").main([*options(name, model, tmp_path), *further])
    assert_prints(f"{name}.yaml", capsys.readouterr().out)
    if trained is None:
        before, after = weights(Path(model)), weights(tmp_path / "out")
        assert before.keys() == after.keys()
        assert all(not torch.equal(before[name], after[name]) for name in before)
        return
    adapter = weights(tmp_path / "out", "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if trained in name)


@pytest.mark.parametrize("recipe", ["shared_prefixes", "every_turn", "vision"])
def test_a_demo_needs_no_model(recipe, tmp_path, capsys):
    short = ["--max_steps", "12", "--logging_steps", "4"] if recipe != "vision" else []
    trainer = module(recipe).main(["--output_dir", str(tmp_path / "out"), *short])
    output = capsys.readouterr().out
    assert_prints(recipe, output)
    assert decreases(trainer)
    if recipe == "vision":  # it looks at its pictures
        losses = re.search(r"Loss on new pictures: ([\d.]+)\. .* rows: ([\d.]+)\.", output)
        right, wrong = map(float, losses.groups())
        assert 3 * right < wrong


def test_resuming_goes_on_before_a_half_written_checkpoint(model, tmp_path, capsys):
    steps = ("--save_steps", "3")
    run("resuming", model, tmp_path, *steps, "--max_steps", "6")
    (tmp_path / "out" / "checkpoint-6" / MARK).touch()
    run("resuming", model, tmp_path, *steps)
    output = capsys.readouterr().out
    assert_prints("resuming", output)
    assert "Continuing from checkpoint-3." in output
    run("resuming", model, tmp_path / "whole", *steps)
    resumed, whole = weights(tmp_path / "out"), weights(tmp_path / "whole" / "out")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)


def test_evaluation_reports_sources_and_keeps_the_best_model(model, tmp_path, capsys):
    trainer = run(
        *("evaluation", model, tmp_path, "--counts_right", "true", "--max_steps", "8"),
        *("--eval_steps", "4", "--save_steps", "4", "--dataset_test_split", "test"),
    )
    assert_prints("evaluation", capsys.readouterr().out)
    evaluated = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert [e["step"] for e in evaluated] == [0, 4, 8, 8]
    best = min(evaluated[1:3], key=lambda entry: entry["eval_loss"])
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best['step']}")
    assert evaluated[3]["eval_loss"] == pytest.approx(best["eval_loss"], rel=TWO_RUNS)
