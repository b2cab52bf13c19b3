"""Plain Trainer on packed rows."""

from helpers.plain_runs import packed, packing_of, trainer_of
from helpers.tiny import tiny_model
from trl_packing import enable_packing


def runs(folder: str) -> dict[str, dict]:
    """Train in float32 and in bfloat16; return losses, weights and the checks that were made."""
    result = {}
    for name, options in {"fp32": {}, "bf16": {"bf16": True}}.items():
        model, dataset = tiny_model("gpt_oss"), packed(rows_multiple_of=2)
        enable_packing(model)
        packing = packing_of(model)  # before accelerate wraps the forward
        trainer = trainer_of(
            model,
            dataset,
            folder,
            evaluated=packed(rows_multiple_of=2),
            per_device_train_batch_size=1,
            gradient_accumulation_steps=1,
            max_steps=-1,
            num_train_epochs=1,
            learning_rate=0.05,
            optim="sgd",
            **options,
        )
        trainer.train()
        result[name] = {
            "losses": [entry["loss"] for entry in trainer.state.log_history if "loss" in entry],
            "state": {n: value.clone() for n, value in model.state_dict().items()},
            "eval_loss": trainer.evaluate()["eval_loss"],
            "checked": sorted(map(str, packing.guard.passed)),
        }
    return result
