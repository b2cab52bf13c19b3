"""Checkpoints, saved models and resumed runs are those of TRL."""

import json

import torch
import transformers
from helpers.drop_in import (
    PackedSFTTrainer,
    both_modes,
    parameters,
    sgd_run,
    train_moves_all,
    trainer_for,
)
from helpers.tiny import QUESTIONS_AND_ANSWERS, tiny_dataset, tiny_model
from trl import SFTTrainer


@both_modes
def test_checkpoint_holds_what_trl_writes(tmp_path, packing):
    def files(folder, cls):
        trainer = sgd_run(
            folder, cls, packing=packing, max_steps=2, save_strategy="steps", save_steps=2
        )
        return trainer, {str(p.relative_to(folder)) for p in folder.rglob("*") if p.is_file()}

    ours, mine = files(tmp_path / "ours", PackedSFTTrainer)
    _, others = files(tmp_path / "theirs", SFTTrainer)
    assert others <= mine
    card = (tmp_path / "ours/README.md").read_text(encoding="utf-8")
    assert "trl" in card
    assert "SFT" in card
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "ours/checkpoint-2")
    assert all(torch.equal(p, ours.model.get_parameter(n)) for n, p in saved.named_parameters())
    written = json.loads((tmp_path / "ours/checkpoint-2/config.json").read_text())
    reference = json.loads((tmp_path / "theirs/checkpoint-2/config.json").read_text())
    assert written == reference


@both_modes
def test_the_trained_model_still_generates_from_padded_batches(tmp_path, packing):
    trainer = sgd_run(tmp_path, PackedSFTTrainer, packing=packing, max_steps=2)
    trainer.save_model(str(tmp_path / "saved"))
    saved = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "saved")
    tokenizer = transformers.AutoTokenizer.from_pretrained(tmp_path / "saved", padding_side="left")
    prompts = [pair[0] for pair in QUESTIONS_AND_ANSWERS[:3]]
    batch = tokenizer(prompts, return_tensors="pt", padding=True)
    live, loaded = (
        model.eval().generate(**batch, max_new_tokens=8, do_sample=False)
        for model in (trainer.model, saved)
    )
    assert torch.equal(live, loaded)


@both_modes
def test_resuming_gives_the_run_that_was_not_interrupted(tmp_path, packing):
    """In the second epoch, with dropout and a random order."""
    changes = {
        "packing": packing,
        "max_length": 128,
        "model": "gpt2_dropout",
        "train_sampling_strategy": "random",
        "optim": "adamw_torch",
        "learning_rate": 1e-3,
        "per_device_train_batch_size": 2,
        "num_train_epochs": 2,
        "save_strategy": "steps",
        "save_steps": 1,
    }
    whole = sgd_run(tmp_path, PackedSFTTrainer, **changes)
    steps = whole.state.global_step
    middle = steps // 2 + 1
    assert middle < steps
    resumed = trainer_for(
        tmp_path / "again",
        tiny_dataset("prompt_completion", 22),
        **{**changes, "model": tiny_model("gpt2_dropout", seed=5), "save_strategy": "no"},
    )
    resumed.train(resume_from_checkpoint=str(tmp_path / f"checkpoint-{middle}"))
    assert resumed.state.global_step == steps
    for name, value in parameters(whole).items():
        torch.testing.assert_close(resumed.model.get_parameter(name), value, atol=0, rtol=0)


def test_train_can_be_called_twice(tmp_path):
    trainer = trainer_for(tmp_path, packing=True)
    train_moves_all(trainer)
    train_moves_all(trainer)
