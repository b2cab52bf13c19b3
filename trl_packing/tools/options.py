"""Options of a training command as they are written, and errors as one line.

--max_lenght 5                      →  --max_lenght is unknown; did you mean --max_length?
--warmup_ratio 0.1                  →  --warmup_ratio is unknown; write --warmup_steps, where …
max_steps: 3 (twice)                →  --config run.yaml gives 'max_steps' twice; keep one
an error inside a training step     →  a traceback, because no option caused it
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import wraps
from pathlib import Path
from typing import Any, NoReturn

from trl_packing.data.printable import escape_hidden

# Short names of options, and their names in training.
SHORT = {
    "model": "model_name_or_path",
    "data": "dataset_name",
    "split": "dataset_train_split",
    "revision": "model_revision",
    "num_proc": "dataset_num_proc",
    "sp": "sequence_parallel_size",
}
TRACEBACK = "TRL_PACKING_TRACEBACK"  # any value of this variable brings the traceback back
LAUNCHED = "ACCELERATE_MIXED_PRECISION"  # a variable that `accelerate launch` always sets

# Options of older versions of TRL and transformers, and what to write today.
_REPLACED = {
    "warmup_ratio": "write --warmup_steps, where a number below 1 is a share of all steps",
    "max_seq_length": "write --max_length",
    "evaluation_strategy": "write --eval_strategy",
    "torch_dtype": "write --dtype",
    "group_by_length": "write --train_sampling_strategy group_by_length",
    "no_cuda": "write --use_cpu true",
    "adafactor": "write --optim adafactor",
    "push_to_hub_model_id": "write --hub_model_id",
    "push_to_hub_token": "write --hub_token",
    "include_tokens_per_second": "leave it out: tokens_per_second is always logged",
    "logging_dir": "leave it out, and set the variable TENSORBOARD_LOGGING_DIR",
    "overwrite_output_dir": "leave it out",
    "save_safetensors": "leave it out",
}


class UnknownOption(ValueError):
    """An option that a recipe does not have."""


def unknown_option(name: str, known: Iterable[str]) -> UnknownOption:
    """Return the refusal of an option that is not among `known`, with what to write instead."""
    from difflib import get_close_matches

    close = get_close_matches(name, [*known, *SHORT, "config"], n=1, cutoff=0.7)
    hint = f"did you mean --{close[0]}?" if close else "--help lists the options"
    return UnknownOption(f"--{name} is unknown; {_REPLACED.get(name, hint)}")


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a training command by name: those of its file, then of its line."""
    on_line: dict[str, list[str]] = {}
    values: list[str] = []
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = on_line[SHORT.get(name, name.replace("-", "_"))] = [value] if equals else []
        else:
            values.append(word)
    files = on_line.pop("config", None)
    if files is not None and len(files) != 1:
        raise ValueError("--config takes one YAML file")
    in_file = read_config(Path(files[0])) if files else {}
    return in_file | {name: " ".join(values) for name, values in on_line.items()}


def with_long_names(words: Sequence[str]) -> list[str]:
    """Return a command line with --model as --model_name_or_path, --data as --dataset_name, ..."""
    long = {f"--{short}": f"--{name}" for short, name in SHORT.items()}
    parts = (word.partition("=") for word in words)
    return [long.get(name, name) + equals + value for name, equals, value in parts]


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of the YAML file of --config.

    Raises:
        ValueError: it is no mapping from names, or gives a key twice.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, of which YAML keeps the last one silently."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if key.value != "<<"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise ValueError(f"--config {path} gives {twice[0]!r} twice; keep one")
            return super().construct_mapping(node, deep)

    with path.open(encoding="utf-8") as file:
        content = Loader(file).get_single_data()
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must contain lines 'option: value'")
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"--config {path} has the key {wrong[0]!r}, which is no name of an option")
    return content


@contextmanager
def short_usage_errors() -> Iterator[None]:
    """Make errors of `argparse` a ValueError, without the usage, which has hundreds of lines."""
    parser: Any = argparse.ArgumentParser
    native = parser.error

    def fail(self: argparse.ArgumentParser, message: str) -> NoReturn:
        raise ValueError(message)

    parser.error = fail  # not by unittest.mock, whose import takes as long as the help
    try:
        yield
    finally:
        parser.error = native


def message_of(error: Exception) -> str | None:
    """Return `error` as one line, or None if its traceback should be printed.

    That of an error inside a training step is printed, and of any with TRL_PACKING_TRACEBACK set.
    """
    from traceback import walk_tb

    frames = (frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__))
    if os.environ.get(TRACEBACK) or "training_step" in frames:
        return None
    words = " ".join(escape_hidden(str(error)).split())
    # Errors with a message for the user. Other errors may be bugs, so their type is named.
    if isinstance(error, (ValueError, OSError, ImportError)) and words:
        return words
    return f"{type(error).__name__}: {words} ({TRACEBACK}=1 shows where)"


def exits_in_one_line(main: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap `main` of a script: an error ends the process with its name, one line and status 1."""
    program = Path(main.__code__.co_filename).name

    @wraps(main)
    def run(*args: Any, **kwargs: Any) -> Any:
        try:
            with short_usage_errors():
                return main(*args, **kwargs)
        except Exception as error:
            message = message_of(error)
            if message is None:
                raise
            if LAUNCHED in os.environ and "LOCAL_RANK" not in os.environ:  # of one process
                message += "\n(No traceback follows this line with `accelerate launch --quiet`.)\n"
            sys.exit(f"{program}: {message}")

    return run
