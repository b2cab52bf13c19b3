"""Every recipe trains a tiny model with the YAML file beside it.

It must print what the "Expected output" of its docstring promises: the same words with other
numbers ("…" matches anything).
"""

import json
import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from unittest.mock import patch

import numpy as np
import pytest
import torch
from harness import TWO_RUNS
from helpers.recipes import (
    FOLDER,
    RECIPES,
    ROOT,
    assert_prints,
    module,
)
from helpers.tiny import save_tiny_model, tiny_rows
from safetensors.torch import load_file

from trl_packing import PackedSFTTrainer


@pytest.fixture(scope="session")
def model(tmp_path_factory) -> str:
    return save_tiny_model(tmp_path_factory.mktemp("model"), "llama", chat=True)


def write(path: Path, rows: list[dict[str, Any]]) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return str(path)


def instructions() -> list[dict[str, str]]:
    rows = tiny_rows("question_answer", 48)
    return [{"instruction": r["question"], "input": "", "output": r["answer"]} for r in rows]


def texts() -> list[dict[str, str]]:
    rows = tiny_rows("question_answer", 48)
    texts = [f"### Instruction:\n{r['question']}\n\n### Response:\n{r['answer']}" for r in rows]
    return [{"text": text, "number": str(i)} for i, text in enumerate(texts)]


def questions() -> list[dict[str, Any]]:
    """Three answers to each question."""
    rows = tiny_rows("question_answer", 48)
    answers = [row["answer"] for row in rows]
    return [
        {"query": row["question"], "response": [*answers[i : i + 3]]} for i, row in enumerate(rows)
    ]


ROWS = {
    "chat_data": instructions,
    "tool_calling": lambda: tiny_rows("tools", 24),
    "response_template": texts,
    "shared_prefixes": questions,
}


def data_of(recipe: str, folder: Path) -> list[str]:
    """Write the data of a recipe, and return the options that name it."""
    split = ["--dataset_train_split", "train"]
    chats = tiny_rows("conversational_language_modeling", 64)
    if recipe == "streaming":
        for shard in range(4):
            write(folder / "shards" / f"{shard}.jsonl", chats[shard::4])
        return ["--dataset_name", str(folder / "shards"), "--dataset_config", "default", *split]
    if recipe == "evaluation":
        chats = [row | {"source": "gsm8k" if i % 3 else "alpaca"} for i, row in enumerate(chats)]
        write(folder / "splits" / "train.jsonl", chats)
        write(folder / "splits" / "test.jsonl", chats[:12])
        name = ["--dataset_name", str(folder / "splits"), "--dataset_config", "default"]
        return [*name, *split, "--dataset_test_split", "test"]
    rows = ROWS.get(recipe, lambda: tiny_rows("question_answer", 48))()
    return ["--dataset_name", write(folder / "rows.jsonl", rows), *split]


def options(recipe: str, model: str, folder: Path) -> list[str]:
    """Return the arguments of a short run on `model` with the YAML file of the recipe."""
    return [
        *("--config", str(FOLDER / f"{RECIPES.get(recipe, recipe)}.yaml")),
        *("--model_name_or_path", model),
        *data_of(recipe, folder),
        *("--output_dir", str(folder / "out"), "--max_length", "512"),
        *("--max_steps", "10", "--gradient_accumulation_steps", "1", "--logging_steps", "5"),
        *("--learning_rate", "1e-3", "--lr_scheduler_type", "constant", "--warmup_steps", "0"),
    ]


def run(recipe: str, model: str, folder: Path, *further: str) -> PackedSFTTrainer:
    return module(recipe).main([*options(recipe, model, folder), *further])


def decreases(trainer: PackedSFTTrainer) -> bool:
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    return losses[-1] < losses[0]


def weights(folder: Path, name: str = "model.safetensors") -> dict[str, torch.Tensor]:
    return load_file(folder / name)


def trained_by_sft_packed(name: str, model: str, folder: Path, *further: str) -> Any:
    """Train with sft_packed.py and a YAML file; return the trainer."""
    trainers, train = [], PackedSFTTrainer.train

    def record(self: PackedSFTTrainer, *args: Any) -> Any:
        trainers.append(self)
        return train(self, *args)

    with patch.object(PackedSFTTrainer, "train", record):
        module("sft_packed").main([*options(name, model, folder), *further])
    return trainers[0]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("name", "further", "trained"),
    [
        ("full_0.1b", (), None),
        ("lora_0.1b", (), "lora_B"),
        ("lora_0.1b", ("--use_dora", "true"), "magnitude"),
        ("lora_0.1b", ("--load_in_4bit", "true"), "lora_B"),
    ],
    ids=["full", "lora", "dora", "qlora"],
)
def test_weights_or_an_adapter_are_trained(name, further, trained, model, tmp_path, capsys):
    if "--load_in_4bit" in further:
        pytest.importorskip("bitsandbytes", reason="bitsandbytes is not installed")
    trainer = trained_by_sft_packed(name, model, tmp_path, *further)
    assert_prints(f"{name}.yaml", capsys.readouterr().out)
    assert decreases(trainer)
    before = weights(Path(model))
    if trained is None:
        after = weights(tmp_path / "out")
        assert before.keys() == after.keys()
        assert all(not torch.equal(before[name], after[name]) for name in before)
        return
    adapter = weights(tmp_path / "out", "adapter_model.safetensors")
    assert any(tensor.any() for name, tensor in adapter.items() if trained in name)
    base = trainer.model.base_model.model.model.layers[0].self_attn.q_proj.base_layer.weight
    if "--load_in_4bit" in further:
        assert base.dtype == torch.uint8
    else:
        assert torch.equal(base, before["model.layers.0.self_attn.q_proj.weight"])


