"""Documents made visible: what one says and which of it is trained; where several lie in rows.

document · 31 tokens · 13 trained (42%) · ends in '<|im_end|>', trained      AAAAAAAAAAABBBBB
<|im_start|>user                                                             BCCCCCCCDDDDEEEE
Hi<|im_end|>                                                                 EEEEFFFFFGGGHHHH
<|im_start|>assistant                                                        IIIJJJJKKKKKLLL·
⟦Hello<|im_end|>⟧
"""

import re
import string
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from trl_packing.documents.labels import IGNORE_INDEX, document_labels
from trl_packing.documents.weights import token_weights
from trl_packing.formatting.printable import MARKS, escape_hidden, escape_text, quote

_COLORS = ("\x1b[1;32m", "\x1b[0m")  # bold green
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_NOTHING = "·"
_FAKED_WEIGHT = re.compile(r"^([\d.e+-]+)×")  # text that opens as a weight does
# Neighbors differ in hue: a terminal's background colors, and the same as RGB.
_HUES = ((44, "#9ecae9"), (43, "#f2cf5b"), (42, "#88d27a"), (45, "#d6a5c9"), (46, "#83bcb6"))


def show_document(
    document: Mapping[str, Any], tokenizer: Any, *, color: bool = False, name: str = "document"
) -> str:
    """Return `document` as text, its trained tokens between ⟦ and ⟧, or in color.

    document: has `input_ids` ``(T,)``, and `labels` or masks as `PackedCollator` takes them, and
        maybe `loss_weights`.
    tokenizer: decodes it.
    color: bold green instead of ⟦ and ⟧.
    name: what the heading calls it.

    A weight other than 1 is written before its tokens: ⟦0.5×Hello⟧. The first token of a document
    is never a target and shown so. Control, bidirectional and invisible characters of the text are
    shown as escapes (\\x1b, \\u202e), and so are ⟦ and ⟧: a document cannot act on the terminal
    or fake the end of its trained tokens.

    Raises ValueError if labels, masks or weights are not one per token.
    """
    ids = np.asarray(document["input_ids"], np.int64)
    labels = document_labels(document, ids)
    weights = np.where(labels == IGNORE_INDEX, 0, token_weights(document, len(ids)))
    weights[:1] = 0
    return "\n".join(
        [_heading(name, ids, weights, tokenizer), _body(ids, weights, tokenizer, color)]
    )


def _heading(name: str, ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> str:
    if not len(ids):
        return f"{escape_hidden(name)} · empty"
    trained = int((weights > 0).sum())
    last = tokenizer.decode(ids[-1:].tolist())
    share = f"{trained:,} trained ({trained / len(ids):.0%})"
    return (
        f"{escape_hidden(name)} · {len(ids):,} tokens · {share} · "
        f"ends in {quote(last)}, {'trained' if weights[-1] else 'not trained'}"
    )


def _body(ids: np.ndarray, weights: np.ndarray, tokenizer: Any, color: bool) -> str:
    opening, closing = _COLORS if color else MARKS
    parts = []
    for weight, text in _stretches(ids, weights, tokenizer):
        shown = escape_text(text)
        if weight == 1:
            shown = _FAKED_WEIGHT.sub(r"\1\\xd7", shown)
        times = "" if weight in (0, 1) else f"{weight:g}×"
        parts.append(f"{opening}{times}{shown}{closing}" if weight else shown)
    return "".join(parts)


def _stretches(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> Iterator[tuple[float, str]]:
    """Yield tokens of the same weight together, as text that adds up to the decoded document."""
    starts = np.flatnonzero(np.diff(weights, prepend=np.nan))
    shown = ""
    for start, stop in zip(starts, np.append(starts, len(ids))[1:], strict=True):
        # Decoded with what is before it: a word's space, or half of a character, belongs to it.
        text = tokenizer.decode(ids[:stop].tolist(), clean_up_tokenization_spaces=False)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}") if stop < len(ids) else text
        yield float(weights[start]), text[len(shown) :]
        shown = text


# --- rows -----------------------------------------------------------------------------------------


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
    """Return a picture of rows, a line each: letters are documents, "·" is padding.

    rows: the lengths of the documents of each row.
    documents: their numbers, as the bins of a plan have them, by which they are lettered, A to Z, a
        to z, and from A again; None: in their order over all rows.
    capacity: tokens up to which a row is padded; None: it ends with its documents.
    tokens_per_cell: a cell shows what its middle token belongs to.
    cells_per_line: lines break there; None: a row is one line.
    color: for a terminal, with a background that changes from document to document.
    html: the same for a notebook, as a `<pre>`: ``IPython.display.HTML(show_rows(..., html=True))``

    Raises ValueError for a row beyond capacity, and for cells or lines of less than one.

    >>> print(show_rows([[3, 2], [4]], capacity=6))
    AAABB·
    CCCC··
    """
    for name, size in (("tokens_per_cell", tokens_per_cell), ("cells_per_line", cells_per_line)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    lines: list[str] = []
    if documents is None:
        ends = np.cumsum([0, *map(len, rows)])
        documents = [range(start, end) for start, end in pairwise(ends.tolist())]
    for lengths, numbers in zip(rows, documents, strict=True):
        cells = _cells(lengths, numbers, capacity, tokens_per_cell)
        step = cells_per_line or max(len(cells), 1)
        lines += [_line(cells[i : i + step], color, html) for i in range(0, len(cells), step)]
    text = "\n".join(lines)
    return f'<pre style="line-height:1.3">{text}</pre>' if html else text


def _cells(
    lengths: Sequence[int], numbers: Sequence[int], capacity: int | None, tokens_per_cell: int
) -> list[int]:
    """Return the document of each cell of a row, -1 on padding."""
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    used = int(ends[-1]) if len(ends) else 0
    if capacity is not None and used > capacity:
        raise ValueError(f"a row of {used} tokens is beyond capacity={capacity}; raise it")
    shown = used if capacity is None else capacity
    middles = np.arange(tokens_per_cell // 2, shown, tokens_per_cell)
    # -1 stands last, for what lies beyond the documents.
    return np.array([*numbers, -1])[np.searchsorted(ends, middles, side="right")].tolist()


def _line(cells: Sequence[int], color: bool, html: bool) -> str:
    parts = []
    for document, group in groupby(cells):
        text = (_LETTERS[document % len(_LETTERS)] if document >= 0 else _NOTHING) * len([*group])
        code, rgb = _HUES[document % len(_HUES)]
        if document >= 0 and html:
            text = f'<span style="background:{rgb};color:#000">{text}</span>'
        elif document >= 0 and color:
            text = f"\x1b[30;{code}m{text}\x1b[0m"
        parts.append(text)
    return "".join(parts)
