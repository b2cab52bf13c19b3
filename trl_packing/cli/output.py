"""The form of the output: color, JSON, progress bars, and text of users that no terminal executes.

stdout  the result: text, or one JSON object
stderr  notes, progress bars (in a terminal alone), and the reason of a failure in one line
"""

import json
import logging
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any


def uses_color(choice: str) -> bool:
    """Return whether to print colors: the option ``--color``, or in a terminal without NO_COLOR."""
    if choice != "auto":
        return choice == "always"
    is_plain = os.environ.get("NO_COLOR") or os.environ.get("TERM") == "dumb"
    return sys.stdout.isatty() and not is_plain  # https://no-color.org


def print_json(value: Any) -> None:
    """Print `value` as one JSON object. ASCII alone, so no character of it can act."""
    print(json.dumps(value, indent=2))


# The values of --hub_token, --api_key and --password are secrets, those of --eos_token are not.
_SECRET = re.compile(r"--(?!eos|pad)[\w-]*(token|key|password|secret)", re.IGNORECASE)


def command_line(program: str, words: Sequence[str]) -> str:
    """Return a command as pages show it: quoted for a shell, without the values of secrets.

    Examples:
        >>> command_line("trl-packing", ["plan", "--hub_token", "hf_123", "--eos_token", "</s>"])
        "trl-packing plan --hub_token ... --eos_token '</s>'"
    """
    import shlex

    shown = [program]
    for before, word in zip([program, *words], words, strict=False):
        name, equals, _ = word.partition("=")
        hidden = f"{name}=..." if equals and _SECRET.fullmatch(name) else word
        shown.append("..." if _SECRET.fullmatch(before) else hidden)
    return shlex.join(shown)


def note(text: str) -> None:
    """Print a sentence on stderr that is no part of the result."""
    from trl_packing.data.printable import escape_hidden

    print(escape_hidden(text), file=sys.stderr)


class _Notes(logging.Handler):
    """Print each warning of this package once, as a note."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self._seen: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        text = record.getMessage().removeprefix("[RANK 0] ")
        text = text.replace("the inspected dataset", "the data set")
        if text not in self._seen:
            self._seen.add(text)
            note(text)


@contextmanager
def short_log() -> Iterator[None]:
    """Print each warning of this package once inside the block."""
    handler, log = _Notes(), logging.getLogger("trl_packing")
    logging.getLogger("bitsandbytes").setLevel(logging.ERROR)  # kernels that no command runs
    log.addHandler(handler)
    try:
        yield
    finally:
        log.removeHandler(handler)


def quiet_libraries() -> None:
    """Turn off what libraries log, and progress bars where stderr is no terminal."""
    import warnings

    import datasets
    from transformers.utils import logging as transformers_logging

    if not sys.stderr.isatty():
        datasets.disable_progress_bars()
        transformers_logging.disable_progress_bar()
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)  # it logs the errors that it raises
    # Of renamed options that TRL sets.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
