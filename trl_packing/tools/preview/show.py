"""Show a document with its trained tokens marked, and draw the documents of packed rows.

document · 31 tokens · 13 trained (42%) · ends in '<|im_end|>', trained      AAAAAAAAAAABBBBB
<|im_start|>user                                                             BCCCCCCCDDDDEEEE
Hi<|im_end|>                                                                 EEEEFFFFFGGGHHHH
<|im_start|>assistant                                                        IIIJJJJKKKKKLLL·
⟦Hello<|im_end|>⟧
"""

import re
import string
from collections.abc import Iterable, Iterator, Mapping, Sequence
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from trl_packing.documents.labels import IGNORE_INDEX, document_labels
from trl_packing.documents.weights import token_weights
from trl_packing.formatting.printable import MARKS, escape_hidden, escape_text, quote

_COLORS = ("\x1b[1;32m", "\x1b[0m")  # bold green
_LETTERS = string.ascii_uppercase + string.ascii_lowercase
_PADDING, _ABOVE, _SHARED = -1, -2, -3  # cells that belong to no document alone
_SIGNS = {_PADDING: "·", _ABOVE: " ", _SHARED: "═"}
_FAKED_WEIGHT = re.compile(r"^([\d.e+-]+)×")  # text that looks like a weight
# Neighbors differ in hue: background colors of a terminal, and the same as RGB.
_GRAY = (47, "#c9ced4")
_HUES = ((44, "#9ecae9"), (43, "#f2cf5b"), (42, "#88d27a"), (45, "#d6a5c9"), (46, "#83bcb6"))


