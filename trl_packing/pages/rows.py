"""An HTML page of packed rows: strips, tokens and attention masks.

packed epoch  →  the first rows, and some that hold a document to look at  →  JSON  →  rows.js draws

Everything drawn comes from the batches of the trainer's collator. The page has a bounded size.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import islice, pairwise
from typing import TYPE_CHECKING, Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.data.printable import escape_hidden, quote
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_ROW, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.packing.prefix_tree import PrefixTree
from trl_packing.pages.page import HtmlPage, PageData, render
from trl_packing.pages.show import CONTEXT, token_texts
from trl_packing.vision.documents import ImageTokens

if TYPE_CHECKING:
    from trl_packing.tools.rows import PackedEpoch

# Properties of documents that a reader looks for.
PROPERTIES = ("nothing trained", "no stop token", "cut", "weighted")


@dataclass(frozen=True)
class RowDocument:
    """One document of a packed row: tokens ``[start, stop)`` of the micro-batch without prefixes.

    Attributes:
        number: its number among the prepared documents; None for padding.
        row: the row of the user's data set that it comes from; None for padding.
        uncut: its tokens before it was cut to fit.
        properties: those of `PROPERTIES` that it has.
        images: the tokens of its images, counted from `start`.
    """

    start: int
    stop: int
    number: int | None = None
    row: int | None = None
    uncut: int = 0
    properties: tuple[str, ...] = ()
    images: tuple[ImageTokens, ...] = ()


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A bin as it is trained, or a whole micro-batch where nothing is packed.

    Attributes:
        micro_batch: its number in the epoch, over all ranks.
        index: which row of the micro-batch it is.
        start: its first token in the micro-batch.
        stop: the position after its last token.
        batch: the micro-batch as the data loader yields it.
        documents: in the order of their tokens, padding included.
        apart: the micro-batch without shared prefixes; may be `batch`.
        segments: of a row whose documents share prefixes, without padding; else empty.
    """

    micro_batch: int
    index: int
    start: int
    stop: int
    batch: Any = field(repr=False)
    documents: tuple[RowDocument, ...]
    apart: Any = field(repr=False)
    segments: Sequence[PageData] = ()

    def values(self, name: str) -> np.ndarray:
        """Return the row's part of a tensor of the batch, ``(tokens,)``."""
        return self.batch[name][0, self.start : self.stop].numpy()


def segments_of(tree: PrefixTree) -> list[PageData]:
    """Return the segments of the row of `tree`, in its order: tokens that the same documents hold.

        start, stop    boundaries of `cu_seqlens`
        position       of its first token in the documents
        parent         number of the segment that the documents hold before it; None at their start
        level          number of segments before it in its documents
        documents      that hold it, as their places in the sorted order of the tree
        repeats        its first token is a copy of the last common token, which is a target in
                       another branch

    Examples:
        >>> from trl_packing.packing.prefix_tree import build_prefix_tree
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> [(s["start"], s["stop"], s["parent"], s["documents"]) for s in segments_of(tree)]
        [(0, 2, None, [0, 1]), (2, 4, 0, [0]), (4, 6, 0, [1])]
    """
    found: list[PageData] = []
    deepest: dict[int, int] = {}  # of each document, the last segment so far
    own = np.diff(tree.starts)
    for number, (start, stop) in enumerate(pairwise(tree.cu_seqlens.tolist())):
        position = int(tree.position_ids[start])
        first = int(np.searchsorted(tree.starts[:-1], start, side="right")) - 1
        # The documents behind the first one hold the segment until one leaves its path above it.
        leaves = np.flatnonzero(np.append(tree.depths[first + 1 :], 0) <= position)
        documents = list(range(first, first + 1 + int(leaves[0])))
        parent = deepest.get(first) if position else None
        # The document before goes on with another token, or ends here.
        begins = position > 0 and start == int(tree.starts[first])
        repeats = begins and position < int(tree.depths[first - 1] + own[first - 1])
        segment = {
            "start": start,
            "stop": stop,
            "position": position,
            "parent": parent,
            "level": 0 if parent is None else found[parent]["level"] + 1,
            "documents": documents,
            "repeats": repeats,
        }
        found.append(segment)
        deepest.update(dict.fromkeys(documents, number))
    return found


