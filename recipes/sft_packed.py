"""Packed, padding-free, completion-only fine-tuning: TRL's sft.py with `PackedSFTTrainer`.

The demo trains a small Llama, built here, to write packing lists, in a few minutes on a laptop:

    accelerate launch recipes/sft_packed.py

For your own run, name a model, a data set (a hub id, a .json, .jsonl or .parquet file, or a folder
of such files) and its columns. Every option of TRL's sft.py works (`--help`), also in a YAML file.

    accelerate launch recipes/sft_packed.py \\
        --model_name_or_path HuggingFaceTB/SmolLM2-135M-Instruct \\
        --dataset_name gsm8k_train.jsonl --prompt_column question --completion_column answer \\
        --test_split_size 0.02 --num_samples 5 --output_dir outputs/gsm8k

    accelerate launch recipes/sft_packed.py --config recipes/sft_gsm8k.yaml --use_peft
    torchrun --nproc_per_node 2 recipes/sft_packed.py

recipe_data.py lists the columns that can be named, and how, and the `datasets:` of a YAML file,
which trains several data sets, each with its own columns and share (sft_mixture.yaml). The same
script trains all weights (full_*.yaml) and adapters (lora_*.yaml, dora_*.yaml, qlora_*.yaml); it
saves the adapter alone, with the tokenizer and its chat template. docs/after-training.md says how
to merge it into the base model, and how to chat with either.
"""

import warnings
from dataclasses import dataclass
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from trl_packing.recipes import FOLDER
from trl_packing.recipes.recipe_data import DataArguments, load_data
from trl_packing.recipes.recipe_run import answers, finish, prompt_length
from trl_packing.recipes.recipe_run import parse as parse_run

import numpy as np
from accelerate import PartialState
from datasets import disable_progress_bars
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    ProgressCallback,
    set_seed,
)
from transformers.hf_argparser import HfArg
from trl import ModelConfig, get_peft_config, get_quantization_config

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.attention.model_facts import check_model
from trl_packing.data.printable import escape_hidden
from trl_packing.tools.options import exits_in_one_line

# TRL 1.16 sets options that transformers 5.23 has renamed. Users cannot change that.
warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")

DEMO_FILES = FOLDER / "demo"  # written by make_demo_data.py
DEMO_MODEL = {
    "hidden_size": 128,
    "intermediate_size": 320,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "tie_word_embeddings": True,
    # These two decide how soon a model this small learns to copy: the size of the initial weights,
    # which must suit 128 dimensions, and rotary wavelengths up to the longest documents.
    "initializer_range": 0.05,
    "rope_parameters": {"rope_type": "default", "rope_theta": 100.0},
}
# Defaults of the demo only. Other runs have TRL's defaults.
DEMO_ARGUMENTS = {
    "dataset_name": str(DEMO_FILES / "data"),
    "output_dir": "outputs/demo",
    "num_samples": 200,
    "max_length": 1024,
    "per_device_train_batch_size": 1,
    "per_device_eval_batch_size": 100,
    "num_train_epochs": 8,
    "learning_rate": 1.5e-3,
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": "none",
}
NUM_SHOWN = 5  # answers that are printed
FEW_STEPS = 50  # after so few, answers are seldom other ones
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")