def show_document(
    document: Mapping[str, Any], tokenizer: Any, *, color: bool = False, name: str = "document"
) -> str:
    """Return `document` as text with its trained tokens between ⟦ and ⟧, or in color.

    A weight other than 1 stands before its tokens: ⟦0.5×Hello⟧. The first token of a document is
    never a target, and is shown as untrained. Control, bidirectional and invisible characters of
    the text are shown as escapes (\\x1b, \\u202e), and so are ⟦ and ⟧. Thus a document can neither
    act on the terminal nor fake the end of its trained tokens.

    Args:
        document: `input_ids` ``(T,)``, with `labels` or masks as `PackedCollator` takes them, and
            optionally `loss_weights`.
        tokenizer: decodes the document.
        color: mark trained tokens in bold green instead of ⟦ and ⟧.
        name: the name of the document in the heading.

    Raises:
        ValueError: labels, masks or weights do not have one value for each token.
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
    return mark_trained(_stretches(ids, weights, tokenizer), color=color)


def mark_trained(stretches: Iterable[tuple[float, str]], *, color: bool = False) -> str:
    """Return text with its trained stretches between ⟦ and ⟧, or in color.

    Characters that a reader does not see are shown as escapes, and so are ⟦ and ⟧.

    Args:
        stretches: the weight of each stretch of text, 0 if it is not trained, and the text.
        color: mark by bold green instead of ⟦ and ⟧.
    """
    opening, closing = _COLORS if color else MARKS
    parts = []
    for weight, text in stretches:
        shown = escape_text(text)
        if weight == 1:
            shown = _FAKED_WEIGHT.sub(r"\1\\xd7", shown)
        times = "" if weight in (0, 1) else f"{weight:g}×"
        parts.append(f"{opening}{times}{shown}{closing}" if weight else shown)
    return "".join(parts)


def _stretches(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> Iterator[tuple[float, str]]:
    """Yield consecutive tokens of one weight as text; the texts add up to the decoded document."""
    starts = np.flatnonzero(np.diff(weights, prepend=np.nan))
    shown = ""
    for start, stop in zip(starts, np.append(starts, len(ids))[1:], strict=True):
        # Decode from the start: the space before a word, or half of a character, may depend on it.
        text = tokenizer.decode(ids[:stop].tolist(), clean_up_tokenization_spaces=False)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}") if stop < len(ids) else text
        yield float(weights[start]), text[len(shown) :]
        shown = text


# --- rows -----------------------------------------------------------------------------------------


def show_rows(
    rows: Sequence[Sequence[int]],
    *,
    documents: Sequence[Sequence[int]] | None = None,
    shared: Sequence[Sequence[int]] | None = None,
    capacity: int | None = None,
    tokens_per_cell: int = 1,
    cells_per_line: int | None = None,
    color: bool = False,
    html: bool = False,
) -> str:
    """Return a picture of rows, one line for each: letters are documents, "·" is padding.

    For the tokens of a run's rows, see `tools/rows/page.py` and `trl-packing inspect --html`.

    Args:
        rows: the lengths of the documents of each row, in tokens.
        documents: the numbers of these documents, such as the bins of a plan. A number selects the
            letter: A to Z, a to z, then A again. None numbers the documents in order.
        shared: tokens that each document of a row shares with the document before it, as `depths`
            of `build_prefix_tree`. A row is then drawn as a tree, a line for each document: "═" is
            shared with the lines below, and stands once.
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
        >>> print(show_rows([[8, 7, 6]], shared=[[0, 4, 2]]))
        ════AAAA
            BBB
          CCCC
    """
    for name, size in (("tokens_per_cell", tokens_per_cell), ("cells_per_line", cells_per_line)):
        if size is not None and size < 1:
            raise ValueError(f"{name}={size} must be at least 1")
    lines: list[str] = []
    if documents is None:
        ends = np.cumsum([0, *map(len, rows)])
        documents = [range(start, end) for start, end in pairwise(ends.tolist())]
    if shared is not None:
        if capacity is not None or cells_per_line is not None:
            raise ValueError("a tree has a line for each document; leave out the size of lines")
        trees = zip(rows, documents, shared, strict=True)
        lines = [line for tree in trees for line in _tree(*tree, tokens_per_cell, color, html)]
        rows = documents = ()
    for lengths, numbers in zip(rows, documents, strict=True):
        cells = _cells(lengths, numbers, capacity, tokens_per_cell)
        step = cells_per_line or max(len(cells), 1)
        lines += [_line(cells[i : i + step], color, html) for i in range(0, len(cells), step)]
    text = "\n".join(lines)
    return f'<pre style="line-height:1.3">{text}</pre>' if html else text


def _cells(
    lengths: Sequence[int], numbers: Sequence[int], capacity: int | None, tokens_per_cell: int
) -> list[int]:
    """Return the document of each cell of a row, or padding."""
    ends = np.cumsum(np.asarray(lengths, dtype=np.int64))
    used = int(ends[-1]) if len(ends) else 0
    if capacity is not None and used > capacity:
        raise ValueError(f"a row of {used} tokens is beyond capacity={capacity}; raise it")
    shown = used if capacity is None else capacity
    middles = np.arange(tokens_per_cell // 2, shown, tokens_per_cell)
    # Padding comes last, for positions after the documents.
    return np.array([*numbers, _PADDING])[np.searchsorted(ends, middles, side="right")].tolist()


def _tree(
    lengths: Sequence[int],
    numbers: Sequence[int],
    shared: Sequence[int],
    tokens_per_cell: int,
    color: bool,
    html: bool,
) -> Iterator[str]:
    """Yield a line for each document, which begins below the tokens that it shares."""
    next_shared = [*shared[1:], 0]
    for length, number, above, below in zip(lengths, numbers, shared, next_shared, strict=True):
        if not 0 <= above <= length:
            raise ValueError(f"shared={above} must be from 0 to the document's {length} tokens")
        # A cell shows its middle token. The last one shows the last token, which few share.
        at = np.arange(0, length, tokens_per_cell) + tokens_per_cell // 2
        at[-1:] = length - 1
        cells = np.select([at < above, at < below], [_ABOVE, _SHARED], number).tolist()
        yield _line(cells, color, html).rstrip()


def _line(cells: Sequence[int], color: bool, html: bool) -> str:
    parts = []
    for document, group in groupby(cells):
        sign = _LETTERS[document % len(_LETTERS)] if document >= 0 else _SIGNS[document]
        text = sign * len([*group])
        code, rgb = _GRAY if document == _SHARED else _HUES[document % len(_HUES)]
        is_filled = document not in (_PADDING, _ABOVE)
        if is_filled and html:
            text = f'<span style="background:{rgb};color:#000">{text}</span>'
        elif is_filled and color:
            text = f"\x1b[30;{code}m{text}\x1b[0m"
        parts.append(text)
    return "".join(parts)
