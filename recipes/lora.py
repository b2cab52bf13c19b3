# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing[peft] @ git+https://github.com/OWNER/trl_packing"]
# ///
"""LoRA: freeze the model, and train two small matrices beside each matrix of the model.

    accelerate launch recipes/lora.py --config recipes/lora_8b.yaml
    accelerate launch recipes/lora.py --config recipes/lora_0.1b.yaml     # on a CPU

Only the adapter is saved. To load it, and to merge it into the base model:

    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained("outputs/lora")
    model.merge_and_unload().save_pretrained("outputs/merged")

Expected output of the second command with `--dataset_train_split "train[:16]" --max_length 512`,
four minutes on a busy CPU core:

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    16 · 3,222 tokens · 2,116 trained (66%)
    packed into  7 bins of 512 tokens · 89.90% filled
    an epoch     7 optimizer steps · 7 micro-batches · up to 512 tokens a micro-batch
    a step       2.3 documents · 302 trained tokens · 1 rank × 1 accumulated × 1 bin
    if padded    16 steps an epoch, 1 document each (documents_per_step=1 keeps that)
                 warning: 7 optimizer steps an epoch; …
    loss         mean over the trained tokens of a step, each with weight 1
    attention    document-wise SDPA (cpu, float32)
    checked      isolated: differs by …
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '1.518', 'grad_norm': '1.209', … 'epoch': '0.2857'}
    {'loss': '1.32', 'grad_norm': '0.7769', … 'epoch': '0.5714'}
    …
    Trained 4,884,480 of 139,399,488 parameters (3.5%).
    The adapter is in outputs/lora.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig
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
    lora_r: int = HfArg(default=16, help="Rank: the inner size of the two matrices.")
    lora_alpha: int = HfArg(default=32, help="The update is scaled by lora_alpha / lora_r.")
    lora_dropout: float = HfArg(default=0.0, help="Dropout before the two matrices.")


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train an adapter, save it, and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="lora.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/lora")
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
        peft_config=LoraConfig(
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules="all-linear",  # every matrix except the embeddings and the head
            task_type="CAUSAL_LM",
        ),
    )
    trained, total = trainer.model.get_nb_trainable_parameters()
    trainer.train(training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.print(
        f"Trained {trained:,} of {total:,} parameters ({trained / total:.1%}).\n"
        f"The adapter is in {training_args.output_dir}."
    )
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
