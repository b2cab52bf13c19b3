"""The program `trl-packing`: its commands, and errors as one line.

trl-packing plan --config recipes/lora_8b.yaml --ranks 8
trl-packing inspect --config recipes/chat_data.yaml --rows 0 17
trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct
"""

import argparse
import importlib
import io
import os
import sys
from collections.abc import Sequence
from itertools import takewhile
from typing import NoReturn

import trl_packing
from trl_packing.cli.output import add_output_arguments, command_line, note, short_log
from trl_packing.formatting.printable import escape_hidden
from trl_packing.tools.command.exit_messages import message_of
from trl_packing.tools.command.options import check_typing, suggest, values_of

# Modules of this folder, in the order of the help.
COMMANDS = ("inspect", "plan", "prepare", "verify", "doctor", "compare")

EPILOG = """\
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


class _Parser(argparse.ArgumentParser):
    """A parser whose errors are one line."""

    def error(self, message: str) -> NoReturn:
        written = message.partition("invalid choice: '")[2].partition("'")[0]
        hint = suggest(written, COMMANDS) if "argument COMMAND:" in message else ""
        self.exit(2, f"{self.prog}: {escape_hidden(' '.join(message.split()))}{hint}\n")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 if it is done; 1 if its result is bad news, such as documents that leak;
        2 if it cannot run, with the reason in one line on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal may lack some characters
            stream.reconfigure(errors="backslashreplace")
    arguments = _parse(argv)
    try:
        if hasattr(arguments, "forwarded"):
            _check_typing(arguments)
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


def _check_typing(arguments: argparse.Namespace) -> None:
    """Raise ValueError for an unknown option of sft_packed.py, before anything slow is imported."""
    words = arguments.words
    if not words or words[0].startswith("--"):
        check_typing([f"--{name}" for name in values_of(words)], vars(arguments).keys())


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    arguments.notes = []
    arguments.command_line = command_line("trl-packing", sys.argv[1:] if argv is None else argv)
    if hasattr(arguments, "forwarded"):  # the training script comes first, if there is one
        leading = list(takewhile(lambda word: not word.startswith("--"), rest))
        size = min(len(leading), 2 if leading[:1] == ["-m"] else 1)
        if hasattr(arguments, "places"):  # of a command that takes more than a script
            arguments.places, rest, size = leading, rest[len(leading) :], 0
        arguments.words = [*rest[:size], *arguments.forwarded, *rest[size:]]
    elif rest:
        known = [name.replace("_", "-") for name in vars(arguments)]
        hint = suggest(rest[0].strip("-"), known, mark="--")
        parser.error(f"{arguments.command} has no option {' '.join(rest)}{hint}")
    return arguments


def _parser() -> argparse.ArgumentParser:
    layout = argparse.RawDescriptionHelpFormatter
    parser = _Parser(
        prog="trl-packing",
        description="Look at a packed run before it starts, prepare its data, compare runs.",
        epilog=EPILOG,
        formatter_class=layout,
        allow_abbrev=False,
    )
    parser.add_argument(
        "--version", action="version", version=f"trl-packing {trl_packing.__version__}"
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    for name in COMMANDS:
        module = importlib.import_module(f"trl_packing.cli.{name}")
        command = commands.add_parser(
            name,
            help=module.HELP,
            description=f"{module.HELP[0].upper()}{module.HELP[1:]}.",
            formatter_class=layout,
            allow_abbrev=False,
        )
        module.add_arguments(command)
        add_output_arguments(command)
        command.set_defaults(run=module.run)
    return parser
