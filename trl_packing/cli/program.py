"""The program `trl-packing`: its commands, and errors as one line.

trl-packing inspect --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl
    print documents with their trained tokens marked, and count what preparation would lose

trl-packing plan --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl --ranks 8
    print the bins, optimizer steps and documents a step of an epoch, beside those of a padded run

trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct
trl-packing verify --matrix --output docs/compatibility.md
    measure whether packing changes what a model learns, on one model or on every architecture
"""

import argparse
import importlib
import io
import sys
from collections.abc import Sequence

from trl_packing.tools.exit_messages import message_of

# Modules of this folder, in the order of the help.
COMMANDS = ("inspect", "plan", "verify", "doctor")


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 on success; 1 if documents leak or differ silently (verify), or no row
        can be shown (inspect); 2 if the command cannot run, with the reason in one line on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal may lack some characters
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    arguments, rest = parser.parse_known_args(argv)
    if rest and not hasattr(arguments, "settings"):
        parser.error(f"unrecognized arguments: {' '.join(rest)}")
    arguments.settings = rest
    try:
        return arguments.run(arguments)
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print(f"trl-packing {arguments.command}: {message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="trl-packing", description="Look at a packed run before it starts."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    for name in COMMANDS:
        module = importlib.import_module(f"trl_packing.cli.{name}")
        command = commands.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(command)
        command.set_defaults(run=module.run)
    return parser
