"""The program `trl-packing`: its commands with their options, and errors as one line.

The options that describe a run are those of its training command:

accelerate launch train.py --config c.yaml --max_length 512   trains
trl-packing plan  train.py --config c.yaml --max_length 512   shows the same run
"""

import argparse
import io
import os
import sys
from collections.abc import Sequence
from textwrap import dedent
from typing import Any, NoReturn

import trl_packing
from trl_packing.cli.commands import COMMANDS
from trl_packing.cli.output import command_line, note, short_log
from trl_packing.tools.options import message_of

_ROWS = "row numbers (default: 0 1 2)"
_FLAG: dict[str, Any] = {"action": "store_true"}
_OF_STREAMS = "rows to read of a stream, which has no length (default: 1000)"
_STREAM_ROWS: dict[str, Any] = {"type": int, "default": 1000, "metavar": "N", "help": _OF_STREAMS}
_OTHER = """compare tokens and labels of all rows with those of another preparation: trl, a .jinja
template, or the .yaml file of another run"""
_RUNS = """at least two: output_dir of a run, one of its checkpoints, its run.json, or the
trainer_state.json of any Trainer"""
_RANKS = "data-parallel processes (default: 1)"
_COLORS = "auto: in a terminal, unless NO_COLOR is set"

# The options of each command.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "inspect": {
        "--rows": {"type": int, "nargs": "+", "metavar": "ROW", "help": _ROWS},
        "--all": _FLAG | {"help": "count what all rows would lose"},
        "--html": {"metavar": "FILE", "help": "write the packed rows of the run as a page"},
        "--against": {"metavar": "WHAT", "help": _OTHER},
        "--stream_rows": _STREAM_ROWS,
    },
    "plan": {
        "--ranks": {"type": int, "default": 1, "metavar": "N", "help": _RANKS},
        "--html": {"metavar": "FILE", "help": "write the plan as a page"},
        "--stream_rows": _STREAM_ROWS,
    },
    "prepare": {"--num_proc": {"type": int, "metavar": "N", "help": "processes (default: 1)"}},
    "verify": {
        "--dtype": {"help": "bfloat16, auto, ...; default: the run's, or float32"},
        "--device": {"help": "cpu, cuda, ...; default: cuda if it is available"},
        "--gradients": _FLAG | {"help": "compare gradients too"},
        "--prefixes": _FLAG | {"help": "check shared prefixes too"},
    },
    "doctor": {},
    "compare": {
        "runs": {"nargs": "+", "metavar": "RUN", "help": _RUNS},
        "--html": {"metavar": "FILE", "help": "write the curves as a page"},
    },
}

_WITHOUT_RUN = ("doctor", "compare")  # take no training command

# Options of every command.
_OUTPUT: dict[str, dict[str, Any]] = {
    "--json": _FLAG | {"help": "print one JSON object instead of text"},
    "--color": {"choices": ("auto", "always", "never"), "default": "auto", "help": _COLORS},
}

# The options of sft_packed.py that a preview needs most often: importing its help takes seconds.
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
  --revision NAME           branch, tag or commit of the model
  --trust_remote_code BOOL  run code that comes with the model

"""
_USAGE = "trl-packing {} [SCRIPT]{} [--config FILE] [--OPTION ...]"


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        from trl_packing.data.printable import escape_hidden

        self.exit(2, f"{self.prog}: {escape_hidden(' '.join(message.split()))}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Look at a packed run before it starts, prepare its data, compare runs.

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
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal may lack some characters
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(sys.argv[1:] if argv is None else argv)
    try:
        with short_log():
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
        print(f"trl-packing {arguments.command}: {message}", file=sys.stderr)
        return 2


def _parse(argv: Sequence[str]) -> argparse.Namespace:
    """Return the options of a command; `words` are all others, the training command of a run."""
    parser = _parser()
    arguments, words = parser.parse_known_args(argv)
    if words and arguments.command in _WITHOUT_RUN:
        parser.error(f"{arguments.command} has no option {' '.join(words)}")
    arguments.words, arguments.notes = words, []
    arguments.say = (lambda *_, **__: None) if arguments.json else print
    arguments.command_line = command_line("trl-packing", argv)
    return arguments


def _parser() -> argparse.ArgumentParser:
    settings: dict[str, Any] = {
        "formatter_class": argparse.RawDescriptionHelpFormatter,
        "allow_abbrev": False,
    }
    description, epilog = _help_of(main)
    parser = _Parser(prog="trl-packing", description=description, epilog=epilog, **settings)
    version = f"trl-packing {trl_packing.__version__}"
    parser.add_argument("--version", action="version", version=version)
    added = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for run in COMMANDS:
        name = run.__name__
        description, epilog = _help_of(run)
        summary = description[0].lower() + description[1:].removesuffix(".")
        command = added.add_parser(name, help=summary, description=description, **settings)
        output = command.add_argument_group("output")
        for group, options in ((command, OPTIONS[name]), (output, _OUTPUT)):
            for option, given in options.items():
                group.add_argument(option, **given)
        command.epilog = epilog
        if name not in _WITHOUT_RUN:
            command.usage = _USAGE.format(name, " [DATA] OUT" * (name == "prepare"))
            command.epilog = RUN + epilog
        command.set_defaults(run=run)
    return parser


def _help_of(function: Any) -> tuple[str, str]:
    """Return the first line of a docstring, and the rest."""
    first, _, rest = dedent("    " + function.__doc__).strip().partition("\n\n")
    return first, rest
