"""Run a recipe under FSDP2 on CPUs, where accelerate alone would silently take DDP.

torchrun --nproc_per_node 2 -m helpers.distributed.recipe full --config FILE
"""

import importlib
import sys

from helpers.distributed.engines import fsdp_on_cpu, is_sharded
from helpers.distributed.train import end_rank


def main(recipe: str, *arguments: str) -> None:
    fsdp_on_cpu()
    trainer = importlib.import_module(f"trl_packing.recipes.{recipe}").main(list(arguments))
    assert is_sharded("fsdp2", trainer)
    if trainer.is_world_process_zero():
        print("Every parameter is sharded.")


if __name__ == "__main__":
    main(*sys.argv[1:])
    end_rank()
