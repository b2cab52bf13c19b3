"""Suggestions for misspelled names, and messages of other libraries as one short sentence.

--max_lenght                                        →  … is unknown; did you mean --max_length?
'adamv' …, please select one of [50 names]          →  …; did you mean 'adamw_torch'?
Some specified arguments are not used by the HfArgumentParser: ['--max_lenght', '5']  →  the first
"""

import re
from collections.abc import Collection
from difflib import get_close_matches

# Lists of choices up to this number of characters are shown whole.
_SHOWN = 120

_CHOICES = re.compile(
    r" ?[(,]? ?(?:choose from|please select one of) [\[(]?(?P<names>[^\])]*)[\])]*"
)
_UNUSED = re.compile(
    r"(?:Some specified arguments are not used by the HfArgumentParser"
    r"|Unknown arguments from config file): \['--(?P<name>[^']*)'.*"
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
    folded = {other.lower().replace("-", "_"): other for other in known}
    found = get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.7)
    return f"; did you mean {mark}{folded[found[0]]}?" if found else ""


def shorten_choices(message: str) -> str:
    """Return `message` with a long list of choices replaced by the most similar one.

    Examples:
        >>> shorten_choices("invalid choice: 'c' (choose from 'a', 'b')")
        "invalid choice: 'c' (choose from 'a', 'b')"
    """
    found = _CHOICES.search(message)
    if found is None or len(found["names"]) <= _SHOWN:
        return message
    names = [name.strip(" '\"") for name in found["names"].split(",")]
    written = re.findall(r"'([^']*)'", message[: found.start()])
    hint = suggest(written[-1], names) if written else ""
    rest = f"; there are {len(names)} choices, such as {', '.join(names[:3])}"
    return message[: found.start()] + (hint or rest) + message[found.end() :]


def name_unknown_option(message: str, known: Collection[str]) -> str:
    """Return the message of a parser about unused options as one about the first of them.

    Examples:
        >>> text = "Unknown arguments from config file: ['--lr', '1']. Please remove them"
        >>> name_unknown_option(text, ["seed"])
        '--lr is unknown'
    """
    found = _UNUSED.search(message)
    if found is None:
        return message
    name = found["name"]
    return f"{message[: found.start()]}--{name} is unknown{suggest(name, known, mark='--')}"
