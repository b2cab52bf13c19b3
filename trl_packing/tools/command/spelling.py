"""Suggestions for misspelled names, and messages of other libraries as one short sentence.

--max_lenght                                        →  … is unknown; did you mean --max_length?
'adamv' (choose from [41 names])                    →  'adamv'; there are 41 choices, such as …
Some specified arguments are not used by the HfArgumentParser: ['--max_lenght', '5']  →  the first
"""

import re
from collections.abc import Collection
from difflib import get_close_matches

# Lists of choices up to this number of characters are shown whole.
_SHOWN = 120

_CHOICES = re.compile(
    r"[ ,(]*(?:choose from|please select one of) [\[(]?(?P<names>[^\])]*)[\])]*",
)
_UNUSED = re.compile(
    r"(?:Some specified arguments are not used by the HfArgumentParser"
    r"|Unknown arguments from config file): \['--(?P<name>[^']*)'.*",
    re.DOTALL,
)


def suggest(name: str, known: Collection[str], *, mark: str = "") -> str:
    """Return "; did you mean …?" with the most similar of `known`, or "".

    Args:
        name: as it was written.
        known: the names that exist.
        mark: stands before the suggestion, such as "--".

    Examples:
        >>> suggest("max_lenght", ["max_length", "max_steps"], mark="--")
        '; did you mean --max_length?'
        >>> suggest("zebra", ["max_length"])
        ''
    """
    folded = {other.lower().replace("-", "_"): other for other in sorted(known)}
    found = get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.7)
    return f"; did you mean {mark}{folded[found[0]]}?" if found else ""


def shorten_choices(message: str) -> str:
    """Return `message` with the most similar choice, and with three of a long list of choices.

    Examples:
        >>> shorten_choices("invalid choice: 'aa' (choose from 'a', 'b')")
        "invalid choice: 'aa' (choose from 'a', 'b')"
        >>> shorten_choices("invalid choice: 'spilt' (choose from 'drop', 'split')")
        "invalid choice: 'spilt' (choose from 'drop', 'split'); did you mean split?"
    """
    found = _CHOICES.search(message)
    written = re.findall(r"'([^']*)'", message[: found.start()]) if found else []
    if found is None or not written or "did you mean" in message:
        return message
    names = [name.strip(" '\"") for name in found["names"].split(",")]
    hint = suggest(written[-1], names)
    if len(found["names"]) <= _SHOWN:
        return message[: found.end()] + hint + message[found.end() :]
    alike = [name for name in names if name[:3] == written[-1][:3]] or names
    some = ", ".join(alike[:3])
    hint = hint or f"; there are {len(names)} choices, such as {some}"
    return message[: found.start()] + hint + message[found.end() :]


def unused_option(message: str) -> str | None:
    """Return the option that the message of a parser calls unused, or None."""
    found = _UNUSED.search(message)
    return found and found["name"]


def name_unknown_option(message: str, known: Collection[str]) -> str:
    """Return the message of a parser about unused options as one about the first of them.

    Examples:
        >>> text = "Unknown arguments from config file: ['--lr', '1']. Please remove them"
        >>> name_unknown_option(text, ["seed"])
        '--lr is unknown'
        >>> name_unknown_option(text, ["lr", "lr_end"])
        '--lr is an option of other scripts, not of this one'
    """
    found = _UNUSED.search(message)
    if found is None:
        return message
    name, before = found["name"], message[: found.start()]
    if name in known:
        return f"{before}--{name} is an option of other scripts, not of this one"
    return f"{before}--{name} is unknown{suggest(name, known, mark='--')}"
