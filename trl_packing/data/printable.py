"""What may be shown: text with its invisible characters as escapes, settings without secrets.

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

# Names of settings whose values are not shown, up to "=" or NUL: hub_token, api-key; not eos_token.
SECRET_NAME = (
    r"(?!(?:eos|pad|bos|unk)[_-]token(?![^=\0])|[^=\0]*(?:max|num|new)[_-]tokens(?![^=\0]))"
    r"[^=\0]*(?:tokens?|auth|password|passwd|secret|key)(?![^=\0])"
)
SECRET_VALUE = r"hf_[A-Za-z0-9]{16,}"


def escape_hidden(text: str) -> str:
    """Return `text` with every hidden character as an escape."""
    return re.sub(_UNUSUAL, lambda found: _escape_of(found[0]), text)


def quote(value: object) -> str:
    """Return the `repr` of `value`, with every hidden character as an escape."""
    return escape_hidden(repr(value))


def in_short(value: object) -> str:
    """Return the type and the value, for messages about a wrong one."""
    words = "nothing (null)" if value is None else f"{type(value).__name__} {quote(value)}"
    return words if len(words) < 80 else words[:77] + "..."


def is_secret(name: str) -> bool:
    """Return whether the value of a setting or an option of this name is not shown.

    Examples:
        >>> [is_secret(name) for name in ("hub_token", "api-key", "eos_token", "max_new_tokens")]
        [True, True, False, False]
    """
    return re.match(SECRET_NAME, name, re.IGNORECASE) is not None


@cache
def _escape_of(character: str) -> str:
    is_listed = _IGNORABLE.match(character) or character in MARKS
    if is_listed or unicodedata.category(character) in _HIDDEN_CATEGORIES:
        return character.encode("unicode_escape").decode()
    return character
