"""A run on documents with images, on any number of gloo ranks; the result of each rank is saved.

    python -m helpers.distributed.images FAMILY FOLDER

The rows without images come first, so that one rank has a micro-batch without images beside one of
the other rank with images.
"""

import os
import sys
from pathlib import Path

import torch

from helpers.one_step import ONE_STEP
from helpers.vision import image_dataset, tiny_processor, tiny_vision_model
from trl_packing import PackedSFTConfig, PackedSFTTrainer

SGD = {"optim": "sgd", "learning_rate": 0.05, "max_steps": 3, "lr_scheduler_type": "constant"}


def train(family: str, folder: Path) -> dict:
    """Train three steps and return losses and parameters."""
    ranks = int(os.environ.get("WORLD_SIZE", 1))
    processor = tiny_processor(family)
    dataset = image_dataset(12)
    order = sorted(range(len(dataset)), key=lambda n: bool(dataset[n]["images"]))
    options = {
        "per_device_train_batch_size": 1,
        "gradient_accumulation_steps": 2 // ranks,
        "packing": False,
        "train_sampling_strategy": "sequential",
        "output_dir": str(folder),
    }
    trainer = PackedSFTTrainer(
        model=tiny_vision_model(family, processor),
        args=PackedSFTConfig(**ONE_STEP | SGD | {"max_length": 320} | options),
        train_dataset=dataset.select(order),
        eval_dataset=image_dataset(5),
        processing_class=processor,
    )
    trainer.train()
    return {
        "losses": [row["loss"] for row in trainer.state.log_history if "loss" in row],
        "eval_loss": trainer.evaluate()["eval_loss"],
        "parameters": {n: p.detach().clone() for n, p in trainer.model.named_parameters()},
    }


if __name__ == "__main__":
    family, folder = sys.argv[1], Path(sys.argv[2])
    torch.set_num_threads(1)
    result = train(family, folder / "run")
    torch.save(result, folder / f"{os.environ.get('RANK', 0)}.pt")
