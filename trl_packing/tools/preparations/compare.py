"""Two preparations of the same rows, compared token by token and label by label.

rows  →  documents of each preparation, with the row that they come from  →  one kind for each row

    equal             the same tokens, labels and weights
    dropped by one    one of the two keeps nothing of the row
    cut differently   the same text, shortened to other documents
    tokens differ     another text, or other tokens for it
    labels differ     the same tokens, others of them trained
    weights differ    the same tokens trained, with other weights

The first token of a document is never a target, so its label is not compared.
"""

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from trl_packing.tools.preparations.side import Prepared, Side, Tokens

DROPPED, CUT = "dropped by one", "cut differently"
TOKENS, LABELS, WEIGHTS = "tokens differ", "labels differ", "weights differ"
DIFFERENCES = (DROPPED, CUT, TOKENS, LABELS, WEIGHTS)
EQUAL, DROPPED_BY_BOTH = "equal", "dropped by both"

_EXAMPLES = 3  # differences of each kind that are kept
_CHUNK = 1000  # rows that are read at once


@dataclass(frozen=True, eq=False)
class Difference:
    """A row that two preparations make different documents of.

    Attributes:
        row: its number in the data set.
        kind: one of `DIFFERENCES`.
        sides: the documents of both preparations; without tokens if the row is dropped.
        at: the first token that differs.
    """

    row: int
    kind: str
    sides: tuple[Tokens, Tokens]
    at: int


@dataclass(eq=False)
class Comparison:
    """Two preparations of one data set.

    Attributes:
        names: of the preparations.
        rows: rows of the data set.
        counts: rows by kind: equal, dropped by both, or one of `DIFFERENCES`.
        totals: documents, tokens and trained tokens of each preparation, ``(2, 3)`` int64.
        differences: the first rows of each kind of difference.
    """

    names: tuple[str, str]
    rows: int
    counts: dict[str, int] = field(
        default_factory=lambda: dict.fromkeys((EQUAL, DROPPED_BY_BOTH, *DIFFERENCES), 0)
    )
    totals: np.ndarray = field(default_factory=lambda: np.zeros((2, 3), np.int64))
    differences: list[Difference] = field(default_factory=list)

    @property
    def different(self) -> int:
        """Return the rows that differ."""
        return sum(self.counts[kind] for kind in DIFFERENCES)

    @property
    def is_equal(self) -> bool:
        """Whether both preparations make the same documents."""
        return self.different == 0

    def to_dict(self) -> dict[str, Any]:
        """Return the comparison as values that JSON holds."""
        names = ("documents", "tokens", "trained_tokens")
        return {
            "names": self.names,
            "is_equal": self.is_equal,
            "rows": self.rows,
            "counts": self.counts,
            **dict(zip(names, self.totals.T.tolist(), strict=True)),
            "differences": [
                {
                    "row": found.row,
                    "kind": found.kind,
                    "first_token": found.at,
                    "sides": [side.to_dict() for side in found.sides],
                }
                for found in self.differences
            ],
        }


def compare(first: Side, second: Side) -> Comparison:
    """Compare two preparations of the same rows.

    Only lengths are held in memory; documents are read 1,000 rows at a time.

    Raises:
        ValueError: the sides have different rows, or one of them cannot be prepared.
    """
    rows = len(first.run.dataset)
    if rows != len(second.run.dataset):
        raise ValueError(
            f"{first.name} has {rows:,} rows and {second.name} has {len(second.run.dataset):,}; "
            "compare preparations of the same rows"
        )
    prepared = first.prepared(), second.prepared()
    same_text = _SameText(first, second, prepared)
    found = Comparison((first.name, second.name), rows)
    for row, sides in _pairs(prepared, rows):
        found.totals += [[len(side.lengths), len(side.ids), side.num_trained] for side in sides]
        kind = _kind(*sides)
        if kind == TOKENS and same_text(row):
            kind = CUT
        kind = kind or (EQUAL if sides[0].lengths else DROPPED_BY_BOTH)
        found.counts[kind] += 1
        if kind in DIFFERENCES and found.counts[kind] <= _EXAMPLES:
            at = _first_difference(kind, *sides)
            found.differences.append(Difference(row, kind, sides, at))
    return found


def _pairs(
    prepared: tuple[Prepared, Prepared], rows: int
) -> Iterator[tuple[int, tuple[Tokens, Tokens]]]:
    for first in range(0, rows, _CHUNK):
        end = min(first + _CHUNK, rows)
        both = (side.of_rows(first, end) for side in prepared)
        yield from enumerate(zip(*both, strict=True), first)


def _kind(a: Tokens, b: Tokens) -> str | None:
    """Return how the documents of one row differ, None if they are equal."""
    if bool(a.lengths) != bool(b.lengths):
        return DROPPED
    if a.lengths != b.lengths or not np.array_equal(a.ids, b.ids):
        return TOKENS
    if not np.array_equal(a.labels, b.labels):
        return LABELS
    return None if np.array_equal(a.weights, b.weights) else WEIGHTS


def _first_difference(kind: str, a: Tokens, b: Tokens) -> int:
    name = {LABELS: "labels", WEIGHTS: "weights"}.get(kind, "ids")
    number = min(len(a.ids), len(b.ids))
    differs = getattr(a, name)[:number] != getattr(b, name)[:number]
    return int(np.argmax(differs)) if differs.any() else number


class _SameText:
    """Whether both sides make the same tokens of a row if nothing is cut.

    Rows that either side may have cut are prepared once more without a max_length, when the first
    of them is asked for. Row 0 is among them, because the first row decides the format of all.
    """

    def __init__(self, first: Side, second: Side, prepared: tuple[Prepared, Prepared]):
        self.sides = first, second
        limits = (side.run.args.max_length for side in self.sides)
        touched = [side.touches(limit) for side, limit in zip(prepared, limits, strict=True)]
        self.rows = np.unique(np.concatenate([*touched, [0]]))
        self.whole: tuple[Prepared, Prepared] | None = None

    def __call__(self, row: int) -> bool:
        at = int(np.searchsorted(self.rows, row))
        if at == len(self.rows) or self.rows[at] != row:
            return False
        if self.whole is None:
            first, second = (side.prepared(self.rows, max_length=None) for side in self.sides)
            self.whole = first, second
        ((a,), (b,)) = (side.of_rows(row, row + 1) for side in self.whole)
        return np.array_equal(a.ids, b.ids)
