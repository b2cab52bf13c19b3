"""Texts that would act on a terminal, and the characters in them that a reader does not see."""

import unicodedata

ATTACKS = {
    "escapes": "\x1b]0;owned\x07 \x1b[2J\x1b[H \x9b2J",
    "controls": "seen\rhidden no\b\byes a\x7fb a\x85b",
    "formats": "a\u202eb\u2066c\u200f a\u200bb\ufeffc\u200d a\U000e0041\U000e0042",
    "line separator": "a\u2028b",
    "variation selectors and fillers": "a\ufe0f\U000e0100 a\u3164\u115f\uffa0",
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
