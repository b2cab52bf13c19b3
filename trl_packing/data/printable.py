"""Make the text of a data set safe to print, with invisible characters written as escapes.

ESC ] 52 ; c ; … BEL       \\x1b]52;c;…\\x07          a terminal would fill the clipboard
U+202E                     \\u202e                   the rest of the line would run backwards
⟧                          \\u27e7                   it would fake the end of trained text
"""

import re
import unicodedata
from functools import cache

# A document shows its trained tokens between these marks; in its text, the marks are escaped.
MARKS = ("⟦", "⟧")

# Control, format, surrogate; line and paragraph separators.
_HIDDEN_CATEGORIES = ("Cc", "Cf", "Cs", "Zl", "Zp")

# Unicode's default-ignorable characters outside category Cf are invisible, too.
_IGNORABLE = re.compile(
    "[\u034f\u115f\u1160\u17b4\u17b5\u180b-\u180f\u2065\u3164\ufe00-\ufe0f\uffa0\ufff0-\ufff8"
    "\U000e0000-\U000e0fff]"
)

_UNUSUAL = r"[^\n\t -~]"
_ESCAPE = r"x[0-9a-f]{2}|u[0-9a-f]{4}|U[0-9a-f]{8}"
_TO_ESCAPE = re.compile(rf"(\\*)({_UNUSUAL})|(\\+)(?={_ESCAPE})")


def escape_hidden(text: str) -> str:
    """Return a message, which may quote data, with every hidden character as an escape."""
    return re.sub(_UNUSUAL, lambda found: _escape_of(found[0]), text)


def escape_text(text: str) -> str:
    """Return data with every hidden character as an escape, so that no two texts look alike.

    A backslash before an escape, or before text that looks like one, is doubled.
    """
    return _TO_ESCAPE.sub(_escaped, text)


def _escaped(found: re.Match[str]) -> str:
    backslashes, character, before_escape = found.groups()
    if before_escape:
        return 2 * before_escape
    escape = _escape_of(character)
    return backslashes + escape if escape == character else 2 * backslashes + escape


def quote(value: object) -> str:
    """Return the `repr` of `value`, with every hidden character as an escape."""
    return escape_hidden(repr(value))


def in_short(value: object) -> str:
    """Return the type and the value, for messages about a wrong one."""
    words = "nothing (null)" if value is None else f"{type(value).__name__} {quote(value)}"
    return words if len(words) < 80 else words[:77] + "..."


@cache
def _escape_of(character: str) -> str:
    code = ord(character)
    is_hidden = (
        unicodedata.category(character) in _HIDDEN_CATEGORIES
        or _IGNORABLE.match(character)
        or character in MARKS
    )
    if not is_hidden:
        return character
    if code < 0x100:
        return f"\\x{code:02x}"
    return f"\\u{code:04x}" if code < 0x10000 else f"\\U{code:08x}"
