"""The program `trl-packing`: its commands with their options, and errors as one line.

The options that describe a run are those of its training command:

accelerate launch train.py --config c.yaml --max_length 512   trains
trl-packing plan  train.py --config c.yaml --max_length 512   shows the same run
"""

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

import trl_packing
from trl_packing.cli.commands import COMMANDS
from trl_packing.cli.output import command_line, note, short_log
from trl_packing.tools.options import message_of, short_usage_errors

_USAGE = "trl-packing {} [SCRIPT]{} [--config FILE] [--OPTION ...]"

# The options that a preview needs most often: importing the help of a recipe takes seconds.
RUN = """the run:
  SCRIPT is your training script. It runs up to its PackedSFTTrainer, and does
  not train. Without it, the run is that of recipes/sft_packed.py. All settings
  work as in training, those of trl_packing too (docs/settings.md). Most needed:

  --config FILE             YAML file with options, as in training
  --model NAME              hub id or folder of a model (--model_name_or_path)
  --data NAME               hub id, file or folder (--dataset_name)
  --split SPLIT             split or part of it: 'train[:1000]'
  --dataset_config NAME     subset of a data set on the hub
  --prompt_column NAME      column of the prompt, such as question
  --completion_column NAME  column of the completion, such as answer
  --messages_column NAME    column of conversations
  --max_length N            tokens of a bin; documents beyond it are cut
  --num_proc N              processes that prepare (--dataset_num_proc)
  --sp N                    ranks that share a row (--sequence_parallel_size)

"""


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a packed run before it starts, prepare its data.

    examples:
      trl-packing plan --config recipes/lora_8b.yaml --ranks 8
      trl-packing inspect --config recipes/chat_data.yaml --rows 0 17
      trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct
    Any training command becomes a preview: replace `accelerate launch` by
    `trl-packing plan`.

    exit status:
      0  done
      1  the result is bad news: a row is not trained, documents leak, ...
      2  the command cannot run; stderr has the reason in one line

    TRL_PACKING_TRACEBACK=1 shows where an error comes from.
    """
    try:
        with short_log():
            arguments = _parse(sys.argv[1:] if argv is None else argv)
            status = arguments.run(arguments)
        sys.stdout.flush()
        for sentence in arguments.notes:
            note(sentence)
        return status
    except BrokenPipeError:  # `| head` has read enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except KeyboardInterrupt:
        return 130
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        note(f"trl-packing: {message}")
        return 2


def check_can_write(path: str | None) -> None:
    """Raise ValueError if no page can be written to `path`, or would replace other data."""
    if path is None:
        return
    file = Path(path)
    if file.is_dir() or not file.absolute().parent.is_dir():
        raise ValueError(f"--html {path!r} must name a file in a folder that exists")
    if file.is_file():
        with file.open("rb") as opened:
            start = opened.read(16).lower()
        if start and not start.startswith((b"<!doctype", b"<html")):
            raise ValueError(f"--html {path} exists and is no page; name another file")


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command; `words` are all others, the training command of a run."""
    with short_usage_errors():
        arguments, words = _parser().parse_known_args(argv)
    if words and arguments.command == "doctor":
        raise ValueError(f"doctor has no option {' '.join(words)}")
    check_can_write(getattr(arguments, "html", None))
    if getattr(arguments, "stream_rows", 1) < 1:
        raise ValueError(f"--stream_rows {arguments.stream_rows} must be at least 1")
    arguments.words = words
    arguments.notes = []
    arguments.say = (lambda *_, **__: None) if arguments.json else print
    arguments.command_line = command_line("trl-packing", argv)
    return arguments


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-packing", **_settings_of(main))
    parser.add_argument("--version", action="version", version=trl_packing.__version__)
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    adds = []
    for run in COMMANDS:
        name = run.__name__
        settings = _settings_of(run)
        command = commands.add_parser(name, help=settings["description"], **settings)
        if name != "doctor":
            command.usage = _USAGE.format(name, " [DATA] OUT" * (name == "prepare"))
            command.epilog = RUN + settings["epilog"]
        command.set_defaults(run=run)
        adds.append(command.add_argument)
    inspect, plan, _, verify, _ = adds
    inspect("--rows", type=int, nargs="+", metavar="ROW", help="row numbers (default: 0 1 2)")
    inspect("--all", action="store_true", help="count what all rows would lose")
    inspect(
        "--against",
        metavar="WHAT",
        help="trl, or the .yaml file of another run, to compare all rows with",
    )
    _add_devices(commands.choices["plan"])
    for add in (inspect, plan):
        add(
            "--stream_rows",
            type=int,
            default=1000,
            metavar="N",
            help="rows to read of a stream (default: 1000)",
        )
        add("--html", metavar="FILE", help="write a page: the packed rows, or the plan")
    verify("--dtype", help="bfloat16, auto, ...; default: the run's, or float32")
    verify("--device", help="cpu, cuda, ...; default: cuda if it is available")
    verify("--gradients", action="store_true", help="compare gradients too")
    verify("--prefixes", action="store_true", help="check shared prefixes too")
    for add in adds:
        add("--json", action="store_true", help="print one JSON object instead of text")
        add("--color", choices=("auto", "always", "never"), default="auto", help="of the text")
    return parser


def _add_devices(plan: argparse.ArgumentParser) -> None:
    """Add the options of `plan` that say on what a run will train."""
    either = plan.add_mutually_exclusive_group()
    either.add_argument(
        "--ranks",
        type=int,
        default=1,
        metavar="N",
        help="data-parallel processes, or groups of sequence_parallel_size processes (default: 1)",
    )
    either.add_argument(
        "--gpus",
        type=int,
        metavar="M",
        help="all processes instead: estimate memory and time of one device too",
    )
    plan.add_argument(
        "--memory",
        type=float,
        default=80,
        metavar="GB",
        help="of a device, for --gpus (default: 80)",
    )
    plan.add_argument(
        "--speed",
        type=float,
        nargs=3,
        default=[400, 200, 25],
        metavar="S",
        help="TFLOP/s reached, GB/s in a node, GB/s between nodes (default: 400 200 25)",
    )


def _settings_of(function: Any) -> dict[str, Any]:
    """Return the settings of a parser: its description is the first line of a docstring."""
    first, _, rest = dedent("    " + function.__doc__).strip().partition("\n\n")
    return {
        "description": first,
        "epilog": rest,
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