@dataclass
class RecipeArguments(DataArguments):
    """The data, and the number of held-out prompts to answer before and after training."""

    num_samples: int = HfArg(default=0, help="Held-out prompts answered before and after training.")


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, save, and return the metrics. Raises ValueError before anything is written."""
    data_args, training_args, model_args = parse(argv)
    say = PartialState().print
    if model_args.model_name_or_path is None:
        say("The demo: a small Llama learns to turn orders into packing lists, in a few minutes.")
        disable_progress_bars()  # preparation takes only seconds
    model, tokenizer = load_model(training_args, model_args)
    number = data_args.num_samples
    needs_test = training_args.eval_strategy != "no" or number > 0
    train, test = load_data(data_args, training_args, tokenizer, needs_test=needs_test)
    if number and isinstance(test, dict):
        raise ValueError("--num_samples needs held-out rows of one form")
    trainer = PackedSFTTrainer(
        model=model,
        args=training_args,
        train_dataset=train,
        eval_dataset=test,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if model_args.model_name_or_path is None and trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ShortLines)
    asked = list(trainer.eval_dataset.take(number)) if number else []
    longest = max((len(each["input_ids"]) - prompt_length(each) for each in asked), default=0)
    if 0 < training_args.max_steps < training_args.logging_steps:
        training_args.logging_steps = 1  # a short run would log no loss
    given = {"before": answers(trainer, asked, longest + 1)}
    metrics = trainer.train(training_args.resume_from_checkpoint).metrics
    given["after"] = answers(trainer, asked, longest + 1)
    if test is not None:
        metrics |= trainer.evaluate()
    if asked:
        metrics |= compare(trainer, asked, given)
    sum_up(trainer)
    trainer.save_metrics("all", metrics, combined=False)
    if hasattr(trainer.model, "get_nb_trainable_parameters"):
        trained, total = trainer.model.get_nb_trainable_parameters()
        say(f"Trained {trained:,} of {total:,} parameters ({trained / total:.1%}).")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data_args.dataset_name)
    finish(trainer, "Model and metrics are")
    return metrics


def parse(argv: list[str] | None = None, kind: Any = RecipeArguments, **options: Any) -> Any:
    """Return TRL's three groups of arguments; the demo's if neither model nor data set is given."""
    options = {"demo": DEMO_ARGUMENTS, **options}
    data_args, training_args, model_args = parse_run(argv, kind, ModelConfig, **options)
    if model_args.model_name_or_path is not None:
        training_args.model_init_kwargs = {
            "revision": model_args.model_revision,
            "attn_implementation": model_args.attn_implementation,
            "dtype": model_args.dtype,
            **(training_args.model_init_kwargs or {}),
        }
    return data_args, training_args, model_args


def load_model(training_args: PackedSFTConfig, model_args: ModelConfig) -> tuple[Any, Any]:
    """Return the model (the demo's, or a name that the trainer loads) and its tokenizer."""
    name = model_args.model_name_or_path
    if name is None:
        tokenizer = AutoTokenizer.from_pretrained(DEMO_FILES / "tokenizer")
        special = {key: getattr(tokenizer, key) for key in SPECIAL_TOKENS}
        set_seed(training_args.seed)
        config = LlamaConfig(vocab_size=len(tokenizer), **special, **DEMO_MODEL)
        attention = model_args.attn_implementation
        return AutoModelForCausalLM.from_config(config, attn_implementation=attention), tokenizer
    check_model(name, training_args)
    options = {"revision": model_args.model_revision}
    options["trust_remote_code"] = training_args.trust_remote_code
    return name, AutoTokenizer.from_pretrained(name, **options)


class ShortLines(ProgressCallback):
    """Prints one short line for each log of the demo, where transformers prints all numbers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line above the progress bar."""
        if self.training_bar is not None and "loss" in logs:
            step = f"step {state.global_step:>5,} · epoch {logs['epoch']:.2f}"
            speed = f"{logs['tokens_per_second']:,.0f} tokens/s"
            self.training_bar.write(f"{step} · loss {logs['loss']:.3f} · {speed}")


def compare(
    trainer: PackedSFTTrainer, documents: list[Any], given: dict[str, list[str]]
) -> dict[str, float]:
    """Print some answers beside the expected ones, and return the share of exact answers."""
    say, decode = trainer.accelerator.print, trainer.processing_class.decode
    width = get_terminal_size().columns
    right = dict.fromkeys(given, 0)
    for i, document in enumerate(documents):
        parts = np.split(np.array(document["input_ids"]), [prompt_length(document)])
        prompt, expected = (decode(ids, skip_special_tokens=True).strip() for ids in parts)
        lines = {"": "", "prompt": prompt, "expected": expected}
        for when, answered in given.items():
            is_right = answered[i].strip() == expected
            right[when] += is_right
            lines[f"{when} {'✓' if is_right else '✗'}"] = answered[i].strip()
        for label, content in lines.items() if i < NUM_SHOWN else ():
            shown = escape_hidden(content).replace("\n", " ⏎ ")
            indents: Any = {"initial_indent": f"{label:<10}", "subsequent_indent": " " * 10}
            say(fill(shown, width, **indents, max_lines=2, placeholder=" …"))
    exact = {f"exact_match_{when}": number / len(documents) for when, number in right.items()}
    shares = ", ".join(f"{exact[f'exact_match_{when}']:.1%} {when}" for when in given)
    say(f"\nExact match on {len(documents)} held-out prompts: {shares}")
    return exact


def sum_up(trainer: PackedSFTTrainer) -> None:
    """Print the first and the last loss, and that few steps change no answer."""
    say, state = trainer.accelerator.print, trainer.state
    logged = [entry for entry in state.log_history if "loss" in entry]
    if logged:
        ends = {entry["step"]: entry["loss"] for entry in (logged[0], logged[-1])}
        losses = ", ".join(f"{loss:.3f} at step {step:,}" for step, loss in ends.items())
        say(f"Training loss: {losses}.")
    if state.global_step < FEW_STEPS:
        steps = f"{state.global_step} optimizer steps"
        if hasattr(trainer.train_dataset, "__len__"):  # no stream
            steps += f" (an epoch has {state.global_step / state.epoch:,.0f})"
        say(f"{steps} are too few to expect other answers.")


if __name__ == "__main__":
    exits_in_one_line(main)()
