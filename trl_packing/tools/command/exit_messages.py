"""Errors of a command: one line on stderr and an exit status instead of a traceback.

a ValueError about the options     →  lora.py: --lora_rank is unknown …        status 1
an error inside a training step    →  a traceback, because no option caused it
"""

import os
import sys
from collections.abc import Callable
from functools import wraps
from pathlib import Path
from traceback import walk_tb
from typing import ParamSpec, TypeVar

from trl_packing.formatting.printable import escape_hidden
from trl_packing.tools.command.options import short_usage_errors

P = ParamSpec("P")
T = TypeVar("T")

# An environment variable: any value brings the traceback back.
TRACEBACK = "TRL_PACKING_TRACEBACK"

# Errors with a message for the user. Other errors may be bugs, so their type is named.
_FOR_USERS = (ValueError, OSError, ImportError)


def message_of(error: Exception) -> str | None:
    """Return `error` as one line, or None if its traceback should be printed.

    The traceback is printed for errors inside a training step, and for every error if the
    environment variable TRL_PACKING_TRACEBACK is set.
    """
    frames = (frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__))
    if os.environ.get(TRACEBACK) or "training_step" in frames:
        return None
    words = " ".join(escape_hidden(str(error)).split())
    if isinstance(error, _FOR_USERS) and words:
        return words
    named = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return f"{named} ({TRACEBACK}=1 shows where)"


def exits_in_one_line(main: Callable[P, T]) -> Callable[P, T]:
    """Wrap `main` of a script: an error ends the process with one line and status 1.

    The line starts with the name of the script, and with the rank if there are several.
    """
    program = Path(main.__code__.co_filename).name

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with short_usage_errors():
                return main(*args, **kwargs)
        except Exception as error:
            message = message_of(error)
            if message is None:
                raise
            ranks = int(os.environ.get("WORLD_SIZE", "1"))
            rank = f" (rank {os.environ.get('RANK', '0')})" if ranks > 1 else ""
            sys.exit(f"{program}{rank}: {message}")

    return run
