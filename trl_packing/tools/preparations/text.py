"""A comparison of two preparations as text for a terminal: counts, then differences side by side.

row 12 · labels differ from token 9 on
here                          │ trl
<|im_start|>assistant         │ <|im_start|>assistant
⟦Hello.<|im_end|>⟧            │ ⟦Hello.<|im_end|>
                              │ ⟧
"""

import unicodedata
from collections.abc import Iterator, Sequence
from itertools import groupby, zip_longest
from typing import Any

from trl_packing.data.counts import quantity
from trl_packing.formatting.printable import escape_hidden
from trl_packing.tools.preparations.compare import EQUAL, Comparison, Difference
from trl_packing.tools.preparations.excerpt import Excerpt, excerpts
from trl_packing.tools.preview.show import mark_trained

_BETWEEN = " │ "
_NARROWEST = 40


def comparison_text(comparison: Comparison, tokenizers: Sequence[Any], *, width: int = 100) -> str:
    """Return the counts and the first differences.

    Args:
        comparison: of two preparations.
        tokenizers: of both.
        width: columns of the terminal.
    """
    width = max(width, _NARROWEST)
    names = [escape_hidden(name) for name in comparison.names]
    parts = [_counts(comparison, names), verdict(comparison)]
    for difference in comparison.differences:
        sides = [_text(excerpt) for excerpt in excerpts(difference, tokenizers)]
        parts.append(f"{heading(difference)}\n{_side_by_side(names, sides, width)}")
    return "\n\n".join(parts)


def verdict(comparison: Comparison) -> str:
    """Return in a sentence whether both preparations make the same documents."""
    if comparison.is_equal:
        return "Both preparations make the same documents: tokens, labels and weights."
    of = quantity(comparison.rows, "row")
    return f"The preparations differ in {comparison.different:,} of {of}."


def heading(difference: Difference) -> str:
    """Return the row, and how and where it differs."""
    where = f" from token {difference.at:,} on" * all(side.lengths for side in difference.sides)
    return f"row {difference.row:,} · {difference.kind}{where}"


def totals(comparison: Comparison) -> list[tuple[str, str, str]]:
    """Return the documents, tokens and trained tokens of both preparations."""
    names = ("documents", "tokens", "trained tokens")
    return [
        (name, f"{first:,}", f"{second:,}")
        for name, first, second in zip(names, *comparison.totals.tolist(), strict=True)
    ]


def outcomes(comparison: Comparison) -> list[tuple[str, int]]:
    """Return the rows of each kind, equal ones first; other kinds without rows are left out."""
    return [(kind, rows) for kind, rows in comparison.counts.items() if rows or kind == EQUAL]


def _counts(comparison: Comparison, names: Sequence[str]) -> str:
    table = [("", names[0][:20], names[1][:20]), *totals(comparison)]
    lines = [f"{name:16}{first:>20}{second:>20}" for name, first, second in table]
    rows = [f"{kind:16}{quantity(number, 'row'):>20}" for kind, number in outcomes(comparison)]
    return "\n".join([*lines, "", *rows])


def _text(excerpt: Excerpt) -> str:
    if not excerpt.tokens and not excerpt.before:
        return "(dropped)"
    parts = []
    for starts, tokens in groupby(_numbered(excerpt), key=lambda found: found[0]):
        stretches = groupby((token for _, token in tokens), key=lambda token: token.weight)
        marked = mark_trained([(w, "".join(t.text for t in group)) for w, group in stretches])
        parts.append("\n── next document ──\n" * (starts > 0) + marked)
    return "… " * bool(excerpt.before) + "".join(parts) + " …" * bool(excerpt.after)


def _numbered(excerpt: Excerpt) -> Iterator[tuple[int, Any]]:
    """Yield the tokens with the number of their document in the excerpt."""
    number = 0
    for i, token in enumerate(excerpt.tokens):
        number += token.starts_document and i > 0
        yield number, token


def _side_by_side(names: Sequence[str], sides: Sequence[str], width: int) -> str:
    column = (width - len(_BETWEEN)) // 2
    lines = [_wrapped(f"{name}\n{text}", column) for name, text in zip(names, sides, strict=True)]
    return "\n".join(
        f"{left}{' ' * (column - _width(left))}{_BETWEEN}{right}".rstrip()
        for left, right in zip_longest(*lines, fillvalue="")
    )


def _wrapped(text: str, column: int) -> list[str]:
    """Return `text` in lines of at most `column` columns, broken at spaces where possible."""
    lines = []
    for line in text.expandtabs(4).split("\n"):
        while _width(line) > column:
            end = next(i for i in range(len(line) + 1) if _width(line[: i + 1]) > column)
            end = line.rfind(" ", column // 2, end) + 1 or end
            lines.append(line[:end])
            line = line[end:]
        lines.append(line)
    return lines


def _width(text: str) -> int:
    """Return the columns of `text` in a terminal: wide characters take two, marks none."""
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )
