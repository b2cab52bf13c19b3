"""Draw the documents of packed rows: a letter for each, "▒" where it is an image.

AAAAAAAAAAABBBBB
BCCC▒▒▒▒CCCDDDDE
EEEEFFFFFGGGHHH·
"""

import string
from collections.abc import Iterator, Sequence
from itertools import groupby, pairwise

import numpy as np

_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_PADDING, _ABOVE, _SHARED = -1, -2, -3  # cells that belong to no document alone
_IMAGE = "▒"
_SIGNS = {_PADDING: "·", _ABOVE: " ", _SHARED: "═"}
# Neighbors differ in hue: background colors of a terminal, and the same as RGB.
_GRAY = (47, "#c9ced4")
_HUES = ((44, "#9ecae9"), (43, "#f2cf5b"), (42, "#88d27a"), (45, "#d6a5c9"), (46, "#83bcb6"))


def show_rows(
    rows: Sequence[Sequence[int]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    shared: Sequence[Sequence[int]] | None = None,
    images: Sequence[Sequence[tuple[int, int]]] | None = None,
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
        shared: tokens that each document of a row shares with the document before it, as `depths`
            of `build_prefix_tree`. A row is then drawn as a tree, a line for each document: "═" is
            shared with the lines below, and stands once.
        images: tokens ``(start, stop)`` of the images of each row, drawn as "▒".
        capacity: pad each row to this many tokens; None: rows end with their documents.
        tokens_per_cell: tokens for each character, which shows the document of its middle token.
        cells_per_line: break lines after this many characters; None: a row is one line.
        color: add background colors for a terminal, which change from document to document.
        html: return a `<pre>` with these colors for a notebook:
            ``IPython.display.HTML(show_rows(..., html=True))``.

    Raises:
        ValueError: a row is longer than `capacity`, a cell or line would have no token, or a
            document would share more tokens than it has.

    Examples:
        >>> print(show_rows([[3, 2], [4]], capacity=6))
        AAABB·
        CCCC··
        >>> print(show_rows([[5, 2]], images=[[(1, 4)]]))
        A▒▒▒ABB
        >>> print(show_rows([[8, 7, 6]], shared=[[0, 4, 2]]))
        ════AAAA
            BBB
          CCCC
    """
    for name, size in (("tokens_per_cell", tokens_per_cell), ("cells_per_line", cells_per_line)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    if documents is None:
        ends = np.cumsum([0, *map(len, rows)])
        documents = [range(start, end) for start, end in pairwise(ends.tolist())]
    lines: list[str] = []
    if shared is not None:
        if capacity is not None or cells_per_line is not None:
            raise ValueError("a tree has a line for each document; leave out the size of lines")
        for tree in zip(rows, documents, shared, strict=True):
            drawn = _tree(*tree, tokens_per_cell)
            lines += [_line([(cell, False) for cell in row], color, html).rstrip() for row in drawn]
        rows = documents = ()
    for at, (lengths, numbers) in enumerate(zip(rows, documents, strict=True)):
        cells = _cells(lengths, numbers, images[at] if images else (), capacity, tokens_per_cell)
        step = cells_per_line or max(len(cells), 1)
        lines += [_line(cells[i : i + step], color, html) for i in range(0, len(cells), step)]
    text = "\n".join(lines)
    return f'<pre style="line-height:1.3">{text}</pre>' if html else text


def _cells(
    lengths: Sequence[int],
    numbers: Sequence[int],
    images: Sequence[tuple[int, int]],
    capacity: int | None,
    tokens_per_cell: int,
) -> list[tuple[int, bool]]:
    """Return the document of the middle token of each cell, and whether it belongs to an image."""
    owners = np.repeat(np.asarray(numbers, np.int64), np.asarray(lengths, np.int64))
    if capacity is not None:
        if len(owners) > capacity:
            raise ValueError(
                f"a row of {len(owners)} tokens is beyond capacity={capacity}; raise it"
            )
        owners = np.pad(owners, (0, capacity - len(owners)), constant_values=_PADDING)
    is_image = np.zeros(len(owners), bool)
    for start, stop in images:
        is_image[start:stop] = True
    middles = slice(tokens_per_cell // 2, None, tokens_per_cell)
    return [*zip(owners[middles].tolist(), is_image[middles].tolist(), strict=True)]


def _tree(
    lengths: Sequence[int], numbers: Sequence[int], shared: Sequence[int], tokens_per_cell: int
) -> Iterator[list[int]]:
    """Yield the cells of each document, which begins below the tokens that it shares."""
    next_shared = [*shared[1:], 0]
    for length, number, above, below in zip(lengths, numbers, shared, next_shared, strict=True):
        if not 0 <= above <= length:
            raise ValueError(f"shared={above} must be from 0 to the document's {length} tokens")
        # A cell shows its middle token. The last one shows the last token, which few share.
        at = np.arange(0, length, tokens_per_cell) + tokens_per_cell // 2
        at[-1:] = length - 1
        yield np.select([at < above, at < below], [_ABOVE, _SHARED], number).tolist()


def _line(cells: Sequence[tuple[int, bool]], color: bool, html: bool) -> str:
    """Return a line of cells: the document of each, and whether it shows an image."""
    parts = []
    for (document, is_image), group in groupby(cells):
        sign = _SIGNS.get(document) or _LETTERS[document % len(_LETTERS)]
        text = (_IMAGE if is_image else sign) * len([*group])
        code, rgb = _GRAY if document == _SHARED else _HUES[document % len(_HUES)]
        is_filled = document not in (_PADDING, _ABOVE)
        if is_filled and html:
            text = f'<span style="background:{rgb};color:#000">{text}</span>'
        elif is_filled and color:
            text = f"\x1b[30;{code}m{text}\x1b[0m"
        parts.append(text)
    return "".join(parts)