def trained(trainer: PackedSFTTrainer, row: int) -> str:
    """Return the tokens of a document that are trained, as text."""
    document = trainer.train_dataset[row]
    labels = np.asarray(document["labels"])
    ids = np.asarray(document["input_ids"])[labels != -100]
    return trainer.processing_class.decode(ids)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("recipe", "row", "text"),
    [
        ("chat_data", 0, "Beautiful.<|im_end|>"),
        ("response_template", 0, "Beautiful.<|im_end|>"),
        ("tool_calling", 3, "It is 3 degrees."),
    ],
)
def test_a_recipe_prints_what_it_promises_and_trains_the_answers(
    recipe, row, text, model, tmp_path, capsys
):
    trainer = run(recipe, model, tmp_path)
    assert_prints(recipe, capsys.readouterr().out)
    assert decreases(trainer)
    found = trained(trainer, row)
    assert text in found
    assert found.count("3 degrees") == (recipe == "tool_calling")  # the tool said it too


@pytest.mark.slow
@pytest.mark.parametrize("recipe", ["shared_prefixes", "every_turn"])
def test_a_demo_needs_no_model(recipe, tmp_path, capsys):
    trainer = module(recipe).main(
        ["--output_dir", str(tmp_path / "out"), "--max_steps", "12", "--logging_steps", "4"]
    )
    assert_prints(recipe, capsys.readouterr().out)
    assert decreases(trainer)


@pytest.mark.slow
def test_the_demo_of_vision_looks_at_its_pictures(tmp_path, capsys):
    trainer = module("vision").main(["--output_dir", str(tmp_path / "out")])
    output = capsys.readouterr().out
    assert_prints("vision", output)
    assert decreases(trainer)
    losses = re.search(r"Loss on new pictures: ([\d.]+)\. .* rows: ([\d.]+)\.", output)
    assert losses is not None
    right, wrong = map(float, losses.groups())
    assert 3 * right < wrong
    assert weights(tmp_path / "out")


@pytest.mark.slow
def test_streaming_trains_for_max_steps(model, tmp_path, capsys):
    trainer = run("streaming", model, tmp_path, "--dataloader_num_workers", "0")
    output = capsys.readouterr().out
    assert_prints("streaming", output)
    assert "Shards in the stream: 4. Ranks: 1" in output
    assert trainer.state.global_step == 10
    assert decreases(trainer)


class Killed(BaseException):
    """Nothing in between catches it, as nothing catches SIGKILL."""


@pytest.fixture
def killed_in_second_save(monkeypatch) -> Iterator[None]:
    """Stop while the second checkpoint is being written, as if the process were gone."""
    saves = []
    original = PackedSFTTrainer._save_rng_state

    def save(self: Any, output_dir: str) -> None:
        saves.append(output_dir)
        if len(saves) == 2:
            raise Killed
        original(self, output_dir)

    monkeypatch.setattr(PackedSFTTrainer, "_save_rng_state", save)


@pytest.mark.slow
def test_resuming_goes_on_before_the_checkpoint_that_was_being_written(
    model, tmp_path, capsys, killed_in_second_save
):
    steps = ("--save_steps", "3")
    with pytest.raises(Killed):
        run("resuming", model, tmp_path, *steps)
    assert "No checkpoint in" in capsys.readouterr().out
    run("resuming", model, tmp_path, *steps)
    output = capsys.readouterr().out
    assert_prints("resuming", output)
    assert "checkpoint-6 was being written" in output
    assert "Continuing from checkpoint-3." in output
    run("resuming", model, tmp_path / "whole", *steps)
    resumed, whole = weights(tmp_path / "out"), weights(tmp_path / "whole" / "out")
    assert all(torch.equal(resumed[name], whole[name]) for name in whole)
    assert any(not torch.equal(whole[name], t) for name, t in weights(Path(model)).items())


@pytest.mark.slow
def test_evaluation_reports_sources_and_keeps_the_best_model(model, tmp_path, capsys):
    trainer = run(
        *("evaluation", model, tmp_path, "--counts_right", "true", "--max_steps", "8"),
        *("--eval_steps", "4", "--save_steps", "4"),
    )
    output = capsys.readouterr().out
    assert_prints("evaluation", output)
    evaluated = [e for e in trainer.state.log_history if "eval_loss" in e]
    assert [e["step"] for e in evaluated] == [0, 4, 8, 8]
    best = min(evaluated[1:3], key=lambda entry: entry["eval_loss"])
    assert trainer.state.best_model_checkpoint.endswith(f"checkpoint-{best['step']}")
    assert evaluated[3]["eval_loss"] == pytest.approx(best["eval_loss"], rel=TWO_RUNS)


@pytest.mark.slow
def test_two_processes_read_parts_of_their_own_of_a_stream(model, tmp_path):
    words = [str(FOLDER / "streaming.py"), *options("streaming", model, tmp_path)]
    launcher = ("-m", "torch.distributed.run", "--standalone", "--nproc_per_node", "2")
    done = subprocess.run(
        [sys.executable, *launcher, *words, "--max_steps", "4"],
        cwd=tmp_path,
        env=os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": str(ROOT)},
        capture_output=True,
        text=True,
        timeout=900,
    )
    assert done.returncode == 0, (done.stdout + done.stderr)[-5000:]
    assert "Shards in the stream: 4. Ranks: 2. Each rank reads its own shards." in done.stdout
    assert done.stdout.count("is in ") == 1
    assert weights(tmp_path / "out")
