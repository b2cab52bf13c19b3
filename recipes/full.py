"""Full fine-tuning: every weight is trained, of a 0.1B on a laptop or of a 70B on four nodes.

The code is the same for all sizes. What differs is the YAML file, which says what is trained, and
the accelerate configuration, which says on how many devices and how the model is spread over them:

    accelerate launch recipes/full.py --config recipes/full_0.1b.yaml
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml \\
        recipes/full.py --config recipes/full_8b_fsdp2.yaml
    # On each of four nodes; MACHINE_RANK is its number, MASTER the address of node 0.
    accelerate launch --config_file recipes/accelerate/fsdp2.yaml \\
        --num_machines 4 --num_processes 32 --machine_rank $MACHINE_RANK \\
        --main_process_ip $MASTER --main_process_port 29500 \\
        recipes/full.py --config recipes/full_70b_fsdp2_multinode.yaml

Each YAML file begins with its memory arithmetic. Every option of `PackedSFTConfig` can be given on
the command line too, and wins over the file.

Expected output of the first command with `--dataset_train_split "train[:16]" --max_length 512
--max_steps 3 --logging_steps 1`, two minutes on a busy CPU core:

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    16 · 3,222 tokens · 2,116 trained (66%)
    packed into  7 bins of 512 tokens · 89.90% filled
    an epoch     7 micro-batches · 7 optimizer steps · 2.3 documents, 302 trained tokens a step …
    padded       16 steps of 1 document; documents_per_step=1 keeps them
                 warning: 7 optimizer steps an epoch; …
    loss         the mean over the trained tokens of a step, all alike
    attention    document-wise SDPA (cpu, float32)
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
from trl_packing.tools.exit_messages import exits_in_one_line


@dataclass
class Arguments:
    """What to train, and on what."""

    model_name_or_path: str = HfArg(help="A hub id, or a folder with a model.")
    dataset_name: str = HfArg(help="A hub id, a .json, .jsonl or .parquet file, or a folder.")
    dataset_config: str | None = HfArg(default=None, help="Of a data set that has several.")
    dataset_train_split: str = HfArg(default="train", help="Or a part of it: 'train[:1000]'.")


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train all weights, save the model, and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="full.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/full")
    if not torch.accelerator.is_available():  # TRL's defaults are made for a GPU
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
    trainer.save_model()  # also where it is sharded: the weights are gathered
    trainer.accelerator.print(f"The model is in {training_args.output_dir}.")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
