"""An HTML page of packed rows: strips, tokens and attention masks.

PackedEpoch  →  the first rows, and some that hold a document to look at  →  JSON  →  rows.js draws

Everything drawn comes from the batches of the trainer's collator. The page has a bounded size.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from pathlib import Path
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden, quote
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_ROW, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.pages.page import HtmlPage, render
from trl_packing.tools.rows import (
    CUT,
    NO_STOP_TOKEN,
    PROPERTIES,
    PackedEpoch,
    PackedRow,
    RowDocument,
)
from trl_packing.tools.show import CONTEXT, token_texts

MAX_ROWS = 16
MAX_TOKENS = 32_768  # about 1 MB of JSON
_EXAMPLES = 2  # further rows for each property that none of the first rows has


def rows_page(
    epoch: PackedEpoch,
    *,
    title: str = "Packed rows",
    note: str = "",
    command: str = "",
    max_rows: int = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
) -> HtmlPage:
    """Return the HTML page, which a notebook shows as the value of a cell.

    `note` stands beside the title. The page shows at most `max_rows` rows from the start of the
    epoch, with at most `max_tokens` tokens, made by `command`.
    """
    texts: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    left = max_tokens
    for row, reason in _candidates(epoch, max_rows):
        if drawn and row.stop - row.start > left:
            break
        drawn.append(_row_data(epoch, row, texts, left) | {"reason": reason})
        left -= row.stop - row.start
    has_shared = any("segments" in row for row in drawn)
    rows = quantity(len(drawn), "row")
    unit = "bin" if epoch.capacity else "micro-batch"
    shown = f"{rows} of {len(epoch.bins()):,}, each strip a {unit}"
    if has_shared:
        shown = f"{rows}; with shared prefixes, a strip is a micro-batch"
    words = [escape_hidden(text) for text in texts]
    return render(
        Path(__file__).with_name("rows.html"),
        title=title,
        note=note,
        styles=["rows.css"],
        script="rows.js",
        figures=list(_figures(epoch)),
        shown=shown,
        has_shared=has_shared,
        has_images=any(row["images"] for row in drawn),
        counts=str(epoch.traced.counts or ""),
        command=command,
        data={"capacity": epoch.capacity, "properties": PROPERTIES, "rows": drawn, "texts": words},
    )


def _candidates(epoch: PackedEpoch, max_rows: int) -> Iterator[tuple[PackedRow, str]]:
    """Yield the first rows, and rows that hold documents with properties that these lack."""
    found: set[str] = set()
    of_document = epoch.group_of_documents(epoch.sampler.micro_batches())
    for row in islice(epoch.rows(range(of_document.max(initial=-1) + 1)), max_rows):
        yield row, ""
        found |= {name for document in row.documents for name in document.properties}
    for name, has in epoch.with_property.items():
        numbers = of_document[has & (of_document >= 0)][: _EXAMPLES * (name not in found)]
        for row in epoch.rows(np.unique(numbers).tolist()):
            properties = {each for document in row.documents for each in document.properties}
            if name in properties:
                yield row, f"shown for a document: {name}"
                found |= properties


def _figures(epoch: PackedEpoch) -> Iterator[tuple[str, str]]:
    """Yield value and name of each card."""
    documents, loads, has = epoch.documents, epoch.sampler.loads, epoch.with_property
    tokens, trained = int(documents.lengths().sum()), int(documents.num_trained().sum())
    yield f"{documents.num_documents:,}", "documents"
    yield f"{tokens:,}", "tokens"
    yield f"{trained / tokens:.0%}" if tokens else "–", "of them trained"
    yield f"{len(epoch.bins()):,}", "bins" if epoch.capacity else "micro-batches"
    if loads is not None:
        yield f"{loads.images.sum():,}", "images"
        yield f"{loads.tokens.sum() / tokens:.0%}", "of the tokens in images"
    for name in (CUT, NO_STOP_TOKEN):
        yield f"{int(has[name].sum()):,}", name


def _row_data(
    epoch: PackedEpoch, row: PackedRow, texts: dict[str, int], most: int
) -> dict[str, Any]:
    """Return the values that rows.js draws of `row`; lists have one entry for each token.

    At most `most` tokens are shown, and their texts get numbers in `texts`.
    """
    tokenizer = epoch.run.rules.eos.tokenizer
    short = f"{row.micro_batch + 1:,}"
    name = f"Micro-batch {short}"
    if row.start or row.stop < row.batch["input_ids"].shape[1]:
        name, short = f"{name}, bin {row.index + 1}", f"{short}.{row.index + 1}"
    names = {"ids": "input_ids", "labels": "labels", "positions": "position_ids"}
    names |= {"counts": TARGET_COUNTS} if row.segments else {}
    data: dict[str, Any] = {key: row.values(of)[:most].tolist() for key, of in names.items()}
    weights = None
    if TOKEN_WEIGHTS in row.batch:  # the shortest digits that give the same float32
        weights = [float(str(weight)) for weight in row.values(TOKEN_WEIGHTS)[:most]]
    words = _words(row, data["ids"], tokenizer)
    if row.segments:
        data["realTokens"] = sum(document.stop - document.start for document in row.documents)
        data["segments"] = row.segments
    return data | {
        "name": name,
        "short": short,
        "microBatch": row.micro_batch,
        "start": row.start,
        "stop": row.stop,
        "weights": weights,
        "texts": [texts.setdefault(word, len(texts)) for word in words],
        "documents": [_document_data(document, row, tokenizer) for document in row.documents],
        "images": list(_images(epoch, row)),
    }


def _images(epoch: PackedEpoch, row: PackedRow) -> Iterator[dict[str, Any]]:
    """Yield the size of each image and its tokens, counted from the first of the row."""
    for document in row.documents:
        first = document.start - row.start
        for image in document.images:
            user_row = int(epoch.documents.scalars[IMAGE_ROW][document.number])
            height, width = epoch.run.images.store.sizes(user_row)[image.image].tolist()
            size = f"{width} × {height}"
            yield {"start": first + image.start, "stop": first + image.stop, "size": size}


def _words(row: PackedRow, ids: list[int], tokenizer: Any) -> Iterator[str]:
    """Yield the text of each of the first tokens of `row`."""
    if not row.segments:
        for document in row.documents:
            part = ids[document.start - row.start : document.stop - row.start]
            yield from token_texts(part, tokenizer)
        return
    every = row.values("input_ids")
    key_index = row.batch["key_index"].numpy()
    bounds = (pairwise(row.batch[f"cu_seq_lens_{of}"].tolist()) for of in "qk")
    for (first, last), (start, end) in zip(*bounds, strict=True):
        # Text depends on few tokens before it; the keys of a segment end in its own tokens.
        path = key_index[max(end - (last - first) - CONTEXT, start) : end]
        texts = token_texts(every[path].tolist(), tokenizer)[-(last - first) :]
        yield from texts[: max(len(ids) - first, 0)]


def _document_data(document: RowDocument, row: PackedRow, tokenizer: Any) -> dict[str, Any]:
    part = slice(document.start, document.stop)
    labels, ids = (row.apart[name][0, part].numpy() for name in ("labels", "input_ids"))
    ending = None
    if document.number is not None:
        last = quote(tokenizer.decode(ids[-1:].tolist()))
        ending = f"{last}, {'not ' * bool(labels[-1] == IGNORE_INDEX)}trained"
    shown = vars(document) | {"trained": int((labels != IGNORE_INDEX).sum()), "ending": ending}
    del shown["images"]
    return shown
