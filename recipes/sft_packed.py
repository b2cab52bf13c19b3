# /// script
# requires-python = ">=3.11"
# dependencies = ["trl-packing @ git+https://github.com/OWNER/trl_packing"]
# ///
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
saves the adapter alone. To merge it into the base model:

    from peft import AutoPeftModelForCausalLM
    model = AutoPeftModelForCausalLM.from_pretrained("outputs/lora")
    model.merge_and_unload().save_pretrained("outputs/merged")
"""

import warnings
from dataclasses import dataclass, field
from shutil import get_terminal_size
from textwrap import fill
from typing import Any

from trl_packing.recipes import FOLDER
from trl_packing.recipes.recipe_data import (
    DataArguments,
    LoadedData,
    load_documents,
)
from trl_packing.recipes.recipe_run import parse as parse_run

from accelerate import PartialState
from datasets import disable_progress_bars
from transformers import (
    AutoModelForCausalLM,
    AutoTokenizer,
    LlamaConfig,
    ProgressCallback,
    set_seed,
)
from trl import ModelConfig, get_peft_config, get_quantization_config
from trl.data_utils import get_dataset_column_names
from trl.models import unwrap_model_for_generation

from trl_packing import PackedSFTConfig, PackedSFTTrainer
from trl_packing.config import PackingOptions
from trl_packing.data.printable import escape_text
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
    "lr_scheduler_type": "linear",
    "warmup_steps": 100,
    "weight_decay": 0.1,
    "adam_beta2": 0.98,
    "bf16": False,
    "gradient_checkpointing": False,
    "logging_steps": 100,
    "save_strategy": "no",
    "report_to": "none",
}
SPECIAL_TOKENS = ("bos_token_id", "eos_token_id", "pad_token_id")
NUM_SHOWN = 5  # answers that are printed
SHOWN = {  # a metric and its place in a log line of the demo
    "epoch": "epoch {:.2f}",
    "loss": "loss {:.3f}",
    "tokens_per_second": "{:,.0f} tokens/s",
    "train_runtime": "{:,.0f} seconds",
    "eval_loss": "eval_loss {:.3f}",
}


@dataclass
class RecipeArguments(DataArguments):
    """The data, and the number of held-out prompts to answer before and after training."""

    num_samples: int = field(
        default=0,
        metadata={"help": "Held-out prompts to answer, greedily, before and after training."},
    )


def main(argv: list[str] | None = None) -> dict[str, float]:
    """Train, save, and return the metrics. Raises ValueError before anything is written."""
    data_args, training_args, model_args = parse(argv)
    say = PartialState().print
    is_demo = model_args.model_name_or_path is None
    if is_demo:
        say("The demo: a small Llama learns to turn orders into packing lists, in a few minutes.")
        disable_progress_bars()  # preparation takes only seconds
    model, tokenizer = load_model(training_args, model_args)
    data = load_data(data_args, training_args, tokenizer)
    if data_args.num_samples:
        sets = data.test if isinstance(data.test, dict) else {"test": data.test}
        if len(sets) > 1 or any("prompt" not in get_dataset_column_names(s) for s in sets.values()):
            raise ValueError("--num_samples needs one held-out set of prompts and completions")
    for note in data.notes:
        say(f"note: {note}")
    trainer = PackedSFTTrainer(
        model=model,
        args=training_args,
        train_dataset=data.train,
        eval_dataset=data.test,
        processing_class=tokenizer,
        quantization_config=get_quantization_config(model_args),
        peft_config=get_peft_config(model_args),
    )
    if is_demo and trainer.pop_callback(ProgressCallback):
        trainer.add_callback(ShortLines)
    questions = list(data.test.take(data_args.num_samples)) if data_args.num_samples else []
    answers = {"before": answer(trainer, questions)}
    metrics = trainer.train(training_args.resume_from_checkpoint).metrics
    answers["after"] = answer(trainer, questions)
    if data.test is not None:
        metrics |= trainer.evaluate()
    if questions:
        metrics |= compare(questions, answers, say)
    trainer.save_metrics("all", metrics, combined=False)
    trainer.save_model(training_args.output_dir)
    if hasattr(trainer.model, "get_nb_trainable_parameters"):
        trained, total = trainer.model.get_nb_trainable_parameters()
        say(f"Trained {trained:,} of {total:,} parameters ({trained / total:.1%}).")
    say(f"Model and metrics are in {training_args.output_dir}.")
    if training_args.push_to_hub:
        trainer.push_to_hub(dataset_name=data_args.dataset_name)
        say(f"Pushed to https://huggingface.co/{trainer.hub_model_id}.")
    trainer.end()
    return metrics


def parse(argv: list[str] | None = None) -> tuple[RecipeArguments, PackedSFTConfig, ModelConfig]:
    """Return TRL's three groups of arguments; the demo's if neither model nor data set is given."""
    found = parse_run(argv, RecipeArguments, ModelConfig, demo=DEMO_ARGUMENTS)
    if found[0].dataset_name and found[0].datasets:
        raise ValueError("dataset_name and datasets both name the data; give one")
    return found


def load_data(
    data_args: RecipeArguments, training_args: PackedSFTConfig, tokenizer: Any
) -> LoadedData:
    """Return the rows to train and to hold out; `datasets` also sets the mixture of the run."""
    template, training_args.prompt_template = training_args.prompt_template, None  # applied here
    data = load_documents(
        data_args,
        prompt_template=template,
        needs_test=training_args.eval_strategy != "no" or data_args.num_samples > 0,
        has_chat_template=bool(tokenizer.chat_template or training_args.chat_template_path),
        text_field=training_args.dataset_text_field,
        source_column=training_args.source_column,
        kept=PackingOptions.of(training_args).named_columns(),
        seed=training_args.seed,
    )
    if data.mixture is not None and training_args.mixture is not None:
        raise ValueError("mixture and a weight or epochs in datasets say the same; give one")
    training_args.mixture = training_args.mixture or data.mixture
    return data


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
    set_model_options(training_args, model_args)
    try:
        tokenizer = AutoTokenizer.from_pretrained(
            name,
            revision=model_args.model_revision,
            trust_remote_code=training_args.trust_remote_code,
        )
    except (ValueError, OSError) as error:
        raise ValueError(f"cannot load the model {name}: {error}") from error
    return name, tokenizer


def set_model_options(training_args: PackedSFTConfig, model_args: ModelConfig) -> None:
    """Set the options with which the trainer loads the model."""
    training_args.model_init_kwargs = {
        "revision": model_args.model_revision,
        "attn_implementation": model_args.attn_implementation,
        "dtype": model_args.dtype,
        **(training_args.model_init_kwargs or {}),
    }


class ShortLines(ProgressCallback):
    """Prints one short line for each log of the demo, where transformers prints all numbers."""

    def on_log(self, args: Any, state: Any, control: Any, logs: Any = None, **kwargs: Any) -> None:
        """Print the line above the progress bar."""
        if state.is_world_process_zero and self.training_bar is not None:
            found = [words.format(logs[name]) for name, words in SHOWN.items() if name in logs]
            self.training_bar.write(" · ".join([f"step {state.global_step:>5,}", *found]))


# --- answers to held-out prompts, before and after ------------------------------------------------


def answer(trainer: PackedSFTTrainer, questions: list[dict[str, Any]]) -> list[str]:
    """Return the model's greedy answers. Every rank computes all of them, so that no rank waits."""
    if not questions:  # ZeRO-3 would gather the whole model
        return []
    tokenizer, size = trainer.processing_class, trainer.args.eval_batch_size
    longest = max((len(tokenizer(text(q["completion"])).input_ids) for q in questions), default=0)
    answers: list[str] = []
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        model.eval()
        for start in range(0, len(questions), size):
            prompts = [question["prompt"] for question in questions[start : start + size]]
            batch = encode(prompts, tokenizer).to(model.device)
            tokens = model.generate(**batch, do_sample=False, max_new_tokens=longest + 1)
            completions = tokens[:, batch.input_ids.shape[1] :]
            answers += tokenizer.batch_decode(completions, skip_special_tokens=True)
    return answers


