# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing[qlora] @ git+https://github.com/OWNER/trl_packing"]
# ///
"""QLoRA: LoRA on a model with weights in 4 bits, so that a 70B fits on an 80 GB GPU.

    pip install "trl-packing[qlora]"
    accelerate launch recipes/qlora.py --config recipes/qlora_70b.yaml
    accelerate launch recipes/qlora.py --config recipes/lora_0.1b.yaml    # a quick try

QLoRA needs a CUDA GPU. `--use_cpu true` trains in 4 bits on the CPU, which is slow: use it only to
try the recipe. Only the adapter is saved. Merge it into the 16-bit model (lora.py shows how), since
4 bits are too coarse for the merged weights.

Expected output of the second command with `--use_cpu true --dataset_train_split "train[:16]"
--max_length 512 --max_steps 4`, five minutes on a busy CPU core:

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
    {'loss': '1.746', 'grad_norm': '1.336', … 'epoch': '0.2857'}
    {'loss': '1.533', 'grad_norm': '0.8164', … 'epoch': '0.5714'}
    …
    Trained 4,884,480 parameters beside 134,515,008 in 4 bits: 0.18 GB.
    The adapter is in outputs/qlora.
"""

import sys
from dataclasses import dataclass
from importlib.util import find_spec

import torch
from peft import LoraConfig
from transformers import BitsAndBytesConfig
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
    parser = TrlParser(
        (Arguments, PackedSFTConfig), usage="qlora.py --config FILE [--OPTION VALUE]"
    )
    parser.set_defaults(output_dir="outputs/qlora")
    if not torch.cuda.is_available():
        parser.set_defaults(bf16=False)
    arguments, training_args = parser.parse_args_and_config(argv)
    if not torch.cuda.is_available() and not training_args.use_cpu:
        sys.exit(
            "qlora.py: training in 4 bits needs a CUDA GPU, and there is none here; use lora.py, "
            "or try it on the CPU with --use_cpu true"
        )
    if find_spec("bitsandbytes") is None:
        sys.exit("qlora.py: bitsandbytes is not installed: pip install 'trl-packing[qlora]'")

    trainer = PackedSFTTrainer(
        model=arguments.model_name_or_path,
        args=training_args,
        train_dataset=load_rows(
            arguments.dataset_name,
            arguments.dataset_train_split,
            config=arguments.dataset_config,
        ),
        quantization_config=BitsAndBytesConfig(
            load_in_4bit=True,
            bnb_4bit_quant_type="nf4",
            bnb_4bit_use_double_quant=True,  # 4.1 bits a weight instead of 4.5
            bnb_4bit_compute_dtype=torch.bfloat16 if training_args.bf16 else torch.float32,
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
    size = trainer.model.get_memory_footprint() / 1e9
    trainer.train(training_args.resume_from_checkpoint)
    trainer.save_model()
    trainer.accelerator.print(
        f"Trained {trained:,} parameters beside {total - trained:,} in 4 bits: {size:.2f} GB.\n"
        f"The adapter is in {training_args.output_dir}."
    )
    trainer.accelerator.end_training()
    return trainer


if __name__ == "__main__":
    main()
