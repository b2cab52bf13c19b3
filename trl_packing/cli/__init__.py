"""The command `trl-packing`: one module for each of its commands.

A command is a module with

    HELP: str                                        one line for `trl-packing --help`
    add_arguments(parser: ArgumentParser) -> None    its options
    run(arguments: Namespace) -> int                 its work, and the exit status

and its name in `program.COMMANDS`. Libraries are imported inside `run`, so that `--help` and typing
errors are quick.

Belongs here: the options of a command, and its exit status. Does not: its work (`tools/`).
Read `program.py` first.
"""

from trl_packing.cli.program import main

__all__ = ["main"]
