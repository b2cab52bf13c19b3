"""A comparison of two preparations as text for a terminal: counts, then the lines that differ.

row 12 · labels differ from token 9 on
--- here
+++ trl
 <|im_start|>assistant
-⟦Hello.<|im_end|>⟧
+⟦Hello.<|im_end|>
+⟧
"""

from collections.abc import Sequence
from difflib import unified_diff
from itertools import groupby
from typing import Any

from trl_packing.data.counts import quantity
from trl_packing.formatting.printable import escape_hidden, escape_text
from trl_packing.tools.preparations.compare import EQUAL, Comparison, Difference
from trl_packing.tools.preparations.side import Tokens
from trl_packing.tools.preview.show import mark_trained, token_texts

# Tokens shown before the first one that differs, and from there on.
_BEFORE, _AFTER = 12, 60


def comparison_text(comparison: Comparison, tokenizers: Sequence[Any]) -> str:
    """Return the counts and the first differences.

    Args:
        comparison: of two preparations.
        tokenizers: of both.
    """
    names = [escape_hidden(name) for name in comparison.names]
    found = [_difference(d, names, tokenizers) for d in comparison.differences]
    return "\n\n".join([_counts(comparison, names), _verdict(comparison), *found])


def _verdict(comparison: Comparison) -> str:
    if comparison.is_equal:
        return "Both preparations make the same documents: tokens, labels and weights."
    of = quantity(comparison.rows, "row")
    return f"The preparations differ in {comparison.different:,} of {of}."


def _counts(comparison: Comparison, names: Sequence[str]) -> str:
    lines = [f"{'':16}{names[0][:20]:>20}{names[1][:20]:>20}"]
    totals = zip(("documents", "tokens", "trained tokens"), *comparison.totals, strict=True)
    lines += [f"{name:16}{first:>20,}{second:>20,}" for name, first, second in totals]
    rows = [(kind, number) for kind, number in comparison.counts.items() if number or kind == EQUAL]
    return "\n".join([*lines, "", *(f"{k:16}{quantity(number, 'row'):>20}" for k, number in rows)])


def _difference(difference: Difference, names: Sequence[str], tokenizers: Sequence[Any]) -> str:
    shown = [
        (_texts(side, tokenizer), side, difference.at)
        for side, tokenizer in zip(difference.sides, tokenizers, strict=True)
    ]
    first, second = (_lines(*side) for side in shown)
    if first == second:  # other tokens of the same text
        first, second = (_token_lines(*side) for side in shown)
    compared = unified_diff(first, second, names[0], names[1], n=len(first), lineterm="")
    where = f" from token {difference.at:,} on" * all(side.lengths for side in difference.sides)
    heading = f"row {difference.row:,} · {difference.kind}{where}"
    return "\n".join([heading, *(line for line in compared if not line.startswith("@@"))])


def _texts(side: Tokens, tokenizer: Any) -> list[str]:
    """Return the text of each token; documents begin on a line of their own."""
    texts: list[str] = []
    for length in side.lengths:
        found = token_texts(side.ids[len(texts) : len(texts) + length].tolist(), tokenizer)
        texts += ["\n── next document ──\n" * bool(texts) + found[0], *found[1:]]
    return texts


def _lines(texts: Sequence[str], side: Tokens, at: int) -> list[str]:
    """Return the text around token `at` in lines, its trained stretches marked."""
    start, stop = max(at - _BEFORE, 0), min(at + _AFTER, len(texts))
    if not texts:
        return ["(dropped)"]
    weighted = zip(side.weights[start:stop].tolist(), texts[start:stop], strict=True)
    stretches = groupby(weighted, key=lambda token: token[0])
    text = mark_trained([(w, "".join(t for _, t in tokens)) for w, tokens in stretches])
    return f"{'… ' * (start > 0)}{text}{' …' * (stop < len(texts))}".split("\n")


def _token_lines(texts: Sequence[str], side: Tokens, at: int) -> list[str]:
    """Return a line for each token around `at`: its id, its weight, its text."""
    shown = range(max(at - _BEFORE, 0), min(at + _AFTER, len(texts)))
    return [f"{side.ids[i]:>8} {side.weights[i]:>6g} {escape_text(texts[i])!r}" for i in shown]
