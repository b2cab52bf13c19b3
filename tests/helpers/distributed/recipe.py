"""Run a recipe under FSDP2 on CPUs, where accelerate alone would silently take DDP.

torchrun --nproc_per_node 2 -m helpers.distributed.recipe sft_packed --config FILE
"""

import importlib
import sys
from typing import Any
from unittest.mock import patch

from helpers.distributed.engines import fsdp_on_cpu, is_sharded
from helpers.distributed.train import end_rank
from trl_packing import PackedSFTTrainer


def main(recipe: str, *arguments: str) -> None:
    fsdp_on_cpu()
    trainers, train = [], PackedSFTTrainer.train

    def record(self: PackedSFTTrainer, *args: Any) -> Any:
        trainers.append(self)
        return train(self, *args)

    with patch.object(PackedSFTTrainer, "train", record):
        importlib.import_module(f"trl_packing.recipes.{recipe}").main(list(arguments))
    (trainer,) = trainers
    assert is_sharded("fsdp2", trainer)
    if trainer.is_world_process_zero():
        print("Every parameter is sharded.")


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_rank()
