"""The beginning and the end of a recipe: its arguments, and the model that it saves.

arguments, training_args = parse(argv, Arguments, output_dir="outputs/chat_data")
trainer = PackedSFTTrainer(arguments.model_name_or_path, training_args, arguments.rows())
trainer.train(training_args.resume_from_checkpoint)
finish(trainer)
"""

import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any, get_type_hints

import torch
from datasets import Dataset
from transformers.hf_argparser import HfArg
from trl import TrlParser

from trl_packing import PackedSFTConfig, load_rows
from trl_packing.tools.options import (
    check_names,
    check_values,
    read_config,
    short_usage_errors,
)


@dataclass
class Arguments:
    """The model and the data."""

    model_name_or_path: str | None = HfArg(default=None, help="Hub id, or a folder with a model.")
    dataset_name: str | None = HfArg(
        default=None, help="Hub id, a .json, .jsonl or .parquet file, or a folder."
    )
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
    words = sys.argv[1:] if argv is None else list(argv)
    kinds = (arguments, PackedSFTConfig, *more)
    parser = TrlParser(kinds, usage=f"{Path(sys.argv[0]).name} [--config FILE] [--OPTION VALUE]")
    check_names(words, {action.dest for action in parser._actions} | {"config", *_negated(parser)})
    _check_config(words, kinds)
    if not torch.accelerator.is_available():
        # TRL's defaults assume a GPU. With use_cpu, accelerate joins the processes of torchrun.
        defaults |= {"use_cpu": True, "bf16": False, "dataloader_pin_memory": False}
    parser.set_defaults(**defaults)
    of_own = {"--config", "--model_name_or_path", "--dataset_name", "--datasets"}
    is_demo = demo is not None and of_own.isdisjoint(word.partition("=")[0] for word in words)
    parser.set_defaults(**(demo or {} if is_demo else {}))
    with short_usage_errors():
        own, *others = parser.parse_args_and_config(words)
    model = next(group for group in (own, *others) if hasattr(group, "model_name_or_path"))
    names_data = own.dataset_name or getattr(own, "datasets", None)
    if not is_demo and not (model.model_name_or_path and names_data):
        raise ValueError(
            "name the model and the data: --model_name_or_path NAME --dataset_name NAME"
        )
    return own, *others


def _negated(parser: TrlParser) -> set[str]:
    return {word.removeprefix("--") for word in parser._option_string_actions if "--no_" in word}


def _check_config(words: list[str], kinds: tuple[type, ...]) -> None:
    """Raise ValueError for a YAML file with a wrong key, or a value of a wrong form."""
    if "--config" not in words:
        return
    path = "".join(words[words.index("--config") + 1 :][:1])
    config = read_config(Path(path))
    # The parser writes its own types into the fields.
    types = {name: hint for kind in kinds for name, hint in get_type_hints(kind).items()}
    check_values(config, types, path)
    for name in config:
        if name not in types and name != "env":
            check_names([f"--{name}"], types)
            raise ValueError(f"--config {path}: {name!r} is no option of this recipe")


def finish(trainer: Any, kind: str = "model") -> None:
    """Save what was trained, say where it is, and end the run."""
    trainer.save_model()  # gathers the weights of a sharded model
    trainer.accelerator.print(f"The {kind} is in {trainer.args.output_dir}.")
    trainer.accelerator.end_training()