MAX_ROWS = 16
MAX_TOKENS = 32_768  # about 1 MB of JSON
_EXAMPLES = 2  # further rows for each property that none of the first rows has


def rows_page(
    epoch: "PackedEpoch",
    *,
    title: str = "Packed rows",
    note: str = "",
    command: str = "",
    max_rows: int = MAX_ROWS,
    max_tokens: int = MAX_TOKENS,
) -> HtmlPage:
    """Return the HTML page, which a notebook shows as the value of a cell.

    `epoch` is a `PackedEpoch`, and `note` stands beside the title. The page shows at most
    `max_rows` rows from the start of the epoch, with at most `max_tokens` tokens. `command` is
    shown as the one that made it.
    """
    texts: dict[str, int] = {}
    drawn: list[PageData] = []
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
        "rows.html",
        title=title,
        note=note,
        styles=["rows.css"],
        script="rows.js",
        epoch=epoch,
        shown=shown,
        has_shared=has_shared,
        has_images=any(row["images"] for row in drawn),
        command=command,
        data={"capacity": epoch.capacity, "properties": PROPERTIES, "rows": drawn, "texts": words},
    )


def _candidates(epoch: "PackedEpoch", max_rows: int) -> Iterator[tuple[PackedRow, str]]:
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


def _row_data(epoch: "PackedEpoch", row: PackedRow, texts: dict[str, int], most: int) -> PageData:
    """Return the values that rows.js draws of `row`; lists have one entry for each token.

    At most `most` tokens are shown, and their texts get numbers in `texts`.
    """
    tokenizer = epoch.run.rules.eos.tokenizer
    short = f"{row.micro_batch + 1:,}"
    name = f"Micro-batch {short}"
    if row.start or row.stop < row.batch["input_ids"].shape[1]:
        name = f"{name}, bin {row.index + 1}"
        short = f"{short}.{row.index + 1}"
    names = {"ids": "input_ids", "labels": "labels", "positions": "position_ids"}
    if row.segments:
        names["counts"] = TARGET_COUNTS
    data: PageData = {key: row.values(of)[:most].tolist() for key, of in names.items()}
    weights = None
    if TOKEN_WEIGHTS in row.batch:  # the shortest digits that give the same float32
        weights = [float(str(weight)) for weight in row.values(TOKEN_WEIGHTS)[:most]]
    words = _words(row, data["ids"], tokenizer)
    if row.segments:
        data["realTokens"] = sum(document.stop - document.start for document in row.documents)
        data["segments"] = row.segments
    documents, images = [], []
    for document in row.documents:
        documents.append(_document_data(document, row, tokenizer))
        first = document.start - row.start
        for image in document.images:
            user_row = int(epoch.documents.scalars[IMAGE_ROW][document.number])
            height, width = epoch.run.images.store.sizes(user_row)[image.image].tolist()
            images.append(
                {
                    "start": first + image.start,
                    "stop": first + image.stop,
                    "size": f"{width} × {height}",
                }
            )
    return data | {
        "name": name,
        "short": short,
        "microBatch": row.micro_batch,
        "start": row.start,
        "stop": row.stop,
        "weights": weights,
        "texts": [texts.setdefault(word, len(texts)) for word in words],
        "documents": documents,
        "images": images,
    }


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


def _document_data(document: RowDocument, row: PackedRow, tokenizer: Any) -> PageData:
    labels = row.apart["labels"][0, document.start : document.stop].numpy()
    ending = None
    if document.number is not None:
        token = int(row.apart["input_ids"][0, document.stop - 1])
        last = quote(tokenizer.decode([token]))
        ending = f"{last}, {'not trained' if labels[-1] == IGNORE_INDEX else 'trained'}"
    shown = vars(document) | {"trained": int((labels != IGNORE_INDEX).sum()), "ending": ending}
    del shown["images"]
    return shown
