"""`PackedSFTTrainer` with a loss of the user's that names the tokens only, as a rank of `torchrun`.

cd tests && torchrun --nproc_per_node 2 -m helpers.distributed.own_loss FOLDER
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[2]))

from helpers.model_calls import CALLS, trainer_with

# A step of all documents: two rows, one a rank. Unwrapped, DDP reduces no gradients.
OPTIONS = {"per_device_train_batch_size": 1, "per_device_eval_batch_size": 3, "max_length": 48}
NAMES = ("ids_only", "by_position", "mask_of_ones", "a_copy", "embedded", "without_the_last_token")


def main(folder: str) -> None:
    result = {}
    for call in CALLS:
        if call.__name__ in NAMES:
            trainer, kept = trainer_with(call, folder, **OPTIONS)
            trainer.train()
            result[call.__name__] = (trainer.state.log_history[0]["loss"], kept.gradients)
            rank = trainer.args.process_index
    torch.save(result, Path(folder) / f"rank{rank}.pt")


if __name__ == "__main__":
    from helpers.distributed.train import end_rank

    main(sys.argv[1])
    end_rank()
