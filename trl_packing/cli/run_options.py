"""The options that describe a run. They are those of its training command.

accelerate launch recipes/lora.py --config c.yaml --max_length 512   trains
trl-packing plan  recipes/lora.py --config c.yaml --max_length 512   shows the same run
"""

import argparse
from typing import TYPE_CHECKING, Any

from trl_packing.cli.output import quiet_libraries

if TYPE_CHECKING:
    from trl_packing.tools.preview.previewed_run import PreviewedRun

_FLAG = "[BOOL]"

RUN = (
    (("--config",), "FILE", "YAML file with options, as in training"),
    (("--model_name_or_path", "--model"), "NAME", "hub id or folder of a model"),
    (("--dataset_name", "--data"), "NAME", "hub id, .json, .jsonl or .parquet file, or folder"),
    (("--dataset_config",), "NAME", "subset of a data set on the hub"),
    (("--dataset_train_split", "--split"), "SPLIT", "split or part of it: 'train[:1000]'"),
    (("--max_length", "--max-length"), "N", "tokens of a bin; documents beyond it are cut"),
    (("--model_revision", "--revision"), "NAME", "branch, tag or commit of the model"),
    (("--trust_remote_code",), _FLAG, "run code that comes with the model"),
)

# The settings of `PackedSFTConfig` that TRL does not have, or that have other defaults here.
# config/options.py has them in full; importing it would take seconds.
SETTINGS = (
    ("packing", _FLAG, "false: padding-free, the documents of a padded run in each step"),
    ("packing_strategy", "{bfd,bfd_split,next_fit,greedy,wrapped}", "how bins are filled"),
    ("overflow", "{truncate,truncate_prompt,drop,split,overlap,error}", "longer documents"),
    ("overlap_tokens", "N", "with overflow overlap: tokens that a piece repeats"),
    ("train_on", "{assistant,last_assistant,every_turn,all}", "trained messages"),
    ("response_template", "TEXT", "train the text after it: '### Answer:'"),
    ("instruction_template", "TEXT", "with response_template: train every answer"),
    ("prompt_template", "TEXT", "alpaca, qa, a file, or text with {columns}"),
    ("query_field", "COLUMN", "with prompt_template: the question"),
    ("response_field", "COLUMN", "with prompt_template: the answer"),
    ("append_eos", _FLAG, "end documents in the tokenizer's EOS"),
    ("documents_per_step", "N", "documents of an optimizer step, over all ranks"),
    ("loss_weighting", "{token,document,sqrt}", "weight of a token in the loss"),
    ("source_column", "COLUMN", "report losses for each value of it"),
    ("curriculum", "COLUMN", "order an epoch by it: length, or a column of numbers; =-length"),
    ("mixture", "JSON", 'shares of sources: \'{"math": {"weight": 3}, ...}\''),
    ("mixture_unit", "{documents,tokens,trained_tokens}", "unit of the shares"),
    ("mixture_temperature", "T", "draw small sources more often: shares of size^(1/T)"),
    ("static_shapes", _FLAG, "one shape of micro-batches, for torch_compile"),
    ("max_patches", "N", "with images: most patches of the vision tower in a bin"),
    ("prefix_sharing", "{off,bin,group}", "compute common beginnings of documents once"),
    ("prefix_group_size", "N", "with prefix_sharing group: most documents of a group"),
    ("attention", "BACKEND", "auto, varlen, documents, model, flash_attention_2, ..."),
    ("run_page", _FLAG, "write run.html into output_dir while training"),
    ("isolation_check", "{error,warn,off}", "before the first step: does a document leak?"),
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
        "not train. Without it, the recipe is the one that the comments of FILE name,\n"
        "or the first one that takes the options.",
    )
    settings = parser.add_argument_group(
        "settings of trl_packing",
        "All options of TRL and transformers work as in training, too.",
    )
    for names, metavar, text in RUN:
        _forward(run, names, metavar, text)
    for setting, metavar, text in SETTINGS:
        _forward(settings, (f"--{setting}",), metavar, text)


def _forward(group: Any, names: tuple[str, ...], metavar: str, text: str) -> None:
    is_flag = metavar == _FLAG
    group.add_argument(
        *names,
        action=_Forward,
        nargs="?" if is_flag else None,
        metavar=metavar.strip("[]"),
        default=argparse.SUPPRESS,
        help=text,
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
    run = PreviewedRun.from_call(command.trainer_call(), stream_rows=arguments.stream_rows)
    if command.why:
        arguments.notes.append(f"shown as {command.why}")
    if run.is_stream:
        read = f"only its first {len(run.dataset):,} rows are read (--stream_rows)"
        arguments.notes.append(f"a stream: {read}")
    return run


def name_of_data(arguments: argparse.Namespace) -> str:
    """Return the data set of a run for a title: its name, or the file or script that names it."""
    words = arguments.words
    for option in ("--dataset_name", "--data", "--config"):
        if option in words[:-1]:
            return words[words.index(option) + 1]
    return words[0] if words else ""
