"""The options that describe a run. They are those of its training command.

accelerate launch train.py --config c.yaml --max_length 512   trains
trl-packing plan  train.py --config c.yaml --max_length 512   shows the same run
"""

import argparse
import ast
import re
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_packing.cli.output import quiet_libraries

if TYPE_CHECKING:
    from trl_packing.tools.preview.previewed_run import PreviewedRun

# Options of sft_packed.py that a preview needs most often; their help would take seconds to import.
RUN = (
    (("--config",), "FILE", "YAML file with options, as in training"),
    (("--model_name_or_path", "--model"), "NAME", "hub id or folder of a model"),
    (("--dataset_name", "--data"), "NAME", "hub id, .json, .jsonl or .parquet file, or folder"),
    (("--dataset_config",), "NAME", "subset of a data set on the hub"),
    (("--dataset_train_split", "--split"), "SPLIT", "split or part of it: 'train[:1000]'"),
    (("--prompt_column",), "NAME", "column of the prompt, such as question"),
    (("--completion_column",), "NAME", "column of the completion, such as answer"),
    (("--messages_column",), "NAME", "column of conversations"),
    (("--max_length", "--max-length"), "N", "tokens of a bin; documents beyond it are cut"),
    (("--model_revision", "--revision"), "NAME", "branch, tag or commit of the model"),
    (("--trust_remote_code",), None, "run code that comes with the model"),
)

_USAGE = "trl-packing {name} [SCRIPT] [--config FILE] [--OPTION VALUE ...]"


class _Forward(argparse.Action):
    """Collect an option and its words for the training script, as they were written."""

    def __call__(
        self, parser: Any, namespace: Any, values: Any, option_string: str | None = None
    ) -> None:
        given = [] if values is None else [values]
        namespace.forwarded = [*namespace.forwarded, option_string, *given]


def add_run_arguments(parser: argparse.ArgumentParser, name: str) -> None:
    """Add the options of a run to the command `name`.

    They, and those that `parser` does not know, become `arguments.words`: a training command
    without its launcher.
    """
    parser.usage = _USAGE.format(name=name)
    parser.set_defaults(forwarded=[])
    run = parser.add_argument_group(
        "the run",
        "SCRIPT is your training script. It runs up to its PackedSFTTrainer, and does\n"
        "not train. Without it, the run is that of recipes/sft_packed.py.",
    )
    settings = parser.add_argument_group(
        "settings of trl_packing",
        "All options of TRL and transformers work as in training, too.",
    )
    for names, metavar, text in RUN:
        _forward(run, names, metavar, text)
    for setting, is_flag, text in our_settings():
        _forward(settings, (f"--{setting}",), None if is_flag else "VALUE", text)


def our_settings() -> Iterator[tuple[str, bool, str]]:
    """Yield each setting of `PackingOptions`: its name, whether it is a flag, and its help.

    They are read from the source, because importing it would take seconds.
    """
    import trl_packing

    source = (Path(trl_packing.__file__).parent / "config" / "options.py").read_text("utf-8")
    classes = [node for node in ast.parse(source).body if isinstance(node, ast.ClassDef)]
    for node in next(each for each in classes if each.name == "PackingOptions").body:
        if isinstance(node, ast.AnnAssign) and node.value is not None:
            texts = [each.value for each in ast.walk(node.value) if isinstance(each, ast.Constant)]
            text = max((text for text in texts if isinstance(text, str)), key=len)
            first = re.split(r"(?<!e\.g)\.\s+(?=[A-Z'{])", text)[0].rstrip(".")
            yield ast.unparse(node.target), ast.unparse(node.annotation) == "bool", first


def _forward(group: Any, names: tuple[str, ...], metavar: str | None, text: str) -> None:
    group.add_argument(
        *names,
        action=_Forward,
        nargs="?" if metavar is None else None,
        metavar=metavar or "BOOL",
        default=argparse.SUPPRESS,
        help=text.replace("%", "%%"),
    )


def add_stream_argument(parser: argparse.ArgumentParser) -> None:
    """Add the number of rows that are read of a stream."""
    parser.add_argument(
        "--stream_rows",
        type=int,
        default=1000,
        metavar="N",
        help="rows to read of a stream, which has no length (default: 1000)",
    )


def previewed_run(arguments: argparse.Namespace) -> "PreviewedRun":
    """Return the run that `arguments` describe, with its rows and its tokenizer.

    Sentences on its rows are added to `arguments.notes`, which follow the result on stderr.
    """
    if arguments.stream_rows < 1:
        raise ValueError(f"--stream_rows {arguments.stream_rows} must be at least 1")
    quiet_libraries()
    from trl_packing.tools.command.training_command import TrainingCommand
    from trl_packing.tools.preview.previewed_run import PreviewedRun

    command = TrainingCommand.from_words(arguments.words)
    run = PreviewedRun.from_call(command.call, stream_rows=arguments.stream_rows)
    if not command.is_named:
        arguments.notes.append(
            "shown as sft_packed.py trains it; for another script, name it first"
        )
    if run.is_stream:
        read = f"only its first {len(run.dataset):,} rows are read (--stream_rows)"
        arguments.notes.append(f"a stream: {read}")
    return run


def name_of_data(words: Sequence[str]) -> str:
    """Return the data set of a run for a title: its name, or the file or script that names it."""
    for option in ("--dataset_name", "--data", "--config"):
        if option in words[:-1]:
            return words[words.index(option) + 1]
    return words[int(words[:1] == ["-m"])] if words else ""
