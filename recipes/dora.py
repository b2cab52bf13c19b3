# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing[peft] @ git+https://github.com/OWNER/trl_packing"]
# ///
"""DoRA: LoRA for the directions of the weights; their lengths are trained separately.

    accelerate launch recipes/dora.py --config recipes/dora_8b.yaml
    accelerate launch recipes/dora.py --config recipes/lora_0.1b.yaml     # on a CPU

The paper (https://huggingface.co/papers/2402.09353) reports better results than LoRA's at half the
rank. DoRA is slower, because every forward recomputes the lengths of all weights. For inference,
merge the adapter (`--merged_dir`) into a model that loads and runs like any other.

Expected output of the second command with `--merged_dir outputs/merged --dataset_train_split
"train[:16]" --max_length 512 --max_steps 2 --logging_steps 1`, five minutes on a busy CPU core:

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
    {'loss': '1.374', 'grad_norm': '1.081', … 'epoch': '0.1429'}
    {'loss': '1.658', 'grad_norm': '1.269', … 'epoch': '0.2857'}
    …
    Trained 5,040,000 of 139,555,008 parameters (3.6%).
    The adapter is in outputs/dora.
    Base model and adapter, merged, are in outputs/merged.
"""

from dataclasses import dataclass

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
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
    lora_r: int = HfArg(default=8, help="Rank; often half of LoRA's is enough.")
    lora_alpha: int = HfArg(default=16, help="The update is scaled by lora_alpha / lora_r.")
    merged_dir: str | None = HfArg(default=None, help="Folder for the merged model.")


@exits_in_one_line
def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train an adapter, save it (and the merged model), and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="dora.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/dora")
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
            use_dora=True,
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            target_modules="all-linear",  # every matrix except the embeddings and the head
            task_type="CAUSAL_LM",
        ),
    )
    trained, total = trainer.model.get_nb_trainable_parameters()
    trainer.train(training_args.resume_from_checkpoint)
    trainer.save_model()
    say = trainer.accelerator.print
    say(f"Trained {trained:,} of {total:,} parameters ({trained / total:.1%}).")
    say(f"The adapter is in {training_args.output_dir}.")
    if arguments.merged_dir and trainer.accelerator.is_main_process:
        # Merge from the saved files, on the CPU: the model in memory may be sharded.
        model = AutoPeftModelForCausalLM.from_pretrained(training_args.output_dir)
        model.merge_and_unload().save_pretrained(arguments.merged_dir)
        trainer.processing_class.save_pretrained(arguments.merged_dir)
        print(f"Base model and adapter, merged, are in {arguments.merged_dir}.")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
