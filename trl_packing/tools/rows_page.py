"""An HTML page of packed rows: strips, tokens and attention masks.

PackedEpoch  →  the first rows, and some that hold a document to look at  →  JSON  →  rows.js draws

Everything drawn comes from the batches of the trainer's collator. The page has a bounded size.
"""

from collections.abc import Iterator
from itertools import islice, pairwise
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_text, quote
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_ROW, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.tools.preview.show import CONTEXT, token_texts
from trl_packing.tools.rows import (
    CUT,
    NO_STOP_TOKEN,
    PROPERTIES,
    PackedEpoch,
    PackedRow,
    RowDocument,
)
from trl_packing.training.page import HtmlPage, asset, cards, escape, page, section

MAX_ROWS = 16
MAX_TOKENS = 32_768  # about 1 MB of JSON
_EXAMPLES = 2  # further rows for each property that none of the first rows has

_LEGEND = (
    '<div class="legend"><span class="target">trained</span><span class="prompt">not trained</span>'
    '<span class="free">free, costs nothing</span>'
    '<span class="padding">padding, computed and masked</span>{more}</div>'
)
_SHARED = '<span class="many">shared by several documents, computed once</span>'
_IMAGE = '<span class="pictures">tokens of an image</span>'
_ROW = """<section>
<h2><span id="row-name"></span> <span class="note" id="row-summary"></span></h2>
<div class="tree" id="tree" hidden></div>
<div class="row"><div class="documents" id="documents"></div>
<div class="mask" id="mask"></div></div>
<div id="tip" role="status" hidden></div>
</section>"""


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

    Args:
        epoch: the rows of a run, in its first epoch.
        title: of the page.
        note: shown beside the title.
        command: the command line that made it; "" leaves it out.
        max_rows: rows from the start of the epoch.
        max_tokens: tokens of all rows shown.

    Raises:
        ValueError: `max_rows` or `max_tokens` is below 1.
    """
    for name, value in (("max_rows", max_rows), ("max_tokens", max_tokens)):
        if value < 1:
            raise ValueError(f"{name}={value} must be at least 1")
    texts: dict[str, int] = {}
    drawn: list[dict[str, Any]] = []
    left = max_tokens
    for row, reason in _candidates(epoch, max_rows):
        if drawn and row.stop - row.start > left:
            break
        drawn.append(_row_data(epoch, row, reason, texts, left))
        left -= row.stop - row.start
    is_shared = any("segments" in row for row in drawn)
    rows = quantity(len(drawn), "row")
    shown = f"{rows} of {len(epoch.bins()):,}, each strip a {epoch.unit}"
    if is_shared:
        shown = f"{rows}; with shared prefixes, a strip is a micro-batch"
    more = _SHARED * is_shared + _IMAGE * any(row["images"] for row in drawn)
    counts = str(epoch.traced.counts or "")
    sections = [
        _cards(epoch),
        section(
            "Rows of epoch 1",
            _LEGEND.format(more=more),
            '<div class="filters" id="filters"></div><div id="strips"></div>',
            note=f"{shown}; click one for its tokens",
        ),
        _ROW,
        *[section("Losses of preparation", f"<pre>{escape(counts)}</pre>")] * bool(counts),
        *[section("How it was made", f"<pre>{escape(command)}</pre>")] * bool(command),
    ]
    data: dict[str, Any] = {"capacity": epoch.capacity, "properties": PROPERTIES, "rows": drawn}
    data["texts"] = [escape_text(text) for text in texts]
    style = asset("rows.css")
    return page(title, sections, data=data, script=asset("rows.js"), style=style, note=note)


def _candidates(epoch: PackedEpoch, max_rows: int) -> Iterator[tuple[PackedRow, str]]:
    """Yield the first rows, and rows that hold documents with properties that these lack."""
    found: set[str] = set()
    of_document = epoch.group_of_documents(epoch.sampler.micro_batches())
    for row in islice(epoch.rows(range(int(of_document.max(initial=-1)) + 1)), max_rows):
        yield row, ""
        found |= {name for document in row.documents for name in document.properties}
    examples = {
        int(document): name
        for name, has in epoch.with_property.items()
        if name not in found
        for document in np.flatnonzero(has & (of_document >= 0))[:_EXAMPLES]
    }
    for row in epoch.rows(np.unique(of_document[[*examples]]).tolist() if examples else []):
        for name in {examples[d.number] for d in row.documents if d.number in examples}:
            yield row, f"shown for a document: {name}"
            break


def _cards(epoch: PackedEpoch) -> str:
    documents = epoch.documents
    tokens, trained = int(documents.lengths().sum()), int(documents.num_trained().sum())
    shown = [
        (f"{documents.num_documents:,}", "documents"),
        (f"{tokens:,}", "tokens"),
        (f"{trained / tokens:.0%}" if tokens else "–", "of them trained"),
        (f"{len(epoch.bins()):,}", "bins" if epoch.capacity else "micro-batches"),
    ]
    if (computed := epoch.computed_tokens()) is not None:
        shown.insert(3, (f"{computed:,}", "computed, prefixes once"))
    if (loads := epoch.sampler.loads) is not None:
        shown.append((f"{loads.images.sum():,}", "images"))
        shown.append((f"{loads.tokens.sum() / tokens:.0%}", "of the tokens in images"))
    has = epoch.with_property
    return cards([*shown, *((f"{int(has[name].sum()):,}", name) for name in (CUT, NO_STOP_TOKEN))])


# --- the values that rows.js draws ----------------------------------------------------------------


def _row_data(
    epoch: PackedEpoch, row: PackedRow, reason: str, texts: dict[str, int], most: int
) -> dict[str, Any]:
    """Return the values that rows.js draws of `row`; lists have one entry for each token.

    Args:
        epoch: the epoch of the row.
        row: a packed row.
        reason: why it is shown; "" for the first rows.
        texts: texts of tokens and their numbers; those of this row are added.
        most: tokens that are shown.
    """
    tokenizer, short = epoch.run.preparation.eos.tokenizer, f"{row.micro_batch + 1:,}"
    name = f"Micro-batch {short}"
    if row.start or row.stop < row.batch["input_ids"].shape[1]:
        name, short = f"{name}, {epoch.unit} {row.index + 1}", f"{short}.{row.index + 1}"
    ids, weights = row.values("input_ids")[:most], None
    if TOKEN_WEIGHTS in row.batch:  # the shortest digits that give the same float32
        weights = [float(str(weight)) for weight in row.values(TOKEN_WEIGHTS)[:most]]
    data = {
        "name": name,
        "short": short,
        "reason": reason,
        "microBatch": row.micro_batch,
        "start": row.start,
        "stop": row.stop,
        "ids": ids.tolist(),
        "labels": row.values("labels")[:most].tolist(),
        "positions": row.values("position_ids")[:most].tolist(),
        "weights": weights,
        "texts": [texts.setdefault(word, len(texts)) for word in _words(row, ids, tokenizer)],
        "documents": [_document_data(document, row, tokenizer) for document in row.documents],
        "images": list(_images(epoch, row)),
    }
    if row.segments:
        counts = row.values(TARGET_COUNTS)[:most].tolist()
        data |= {"realTokens": row.real_tokens, "counts": counts, "segments": row.segments}
    return data


def _images(epoch: PackedEpoch, row: PackedRow) -> Iterator[dict[str, Any]]:
    """Yield the size of each image and its tokens, counted from the first of the row."""
    for document in row.documents:
        first = document.start - row.start
        for image in document.images:
            user_row = int(epoch.documents.scalars[IMAGE_ROW][document.number])
            height, width = epoch.run.images.store.sizes(user_row)[image.image].tolist()
            size = f"{width} × {height}"
            yield {"start": first + image.start, "stop": first + image.stop, "size": size}


def _words(row: PackedRow, ids: np.ndarray, tokenizer: Any) -> list[str]:
    """Return the text of each of the first tokens of `row`."""
    if not row.segments:
        parts = [ids[d.start - row.start : d.stop - row.start] for d in row.documents]
        return [word for part in parts for word in token_texts(part.tolist(), tokenizer)]
    batch = row.batch
    key_index, boundaries = batch["key_index"].numpy(), batch["cu_seq_lens_k"].tolist()
    words: list[str] = []
    lengths = np.diff(batch["cu_seq_lens_q"]).tolist()
    for own, (start, end) in zip(lengths, pairwise(boundaries), strict=True):
        # Text depends on few tokens before it; the keys of a segment end in its own tokens.
        path = key_index[max(end - own - CONTEXT, start) : end]
        texts = token_texts(row.values("input_ids")[path].tolist(), tokenizer)
        words += texts[len(texts) - own :]
    return words[: len(ids)]


def _document_data(document: RowDocument, row: PackedRow, tokenizer: Any) -> dict[str, Any]:
    inside = slice(document.start, document.stop)
    labels = row.apart["labels"][0, inside].numpy()
    ending = None
    if document.number is not None:
        last = quote(tokenizer.decode(row.apart["input_ids"][0, inside][-1:].tolist()))
        ending = f"{last}, {'not ' * bool(labels[-1] == IGNORE_INDEX)}trained"
    return {
        "start": document.start,
        "stop": document.stop,
        "number": document.number,
        "row": document.row,
        "uncut": document.uncut,
        "trained": int((labels != IGNORE_INDEX).sum()),
        "ending": ending,
        "properties": document.properties,
    }
