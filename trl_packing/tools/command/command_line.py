"""The command line of this process, as pages show it."""

import re
import shlex
import sys
from collections.abc import Sequence

# The values of --hub_token, --api_key and --password are secrets, those of --eos_token are not.
_SECRET = re.compile(r"^--(?!eos|pad)\w*(token|key|password|secret)(=.*)?$", re.IGNORECASE)


def command_line(program: str, arguments: Sequence[str] | None = None) -> str:
    """Return the command, quoted for a shell, without the values of secrets.

    Args:
        program: the name of the program.
        arguments: of the command; None for those of this process.

    Examples:
        >>> command_line("trl-packing", ["plan", "--hub_token", "hf_123", "--eos_token", "</s>"])
        "trl-packing plan --hub_token ... --eos_token '</s>'"
    """
    given = sys.argv[1:] if arguments is None else arguments
    words: list[str] = []
    hides_next = False
    for word in given:
        found = _SECRET.match(word.replace("-", "_").replace("__", "--", 1))
        name = word.partition("=")[0]
        words.append("..." if hides_next else f"{name}=..." if found and "=" in word else word)
        hides_next = bool(found) and "=" not in word
    return " ".join([program, *(word if word == "..." else shlex.quote(word) for word in words)])
