"""Rows of a data set that cannot be trained, counted by kind, with one sentence for each kind.

    row 4, 9 and 17     its 'completion' is int 5       row 4 …: its 'completion' is int 5 (2 such
    row 9               its 'completion' is int 7       rows)
    row 17              message 1 has no role           row 17 …: message 1 has no role

A data set has bad rows by the dozen; if each run named only one of them, each would cost a run.
"""

import re
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from typing import Any

import numpy as np

from trl_packing.documents.labels import DOCUMENT_WEIGHT, MASK_COLUMNS, TOKEN_COLUMNS, TOKEN_WEIGHTS

# Numbers and quotations: sentences on rows of one kind differ only in these.
_VALUES = re.compile(r"\d+|'[^']*'|\"[^\"]*\"")
_MOST_KINDS = 5


def in_one_sentence(errors: Iterable[str]) -> str:
    """Return one sentence for each kind of error, with the number of its rows.

    Example:
        >>> in_one_sentence(f"row {row}: it has {size} weights" for row, size in ((4, 7), (9, 8)))
        'row 4: it has 7 weights (2 such rows)'
    """
    first: dict[str, str] = {}
    number: Counter[str] = Counter()
    for error in errors:
        kind = _VALUES.sub("", error)
        first.setdefault(kind, error)
        number[kind] += 1
    shown = number.most_common(_MOST_KINDS)
    sentences = [first[kind] + f" ({times:,} such rows)" * (times > 1) for kind, times in shown]
    if others := number.total() - sum(times for _, times in shown):
        sentences.append(f"{others:,} rows for other reasons")
    return "; also ".join(sentences)


def and_others(rows: np.ndarray) -> str:
    """Return the number of `rows`, to append to a sentence that names the first; "" for one row.

    Example:
        >>> and_others(np.array([4, 9])), and_others(np.array([4]))
        (' (2 such rows)', '')
    """
    return f" ({len(rows):,} such rows)" * (len(rows) > 1)


def lone_surrogate(text: str) -> str | None:
    """Return a sentence on the first character that is not valid Unicode; None without one."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        return (
            f"its text has half a character, the lone surrogate {text[error.start]!r}; repair it: "
            "text.encode('utf-16', 'surrogatepass').decode('utf-16', 'replace')"
        )
    return None


def check_same_columns(
    batch: Mapping[str, Sequence[Any]], rows: Sequence[int], columns: Collection[str]
) -> None:
    """Raise ValueError naming the first row of a stream whose columns differ from those of row 0.

    Args:
        batch: values by column, None where a row lacks the column.
        rows: numbers of the rows.
        columns: columns of row 0. Only columns of tokens and weights are compared.
    """
    for column in _BY_TOKEN:
        is_null = [value is None for value in batch.get(column, [None] * len(rows))]
        wrong = np.flatnonzero(np.array(is_null) == (column in columns))
        if len(wrong):
            differs = (
                f"no {column!r}, but others have"
                if column in columns
                else f"{column!r}, but its first row has none"
            )
            raise ValueError(
                f"row {rows[wrong[0]]} of the stream has {differs}; give all rows the same columns"
                f", and no null values{and_others(wrong)}"
            )


@contextmanager
def named_if_beyond_int64(
    batch: Mapping[str, Sequence[Any]], rows: Sequence[int]
) -> Iterator[None]:
    """Raise ValueError naming the row and column in place of an OverflowError of NumPy or Arrow."""
    try:
        yield
    except OverflowError as error:
        for column in (*TOKEN_COLUMNS, *MASK_COLUMNS):
            for row, values in zip(rows, batch.get(column, [[]] * len(rows)), strict=True):
                if beyond := [value for value in values or () if abs(value) >= 2**63]:
                    raise ValueError(
                        f"row {row} has {beyond[0]} in {column!r}, which 64 bits cannot hold; was "
                        "it tokenized with another tokenizer?"
                    ) from error
        raise


_BY_TOKEN = (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS, DOCUMENT_WEIGHT)
