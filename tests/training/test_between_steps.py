"""What a step needs of a model is not saved with it, nor there when it is asked between steps."""

import json
from pathlib import Path

import pytest
import torch
from helpers.drop_in import parameters, tokenizer_for, trainer_for
from helpers.tiny import tiny_dataset
from safetensors.torch import load_file
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packing import PackedSFTTrainer

ROWS = "prompt_completion"
OF_EXPERTS = {"output_router_logits": False}


def settings_of_experts(config) -> dict:
    return {name: config[name] for name in OF_EXPERTS}


class Asks(TrainerCallback):
    """Generates from a padded batch after each step."""

    def __init__(self):
        self.tokenizer, self.answers = tokenizer_for(ROWS), []

    def on_step_end(self, args, state, control, model=None, **kwargs):
        texts = ["hello there", "hi"]
        batch = self.tokenizer(texts, padding=True, padding_side="left", return_tensors="pt")
        self.answers.append(model.generate(**batch, max_new_tokens=2))


@pytest.mark.parametrize("path", ["packed", "trl"])
def test_a_mixture_of_experts_keeps_its_settings_and_answers(path, tmp_path):
    collator = {"data_collator": lambda rows: stacked(rows)} if path == "trl" else {}

    def run(cls, folder, **arguments):
        changes = {"model": "qwen3_moe", "max_steps": 2, "router_aux_loss_coef": 0.5}
        changes |= {"save_strategy": "steps", "save_steps": 1}
        trainer = trainer_for(folder, ROWS, cls=cls, arguments=collator | arguments, **changes)
        trainer.train()
        return trainer

    asks = Asks()
    trainer = run(PackedSFTTrainer, tmp_path / "ours", callbacks=[asks])
    trainer.save_model(tmp_path / "saved")
    assert len(asks.answers) == 2
    assert settings_of_experts(trainer.model.config.to_dict()) == OF_EXPERTS
    for folder in (tmp_path / "saved", tmp_path / "ours" / "checkpoint-1"):
        saved = json.loads((folder / "config.json").read_text())
        assert settings_of_experts(saved) == OF_EXPERTS
    assert all(entry["aux_loss"] > 0 for entry in trainer.state.log_history[:2])
    with pytest.raises(RuntimeError, match="size of tensor"):  # the control
        run(SFTTrainer, tmp_path / "trl", callbacks=[Asks()])


def stacked(rows):
    """Collate documents of any length as a user's collator would."""
    longest = max(len(row["input_ids"]) for row in rows)
    made = {"input_ids": 0, "labels": -100, "attention_mask": 0}
    lists = {name: [row.get(name, [1] * len(row["input_ids"])) for row in rows] for name in made}
    return {
        name: torch.tensor([x + [made[name]] * (longest - len(x)) for x in values])
        for name, values in lists.items()
    }


class Averages(torch.optim.Optimizer):
    """As the optimizers of schedulefree 1.4.1: `train` sets other weights than `eval`."""

    def __init__(self, parameters, lr=0.1):
        super().__init__(parameters, {"lr": lr, "train_mode": False, "steps": 0})

    def _switch(self, train_mode: bool) -> None:
        for group in self.param_groups:
            if group["train_mode"] != train_mode:
                group["train_mode"] = train_mode
                for p in group["params"]:
                    if state := self.state[p]:
                        end = torch.lerp(state["mean"], state["last"], 0.1)
                        p.data.copy_(end if train_mode else state["mean"])

    def train(self) -> None:
        self._switch(True)

    def eval(self) -> None:
        self._switch(False)

    @torch.no_grad()
    def step(self, closure=None) -> None:
        for group in self.param_groups:
            assert group["train_mode"]
            group["steps"] += 1
            for p in group["params"]:
                state = self.state[p]
                if not state:
                    state |= {"mean": p.clone(), "last": p.clone()}
                state["last"] -= group["lr"] * p.grad
                state["mean"].lerp_(state["last"], 1 / group["steps"])
                p.copy_(torch.lerp(state["mean"], state["last"], 0.1))


def run_averages(cls, folder, resume=None, **changes):
    changes = {"max_steps": 5, "save_strategy": "steps", "save_steps": 2} | changes
    arguments = {"optimizer_cls_and_kwargs": (Averages, {"lr": 0.5})}
    arguments |= {"eval_dataset": tiny_dataset(ROWS)}
    trainer = trainer_for(folder, ROWS, cls=cls, arguments=arguments, **changes)
    trainer.train(resume)
    trainer.save_model(folder / "saved")
    return trainer


def assert_saves_averages(trainer, steps: int | None = None) -> None:
    """Assert that the files hold the averages that the optimizer of a checkpoint has."""
    folder = Path(trainer.args.output_dir)
    saved = folder / ("saved" if steps is None else f"checkpoint-{steps}")
    state = trainer.optimizer.state_dict()
    if steps is not None:
        state = torch.load(saved / "optimizer.pt")
    norms = sorted(float(values["mean"].norm()) for values in state["state"].values())
    found = load_file(saved / "model.safetensors").values()
    assert sorted(float(value.norm()) for value in found) == norms


def test_a_schedule_free_optimizer_saves_the_weights_to_use_and_resumes_to_the_bit(tmp_path):
    trainer = run_averages(PackedSFTTrainer, tmp_path / "ours")
    for steps in (2, 4, None):
        assert_saves_averages(trainer, steps)
    checkpoint = tmp_path / "ours" / "checkpoint-2"
    resumed = run_averages(PackedSFTTrainer, tmp_path / "resumed", str(checkpoint))
    assert all(map(torch.equal, parameters(resumed).values(), parameters(trainer).values()))
    stock = run_averages(SFTTrainer, tmp_path / "trl")
    for steps in (2, None):
        with pytest.raises(AssertionError):  # the control
            assert_saves_averages(stock, steps)


def test_the_best_model_of_a_schedule_free_optimizer_is_saved_as_it_was_evaluated(tmp_path):
    best = {"eval_strategy": "steps", "eval_steps": 2, "load_best_model_at_end": True}
    trainer = run_averages(PackedSFTTrainer, tmp_path, max_steps=5, **best)
    saved = Path(trainer.state.best_model_checkpoint)
    expected = load_file(saved / "model.safetensors")
    found = load_file(tmp_path / "saved" / "model.safetensors")
    assert all(torch.equal(found[name], expected[name]) for name in expected)
    assert trainer.evaluate()["eval_loss"] == pytest.approx(trainer.state.best_metric, rel=1e-5)
