"""Draw the documents of packed rows: a letter for each.

AAAAAAAAAAABBBBB
BCCCCCCCCCCDDDDE
EEEEFFFFFGGGHHH·
"""

import string
from collections.abc import Sequence
from itertools import groupby, pairwise

import numpy as np

_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_PADDING = -1
# Neighbors differ in hue: background colors of a terminal, and the same as RGB.
_HUES = ((44, "#9ecae9"), (43, "#f2cf5b"), (42, "#88d27a"), (45, "#d6a5c9"), (46, "#83bcb6"))


def show_rows(
    rows: Sequence[Sequence[int]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    capacity: int | None = None,
    tokens_per_cell: int = 1,
    cells_per_line: int | None = None,
    color: bool = False,
    html: bool = False,
) -> str:
    """Return a picture of rows, one line for each: letters are documents, "·" is padding.

    For the tokens of a run's rows, see `tools/rows_page.py` and `trl-packing inspect --html`.

    Args:
        rows: the lengths of the documents of each row, in tokens.
        documents: the numbers of these documents, such as the bins of a plan. A number selects the
            letter: A to Z, a to z, then A again. None numbers the documents in order.
        capacity: pad each row to this many tokens; None: rows end with their documents.
        tokens_per_cell: tokens for each character, which shows the document of its middle token.
        cells_per_line: break lines after this many characters; None: a row is one line.
        color: add background colors for a terminal, which change from document to document.
        html: return a `<pre>` with these colors for a notebook:
            ``IPython.display.HTML(show_rows(..., html=True))``.

    Raises:
        ValueError: a row is longer than `capacity`.

    Examples:
        >>> print(show_rows([[3, 2], [4]], capacity=6))
        AAABB·
        CCCC··
    """
    if documents is None:
        ends = np.cumsum([0, *map(len, rows)])
        documents = [range(start, end) for start, end in pairwise(ends.tolist())]
    lines: list[str] = []
    for lengths, numbers in zip(rows, documents, strict=True):
        owners = np.repeat(np.asarray(numbers, np.int64), np.asarray(lengths, np.int64))
        room = len(owners) if capacity is None else capacity
        if len(owners) > room:
            raise ValueError(f"a row of {len(owners)} tokens is beyond capacity={room}; raise it")
        owners = np.pad(owners, (0, room - len(owners)), constant_values=_PADDING)
        cells = owners[tokens_per_cell // 2 :: tokens_per_cell].tolist()
        step = cells_per_line or max(len(cells), 1)
        lines += [_line(cells[i : i + step], color, html) for i in range(0, len(cells), step)]
    text = "\n".join(lines)
    return f'<pre style="line-height:1.3">{text}</pre>' if html else text


def _line(cells: Sequence[int], color: bool, html: bool) -> str:
    """Return a line of cells, which name the document of each."""
    parts = []
    for document, group in groupby(cells):
        sign = "·" if document == _PADDING else _LETTERS[document % len(_LETTERS)]
        text = sign * len([*group])
        code, rgb = _HUES[document % len(_HUES)]
        if document != _PADDING and html:
            text = f'<span style="background:{rgb};color:#000">{text}</span>'
        elif document != _PADDING and color:
            text = f"\x1b[30;{code}m{text}\x1b[0m"
        parts.append(text)
    return "".join(parts)
