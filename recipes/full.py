# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing @ git+https://github.com/OWNER/trl_packing"]
# ///
"""Full fine-tuning: train every weight, of a 0.1B model on a laptop or of a 70B on four nodes.

The code is the same for all sizes. Only two files differ: the YAML file sets the model, the data
and the training options; the accelerate configuration sets the number of devices and the sharding.

    accelerate launch recipes/full.py --config recipes/full_0.1b.yaml
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml \\
        recipes/full.py --config recipes/full_8b_fsdp2.yaml
    # On each of four nodes; MACHINE_RANK is the number of the node, MASTER the address of node 0.
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml \\
        --num_machines 4 --num_processes 32 --machine_rank $MACHINE_RANK \\
        --main_process_ip $MASTER --main_process_port 29500 \\
        recipes/full.py --config recipes/full_70b_fsdp2_multinode.yaml

Each YAML file starts with its memory arithmetic. Options of `PackedSFTConfig` on the command line
override the file.

Expected output of the first command with `--dataset_train_split "train[:16]" --max_length 512
--max_steps 3 --logging_steps 1`, two minutes on a busy CPU core:

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    16 · 3,222 tokens · 2,116 trained (66%)
    packed into  7 bins of 512 tokens · 89.90% filled
    an epoch     7 optimizer steps · 7 micro-batches · up to 512 tokens a micro-batch
    a step       2.3 documents · 302 trained tokens · 1 rank × 1 accumulated × 1 bin
    if padded    16 steps an epoch, 1 document each (documents_per_step=1 keeps that)
                 warning: 7 optimizer steps an epoch; …
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by 5e-4, rounding allows 2e-3, a leak would be 9.5
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '1.374', 'grad_norm': '8.15', 'learning_rate': '0', … 'epoch': '0.1429'}
    {'loss': '1.725', 'grad_norm': '10.24', 'learning_rate': '1e-05', … 'epoch': '0.2857'}
    …
    The model is in outputs/full_0.1b.
"""

from dataclasses import dataclass

import torch
from transformers.hf_argparser import HfArg
from trl import TrlParser

from trl_packing import PackedSFTConfig, PackedSFTTrainer, load_rows
from trl_packing.tools.command.exit_messages import exits_in_one_line


@dataclass
class Arguments:
    """The model and the data."""

    model_name_or_path: str = HfArg(help="Hub id, or a folder with a model.")
    dataset_name: str = HfArg(help="Hub id, a .json, .jsonl or .parquet file, or a folder.")
    dataset_config: str | None = HfArg(default=None, help="Subset, if the data set has several.")
    dataset_train_split: str = HfArg(default="train", help="Split, or part of it: 'train[:1000]'.")


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train all weights, save the model, and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="full.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/full")
    if not torch.accelerator.is_available():  # TRL's defaults assume a GPU
        parser.set_defaults(use_cpu=True, bf16=False, dataloader_pin_memory=False)
    arguments, training_args = parser.parse_args_and_config(argv)

    trainer = PackedSFTTrainer(
        model=arguments.model_name_or_path,
        args=training_args,
        train_dataset=load_rows(
            arguments.dataset_name,
            arguments.dataset_train_split,
            config=arguments.dataset_config,
        ),
    )
    trainer.train(training_args.resume_from_checkpoint)
    trainer.save_model()  # gathers the weights of a sharded model
    trainer.accelerator.print(f"The model is in {training_args.output_dir}.")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
