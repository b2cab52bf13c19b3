"""The form of the output: color, JSON, progress bars, and text of users that no terminal executes.

stdout  the result: text, or one JSON object
stderr  notes, progress bars (in a terminal alone), and the reason of a failure in one line
"""

import json
import logging
import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

from trl_packing.data.printable import SECRET_NAME, SECRET_VALUE, escape_hidden


def uses_color(choice: str) -> bool:
    """Return whether to print colors: as ``--color`` says, or in a terminal without NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    return sys.stdout.isatty() and not os.environ.get("NO_COLOR")  # https://no-color.org


def print_json(value: Any) -> None:
    """Print `value` as one JSON object, in ASCII alone, so that no character of it acts."""
    print(json.dumps(value, indent=2))


# A named secret and its value in a command whose words are divided by NUL, or a value alone.
_SECRET = re.compile(rf"(?i)(--{SECRET_NAME}[=\0])[^\0]*|{SECRET_VALUE}")


def command_line(program: str, words: Sequence[str]) -> str:
    """Return a command as pages show it: quoted for a shell, without the values of secrets.

    Examples:
        >>> command_line("trl-packing", ["plan", "--hub_token", "hf_123", "--eos_token", "</s>"])
        "trl-packing plan --hub_token ... --eos_token '</s>'"
        >>> command_line("trl-packing", ["plan", "--password=it's mine", "--api_key", "'a' b"])
        'trl-packing plan --password=... --api_key ...'
        >>> command_line(
        ...     "trl-packing", ["plan", "--model_init_kwargs", "{token: hf_" + "1" * 30 + "}"]
        ... )
        "trl-packing plan --model_init_kwargs '{token: ...}'"
    """
    shown = _SECRET.sub(r"\1...", "\0".join([program, *words]))  # no word has a NUL
    return shlex.join(shown.split("\0"))


def note(text: str) -> None:
    """Print a sentence on stderr that is no part of the result."""
    print(escape_hidden(text), file=sys.stderr)


@contextmanager
def short_log() -> Iterator[None]:
    """Print each warning of this package once inside the block, as a note."""
    note_once = cache(note)
    handler = logging.Handler(logging.WARNING)
    log = logging.getLogger("trl_packing")
    handler.emit = lambda record: note_once(  # type: ignore[method-assign]
        record.getMessage().removeprefix("[RANK 0] ")
    )
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def quiet_libraries() -> None:
    """Turn off what libraries log, and progress bars where stderr is no terminal."""
    import datasets
    from transformers.utils import logging as transformers_logging

    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # kernels that no command runs
    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs the errors that it raises
    # Of renamed options that TRL sets.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
