"""The tokens around the first difference of two preparations, beside each other.

tokens of both   . . . . . . . . . x . . . .        x differs
excerpt                … . . . . . x . . . …        some before it, more after it
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from difflib import SequenceMatcher
from typing import Any

from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.tools.preparations.compare import DROPPED, LABELS, WEIGHTS, Difference
from trl_packing.tools.preparations.side import Tokens
from trl_packing.tools.preview.token_texts import token_texts

# The values that may differ although the tokens are the same.
_COMPARED = {LABELS: ("token_id", "label"), WEIGHTS: ("token_id", "weight")}


@dataclass(frozen=True)
class ShownToken:
    """One token of an excerpt.

    Attributes:
        text: of the token, "" for a part of a character.
        token_id: its id.
        label: its label.
        weight: its weight in the loss, 0 if it is not trained.
        starts_document: it is the first token of a further document of the row.
        differs: the other preparation has another token here, or the same with another label or
            weight if that is how the row differs.
    """

    text: str
    token_id: int
    label: int
    weight: float
    starts_document: bool = False
    differs: bool = False

    @property
    def is_trained(self) -> bool:
        return self.label != IGNORE_INDEX and self.weight > 0


@dataclass(frozen=True)
class Excerpt:
    """A part of the documents that one preparation makes of a row.

    Attributes:
        tokens: in order.
        before: tokens left out before them.
        after: tokens left out after them.
    """

    tokens: tuple[ShownToken, ...]
    before: int
    after: int


def excerpts(
    difference: Difference, tokenizers: Sequence[Any], *, before: int = 12, after: int = 60
) -> tuple[Excerpt, Excerpt]:
    """Return both sides of a difference.

    Args:
        difference: a row that differs.
        tokenizers: of both sides.
        before: tokens shown before the first one that differs.
        after: tokens shown from there on.
    """
    start, stop = max(difference.at - before, 0), difference.at + after
    cut = [
        _cut(side, tokenizer, start, stop)
        for side, tokenizer in zip(difference.sides, tokenizers, strict=True)
    ]
    if difference.kind == DROPPED:
        return cut[0], cut[1]
    fields = _COMPARED.get(difference.kind, ("token_id",))
    a, b = ([tuple(getattr(t, f) for f in fields) for t in one.tokens] for one in cut)
    equal: tuple[set[int], set[int]] = set(), set()
    for block in SequenceMatcher(None, a, b, autojunk=False).get_matching_blocks():
        equal[0].update(range(block.a, block.a + block.size))
        equal[1].update(range(block.b, block.b + block.size))
    first, second = (
        replace(
            excerpt,
            tokens=tuple(replace(t, differs=i not in same) for i, t in enumerate(excerpt.tokens)),
        )
        for excerpt, same in zip(cut, equal, strict=True)
    )
    return first, second


def _cut(side: Tokens, tokenizer: Any, start: int, stop: int) -> Excerpt:
    texts: list[str] = []
    starts = set()
    for length in side.lengths:
        starts.add(len(texts))
        texts += token_texts(side.ids[len(texts) : len(texts) + length].tolist(), tokenizer)
    shown = range(min(start, len(texts)), min(stop, len(texts)))
    tokens = tuple(
        ShownToken(
            texts[i],
            int(side.ids[i]),
            int(side.labels[i]),
            float(side.weights[i]),
            starts_document=i > 0 and i in starts,
        )
        for i in shown
    )
    return Excerpt(tokens, shown.start, len(texts) - shown.stop)