def encode(prompts: list[Any], tokenizer: Any) -> Any:
    """Return prompts (strings or conversations) as a left-padded batch for `generate`."""
    if isinstance(prompts[0], str):
        return tokenizer(prompts, padding=True, padding_side="left", return_tensors="pt")
    return tokenizer.apply_chat_template(
        prompts,
        add_generation_prompt=True,
        padding=True,
        tokenizer_kwargs={"padding_side": "left"},
        return_tensors="pt",
        return_dict=True,
    )


def compare(
    questions: list[dict[str, Any]], answers: dict[str, list[str]], say: Any
) -> dict[str, float]:
    """Print some answers beside the expected ones, and return the share of exact answers."""
    expected = [text(question["completion"]).strip() for question in questions]

    def line(label: str, content: str) -> None:
        say(
            fill(
                escape_text(content.strip()).replace("\n", " ⏎ "),
                get_terminal_size().columns,
                initial_indent=f"{label:<10}",
                subsequent_indent=" " * 10,
                max_lines=2,
                placeholder=" …",
            )
        )

    for i in range(min(NUM_SHOWN, len(questions))):
        say("")
        line("prompt", text(questions[i]["prompt"]))
        line("expected", expected[i])
        for when, given in answers.items():
            line(f"{when} {'✓' if given[i].strip() == expected[i] else '✗'}", given[i])
    exact = {
        f"exact_match_{when}": sum(map(str.__eq__, map(str.strip, given), expected)) / len(expected)
        for when, given in answers.items()
    }
    say(
        f"\nExact match on {len(questions)} held-out prompts: "
        f"{exact['exact_match_before']:.1%} before, {exact['exact_match_after']:.1%} after"
    )
    return exact


def text(content: Any) -> str:
    """Return a string unchanged, and the last message of a conversation."""
    return content if isinstance(content, str) else content[-1]["content"]


if __name__ == "__main__":
    exits_in_one_line(main)()
