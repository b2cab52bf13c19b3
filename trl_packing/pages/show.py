"""A document as text with its trained tokens marked, and the documents of packed rows as letters.

document · 422 tokens · 1 image · 13 trained (3%) · ends in '<|im_end|>', trained
<|im_start|>user
<|vision_start|>[image 640×480, 391 tokens]<|vision_end|>Hi<|im_end|>
<|im_start|>assistant
⟦Hello<|im_end|>⟧

AAAAAAAAAAABBBBB
BCCCCCCCCCCDDDDE
EEEEFFFFFGGGHHH·
"""

import re
import string
from collections.abc import Iterator, Sequence
from functools import partial
from itertools import groupby, pairwise
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.data.printable import MARKS, escape_hidden, quote
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_SIZES, Document, document_labels
from trl_packing.documents.weights import token_weights
from trl_packing.vision.documents import ImageTokens, images_of

_COLORS = ("\x1b[1;32m", "\x1b[0m")  # bold green
_UNFINISHED = "\N{REPLACEMENT CHARACTER}"
# A decoder looks at few tokens before the current one: for a space, or the bytes of a character.
CONTEXT = 4
_FAKED_WEIGHT = re.compile(r"^([\d.e+-]+)×")  # text that looks like a weight


def show_document(
    document: Document, tokenizer: Any, *, color: bool = False, name: str = "document"
) -> str:
    """Return `document` as text with its trained tokens between ⟦ and ⟧, or in color.

    A weight other than 1 stands before its tokens: ⟦0.5×Hello⟧. The first token of a document is
    never a target, and is shown as untrained. Control, bidirectional and invisible characters of
    the text are shown as escapes (\\x1b, \\u202e), and so are ⟦ and ⟧. Thus a document can neither
    act on the terminal nor fake the end of its trained tokens. The tokens of an image are shown as
    ``[image 640×480, 391 tokens]``, in pixels of width and height if its size is known.

    Args:
        document: `input_ids` ``(T,)``, with `labels` or masks as `PackedCollator` takes them, and
            optionally `loss_weights`, `image_ids`, and `image_sizes` (heights and widths).
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
    heading = f"{escape_hidden(name)} · empty"
    if len(ids):
        trained = int((weights > 0).sum())
        images = len(images_of(document))
        words = f"{len(ids):,} tokens"
        if images:
            words += f" · {quantity(images, 'image')}"
        last = quote(tokenizer.decode(ids[-1:].tolist()))
        heading = (
            f"{escape_hidden(name)} · {words} · {trained:,} trained ({trained / len(ids):.0%}) · "
            f"ends in {last}, {'trained' if weights[-1] else 'not trained'}"
        )
    return "\n".join([heading, "".join(_marked(document, ids, weights, tokenizer, color))])


def image_in_words(image: ImageTokens, sizes: Sequence[Sequence[int]] | None) -> str:
    """Return the words for an image; `sizes` are heights and widths of those of the user's row."""
    size = ""
    if sizes is not None:
        height, width = sizes[image.image]
        size = f" {width}×{height}"
    return f"[image{size}, {quantity(image.stop - image.start, 'token')}]"


def _marked(
    document: Document, ids: np.ndarray, weights: np.ndarray, tokenizer: Any, color: bool
) -> Iterator[str]:
    """Yield consecutive tokens of one weight as text, marked if trained, and images as words."""
    opening, closing = _COLORS if color else MARKS
    images = images_of(document)
    words = {image.start: image_in_words(image, document.get(IMAGE_SIZES)) for image in images}
    numbers = np.zeros(len(ids), np.int64)  # equal for the tokens of an image, and 0 on text
    for image in images:
        numbers[image.start : image.stop] = image.start + 1
    changes = np.diff(weights, prepend=np.nan) != 0
    starts = np.flatnonzero(changes | (np.diff(numbers, prepend=0) != 0)).tolist()
    before = ""
    for start, stop in pairwise([*starts, len(ids)]):
        # Decode from the start: the space before a word, or half of a character, may depend on it.
        text = tokenizer.decode(ids[:stop].tolist(), clean_up_tokenization_spaces=False)
        text = text.rstrip(_UNFINISHED) if stop < len(ids) else text
        shown = escape_hidden(words.get(start, "") if numbers[start] else text[len(before) :])
        before = text
        weight = weights[start]
        if weight == 1:
            shown = _FAKED_WEIGHT.sub(r"\1\\xd7", shown)
        times = "" if weight in (0, 1) else f"{weight:g}×"
        yield f"{opening}{times}{shown}{closing}" if weight else shown


def token_texts(ids: Sequence[int], tokenizer: Any) -> list[str]:
    """Return the text that each token adds to a document, "" for parts of a character."""
    decode = partial(tokenizer.decode, clean_up_tokenization_spaces=False)
    texts: list[str] = []
    done = 0  # tokens whose text is known
    for end in range(1, len(ids) + 1):
        first = max(done - CONTEXT, 0)
        before = decode(list(ids[first:done]))
        text = decode(list(ids[first:end]))
        is_last = end == len(ids)
        if text.endswith(_UNFINISHED) and not is_last and end - done < 2 * CONTEXT:
            texts.append("")
            continue
        texts.append(text[len(before) :])
        done = end
    return texts


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

    For the tokens of a run's rows, see `pages/rows.py` and `trl-packing inspect --html`.

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
