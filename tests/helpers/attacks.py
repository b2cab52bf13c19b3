"""Texts that would act on a terminal, and the characters in them that a reader does not see."""

import unicodedata

ATTACKS = {
    "title": "\x1b]0;owned\x07",
    "clear screen": "\x1b[2J\x1b[H",
    "one-byte escape": "\x9b2J",
    "carriage return": "seen\rhidden",
    "backspace": "no\b\byes",
    "delete": "a\x7fb",
    "next line": "a\x85b",
    "right to left": "a\u202eb\u2066c\u200f",
    "line separator": "a\u2028b",
    "zero width": "a\u200bb\ufeffc\u200d",
    "tags": "a\U000e0041\U000e0042",
    "variation selectors": "a\ufe0f\U000e0100",
    "fillers": "a\u3164\u115f\uffa0",
    "lone surrogate": "a\ud800b\udfff",
    "marks": "⟧ not trained ⟦",
}


def harmful(text: str) -> set[str]:
    """Return the characters that a reader does not see, by Unicode's own tables."""
    unseen = ("Cc", "Cf", "Cs", "Zl", "Zp")
    return {
        character
        for character in set(text) - {"\n", "\t"}
        if unicodedata.category(character) in unseen
        or "VARIATION SELECTOR" in unicodedata.name(character, "")
        or character in "\u3164\u115f\uffa0"
    }
