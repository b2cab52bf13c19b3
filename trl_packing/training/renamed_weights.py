"""Loads weights of a checkpoint whose names in the file differ from those in the model.

    model        model.language_model.layers.0…      model.visual.blocks.0…
    file         model.layers.0…                     visual.blocks.0…

transformers saves many vision-language models under older names. `from_pretrained` translates them,
but `Trainer` does not when it resumes or loads the best model (5.23): it warns of missing names and
trains on with the weights from before.
"""

import json
from pathlib import Path
from typing import Any

import torch
from safetensors import safe_open
from transformers import PreTrainedModel
from transformers.utils import SAFE_WEIGHTS_INDEX_NAME, SAFE_WEIGHTS_NAME

from trl_packing.attention.model_facts import unwrap_model


def are_renamed(checkpoint: Path, model: Any) -> bool:
    """Return whether weights of `model` have other names in the files of `checkpoint`."""
    if not isinstance(model, PreTrainedModel):
        return False
    index, single = checkpoint / SAFE_WEIGHTS_INDEX_NAME, checkpoint / SAFE_WEIGHTS_NAME
    if index.is_file():
        saved = set(json.loads(index.read_text())["weight_map"])
    elif single.is_file():
        with safe_open(single, framework="pt") as file:
            saved = set(file.keys())
    else:
        return False
    return not saved <= model.state_dict().keys()


@torch.no_grad()
def load_renamed(trainer: Any, checkpoint: str | None, model: Any = None) -> bool:
    """Load the weights of `checkpoint` if their names differ, and return whether they do.

    Sharded engines load their own files.

    Args:
        trainer: of the run.
        checkpoint: a folder; None if there is no best model.
        model: gets the weights; None for the trainer's.
    """
    model = trainer.model if model is None else model
    is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
    if checkpoint is None or is_sharded or not are_renamed(Path(checkpoint), model):
        return False
    inner: Any = unwrap_model(model)
    loaded = type(inner).from_pretrained(checkpoint, dtype=inner.dtype)
    inner.load_state_dict(loaded.state_dict())
    return True
