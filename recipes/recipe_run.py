"""The beginning and the end of a recipe: its arguments, and the model that it saves.

arguments, training_args = parse(argv, Arguments, output_dir="outputs/chat_data")
rows = arguments.rows()
trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, train_dataset=rows)
trainer.train(training_args.resume_from_checkpoint)
finish(trainer)
"""

import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from datasets import Dataset
from transformers.hf_argparser import HfArg
from trl import TrlParser
from trl.models import unwrap_model_for_generation

from trl_packing import PackedSFTConfig, load_rows, show_document
from trl_packing.config import is_launched_on_gpus
from trl_packing.tools.options import (
    read_config,
    short_usage_errors,
    unknown_option,
    with_long_names,
)


@dataclass
class Arguments:
    """The model and the data."""

    model_name_or_path: str | None = HfArg(default=None, help="Hub id, or a folder with a model.")
    dataset_name: str | None = HfArg(default=None, help="Hub id, a file, or a folder.")
    dataset_config: str | None = HfArg(default=None, help="Subset, if the data set has several.")
    dataset_train_split: str = HfArg(default="train", help="Split, or part of it: 'train[:1000]'.")

    def rows(self, split: str | None = None) -> Dataset:
        """Return the rows of a split; None: of the one to train."""
        split = split or self.dataset_train_split
        return load_rows(str(self.dataset_name), split, config=self.dataset_config)


def parse(
    argv: list[str] | None,
    arguments: type,
    *more: type,
    demo: dict[str, Any] | None = None,
    **defaults: Any,
) -> Any:
    """Return the arguments of a recipe, those of the trainer, and `more`.

    Args:
        argv: the command line; None: of this process.
        arguments: the dataclass of the recipe, with `model_name_or_path` and `dataset_name`.
        more: further dataclasses.
        demo: defaults where neither model nor data are named; None: they must be.
        defaults: of any run.

    Raises:
        ValueError: an option is unknown or has a value that it cannot have, or none names the
            model or the data.
    """
    words = with_long_names(sys.argv[1:] if argv is None else argv)
    usage = f"{Path(sys.argv[0]).name} [--config FILE] [--OPTION VALUE]"
    kinds = (arguments, PackedSFTConfig, *more)
    parser = TrlParser(kinds, usage=usage)
    hints = {name: str(hint) for k in kinds for name, hint in get_type_hints(k).items()}
    if "--config" in words:  # TRL reads it, too, and keeps the last of two equal keys
        given = read_config(Path("".join(words[words.index("--config") + 1 :][:1])))
        for name, value in given.items():
            is_one = not re.search("list|dict|Any", hints.get(name, "Any"))
            if is_one and isinstance(value, (list, dict)):
                raise ValueError(f"{name}={value!r} in the file of --config must be one value")
    if not torch.accelerator.is_available():
        # TRL's defaults assume a GPU. With use_cpu, accelerate joins the processes of torchrun.
        defaults |= {"use_cpu": not is_launched_on_gpus(), "bf16": False}
        defaults |= {"dataloader_pin_memory": False}
    of_own = {"--config", "--model_name_or_path", "--dataset_name", "--datasets"}
    is_demo = demo is not None and of_own.isdisjoint(word.partition("=")[0] for word in words)
    parser.set_defaults(**{**defaults, **(demo or {} if is_demo else {})})
    with short_usage_errors():
        *found, of_file, of_line = parser.parse_args_and_config(
            words, return_remaining_strings=True, separate_remaining_strings=True
        )
    for word in [*of_file, *of_line]:
        if not word.startswith("--"):
            raise ValueError(f"{word!r} belongs to no option; put a value with spaces in quotes")
        raise unknown_option(word[2:].partition("=")[0].replace("-", "_"), hints)
    model = next(group for group in found if hasattr(group, "model_name_or_path"))
    names_data = found[0].dataset_name or getattr(found[0], "datasets", None)
    if not is_demo and not (model.model_name_or_path and names_data):
        raise ValueError(
            "name the model and the data: --model_name_or_path NAME --dataset_name NAME"
        )
    return found


def show(trainer: Any, number: int = 1) -> None:
    """Print the first documents, with their trained tokens marked."""
    trainer.accelerator.print("\nTrained tokens are between ⟦ and ⟧.")
    for document in trainer.train_dataset.select(range(number)):
        trainer.accelerator.print(show_document(document, trainer.processing_class))


def prompt_length(document: Any) -> int:
    """Return the number of tokens before the first trained one."""
    return next(i for i, label in enumerate(document["labels"]) if label != -100)


def answers(trainer: Any, documents: list[Any], longest: int) -> list[str]:
    """Return the model's greedy answers, of at most `longest` tokens, to the prompts of documents.

    Every rank computes all of them, so that no rank waits.
    """
    prompts = [{"input_ids": each["input_ids"][: prompt_length(each)]} for each in documents]
    if not all(prompt["input_ids"] for prompt in prompts):
        raise ValueError("only documents with a prompt that is not trained can be answered")
    tokenizer, size = trainer.processing_class, trainer.args.eval_batch_size
    if not prompts:  # ZeRO-3 would gather the whole model
        return []
    written: list[str] = []
    with unwrap_model_for_generation(trainer.model_wrapped, trainer.accelerator) as model:
        model.eval()
        for at in range(0, len(prompts), size):
            batch = tokenizer.pad(prompts[at : at + size], padding_side="left", return_tensors="pt")
            batch = batch.to(model.device)
            tokens = model.generate(**batch, do_sample=False, max_new_tokens=longest)
            completions = tokens[:, batch["input_ids"].shape[1] :]
            written += tokenizer.batch_decode(completions, skip_special_tokens=True)
    return written


def finish(trainer: Any, what: str = "The model is") -> None:
    """Save what was trained, say where it is, and end the run."""
    trainer.save_model()  # gathers the weights of a sharded model
    trainer.accelerator.print(f"{what} in {trainer.args.output_dir}.")
    trainer.accelerator.end_training()
