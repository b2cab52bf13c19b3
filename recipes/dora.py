"""DoRA: LoRA for the directions of the weights, and their lengths trained apart.

    accelerate launch recipes/dora.py --config recipes/dora_8b.yaml
    accelerate launch recipes/dora.py --config recipes/lora_0.1b.yaml     # a CPU will do

Its paper (https://huggingface.co/papers/2402.09353) reports better results than LoRA's at half the
rank. It is slower: the lengths of all weights are computed anew in every forward. So it is merged
for use (`--merged_dir`), into a model that loads and runs as any other.

Expected output of the second command with `--merged_dir outputs/merged` (a model of 39,072 random
weights, ten seconds on a CPU; SmolLM2 takes minutes a step):

    ──────────────────────────────────── trl_packing ─────────────────────────────────────
    documents    50 · 22,647 tokens · 12,276 trained (54%)
    packed into  23 bins of 1,024 tokens · 96.16% filled
    an epoch     23 micro-batches · 23 optimizer steps · 2.2 documents, 534 trained tokens a step …
    padded       50 steps of 1 document; documents_per_step=1 keeps them
    …
    loss         the mean over the trained tokens of a step, all alike
    attention    document-wise SDPA (cpu, float32)
    ──────────────────────────────────────────────────────────────────────────────────────
    {'loss': '6.405', 'grad_norm': '2.115', … 'epoch': '0.08696'}
    …
    Trained 16,896 of 55,968 parameters (30.2%).
    The adapter is in outputs/dora.
    Base model and adapter, merged, are in outputs/merged.
"""

from dataclasses import dataclass

import torch
from peft import AutoPeftModelForCausalLM, LoraConfig
from transformers.hf_argparser import HfArg
from trl import TrlParser

from trl_packing import PackedSFTConfig, PackedSFTTrainer, load_rows


@dataclass
class Arguments:
    """What to train, and on what."""

    model_name_or_path: str = HfArg(help="A hub id, or a folder with a model.")
    dataset_name: str = HfArg(help="A hub id, a .json, .jsonl or .parquet file, or a folder.")
    dataset_config: str | None = HfArg(default=None, help="Of a data set that has several.")
    dataset_train_split: str = HfArg(default="train", help="Or a part of it: 'train[:1000]'.")
    lora_r: int = HfArg(default=8, help="Rank; half of what LoRA needs is often enough.")
    lora_alpha: int = HfArg(default=16, help="What is learnt counts lora_alpha / lora_r.")
    merged_dir: str | None = HfArg(default=None, help="Save base model and adapter as one here.")


def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train an adapter, save it, maybe merged too, and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="dora.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/dora")
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
        peft_config=LoraConfig(
            use_dora=True,
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            target_modules="all-linear",  # every matrix but the embeddings and the head
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
        # From what was saved, on the CPU: the model in memory may be spread over devices.
        model = AutoPeftModelForCausalLM.from_pretrained(training_args.output_dir)
        model.merge_and_unload().save_pretrained(arguments.merged_dir)
        trainer.processing_class.save_pretrained(arguments.merged_dir)
        print(f"Base model and adapter, merged, are in {arguments.merged_dir}.")
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
