"""Plain Trainer on packed rows."""

from helpers.plain_runs import packed, packing_of, trainer_of
from helpers.tiny import tiny_model
from trl_packing import enable_packing

EPOCH = {"max_steps": -1, "num_train_epochs": 1, "learning_rate": 0.05, "optim": "sgd"}


def train_an_epoch(folder: str, **options) -> dict:
    """Train rows one by one; return losses, weights and the checks that were made."""
    model = tiny_model("gpt_oss")
    dataset = packed(rows_multiple_of=2)
    enable_packing(model)
    packing = packing_of(model)  # before accelerate wraps the forward
    options = {**EPOCH, "per_device_train_batch_size": 1, **options}
    trainer = trainer_of(model, dataset, folder, evaluated=dataset, **options)
    trainer.train()
    return {
        "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
        "state": {n: value.clone() for n, value in model.state_dict().items()},
        "eval_loss": trainer.evaluate()["eval_loss"],
        "checked": sorted(map(str, packing.guard.passed)),
    }


def runs(folder: str) -> dict[str, dict]:
    """Train in float32 and in bfloat16."""
    return {
        name: train_an_epoch(folder, gradient_accumulation_steps=1, bf16=name == "bf16")
        for name in ("fp32", "bf16")
    }
