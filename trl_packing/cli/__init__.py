"""The command `trl-packing`.

    program.py     options of all commands, and errors as one line
    commands.py    a function for each command; its docstring is the help
    output.py      color, JSON, log lines, and secrets that are not shown

Belongs here: the options of a command, and its exit status. Does not: its work (`tools/`).
Read `program.py` first.
"""

from trl_packing.cli.program import main

__all__ = ["main"]
