"""LoRA: the model stays as it is, and two small matrices beside each of its own are trained.

    accelerate launch recipes/lora.py --config recipes/lora_8b.yaml
    accelerate launch recipes/lora.py --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
        --dataset_name openai/gsm8k --dataset_config main --dataset_train_split "train[:200]" \\
        --prompt_template qa --query_field question --response_field answer --learning_rate 2e-4

What is saved is the adapter. To use it, and to make one model of it and the base model:

    model = AutoPeftModelForCausalLM.from_pretrained("outputs/lora")
    model.merge_and_unload().save_pretrained("outputs/merged")

Expected output (`--config recipes/lora_0.1b.yaml`, one CPU core):

    ────────────────────────────── trl_packing ──────────────────────────────
    documents    50 · 9,936 tokens · 6,430 trained (65%)
    packed into  10 bins of 1,024 tokens · 97.03% filled
    an epoch     10 micro-batches · 10 optimizer steps · 5.0 documents, 643 trained tokens a step …
    padded       50 steps of 1 document; documents_per_step=1 keeps them
    …
    attention    document-wise SDPA (cpu, float32)
    ─────────────────────────────────────────────────────────────────────────
    {'loss': '1.4', …
    …
    {'loss': '1.2', …
    Trained 4,884,480 of 139,399,488 parameters (3.5%).
    The adapter is in outputs/lora.
"""

from dataclasses import dataclass

import torch
from peft import LoraConfig
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
    lora_r: int = HfArg(default=16, help="Rank: the inner size of the two matrices.")
    lora_alpha: int = HfArg(default=32, help="Their product counts lora_alpha / lora_r.")
    lora_dropout: float = HfArg(default=0.0, help="Dropout before the two matrices.")


def main(argv: list[str] | None = None) -> PackedSFTTrainer:
    """Train an adapter, save it, and return the trainer."""
    parser = TrlParser((Arguments, PackedSFTConfig), usage="lora.py --config FILE [--OPTION VALUE]")
    parser.set_defaults(output_dir="outputs/lora")
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
            r=arguments.lora_r,
            lora_alpha=arguments.lora_alpha,
            lora_dropout=arguments.lora_dropout,
            target_modules="all-linear",  # every matrix but the embeddings and the head
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
