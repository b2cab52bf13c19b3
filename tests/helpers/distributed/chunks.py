"""A run with documents in chunks, on any number of gloo ranks."""

import torch
from harness import make_trainer

from helpers.drop_in import trained_losses
from helpers.tiny import documents_of_lengths

ROWS = documents_of_lengths([30, 3, 4, 5, 31, 6, 7, 8], prompt=2, seed=0)
SETTINGS = {"packing": False, "per_device_train_batch_size": 2, "max_length": 32, "optim": "sgd"}
SETTINGS |= {"logging_steps": 1, "learning_rate": 0.05}


def train(settings: dict) -> tuple:
    """Return the losses and the parameters of a run."""
    torch.manual_seed(0)
    trainer = make_trainer(settings["output_dir"], ROWS, "llama", **SETTINGS | settings)
    losses = trained_losses(trainer)
    return losses, {name: p.detach() for name, p in trainer.model.named_parameters()}
