"""Plain Trainer on packed rows, as a rank of `torchrun`; what each rank ends with is saved.

cd tests && torchrun --nproc_per_node 2 -m distributed.plain FOLDER
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1]))

from test_plain_trainer import packed, trainer_of
from tiny import tiny_model

from trl_packing import enable_packing


def main(folder: str) -> None:
    model, dataset = tiny_model("gpt_oss"), packed(rows_multiple_of=2)
    enable_packing(model)
    trainer = trainer_of(
        model,
        dataset,
        folder,
        per_device_train_batch_size=1,
        gradient_accumulation_steps=1,
        max_steps=-1,
        num_train_epochs=1,
        learning_rate=0.05,
        optim="sgd",
    )
    trainer.train()
    losses = [entry["loss"] for entry in trainer.state.log_history if "loss" in entry]
    torch.save(
        {"losses": losses, "state": model.state_dict()},
        Path(folder) / f"rank{trainer.args.process_index}.pt",
    )


if __name__ == "__main__":
    main(sys.argv[1])
