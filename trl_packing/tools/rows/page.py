"""An HTML page of packed rows: strips, tokens and attention masks.

PackedEpoch  →  the first rows, and some that hold a document to look at  →  JSON  →  rows.js draws

Everything drawn comes from the batches of the trainer's collator. The page has a bounded size.
"""

from collections.abc import Iterator, Sequence
from itertools import islice
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.formatting.printable import escape_text
from trl_packing.pages.page import HtmlPage, asset, cards, escape, page, section
from trl_packing.tools.rows.packed_rows import (
    CUT,
    NO_STOP_TOKEN,
    PROPERTIES,
    PackedEpoch,
    PackedRow,
)
from trl_packing.tools.rows.row_data import row_data

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
_ROW = """
<div class="tree" id="tree" hidden></div>
<div class="row"><div class="documents" id="documents"></div>
<div class="mask" id="mask"></div></div>
<div id="tip" role="status" hidden></div>
"""


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
    chosen = _choose(epoch, max_rows, max_tokens)
    data = page_data(epoch, chosen, max_tokens)
    is_shared = any(row.segments for row, _ in chosen)
    has_images = any(row["images"] for row in data["rows"])
    shown = f"{quantity(len(chosen), 'row')} of {len(epoch.groups()):,}, each strip a {epoch.unit}"
    if is_shared:
        shown = f"{quantity(len(chosen), 'row')}; with shared prefixes, a strip is a micro-batch"
    below = [section("How it was made", f"<pre>{escape(command)}</pre>")] if command else []
    return page(
        title,
        [
            _cards(epoch),
            section(
                "Rows of epoch 1",
                _LEGEND.format(more=_SHARED * is_shared + _IMAGE * has_images),
                '<div class="filters" id="filters"></div><div id="strips"></div>',
                note=f"{shown}; click one for its tokens",
            ),
            '<section>\n<h2><span id="row-name"></span> <span class="note" id="row-summary"></span>'
            f"</h2>{_ROW}</section>",
            *_losses(epoch),
            *below,
        ],
        data=data,
        script=asset("rows.js"),
        style=asset("rows.css"),
        note=note,
    )


def page_data(
    epoch: PackedEpoch, rows: Sequence[tuple[PackedRow, str]], max_tokens: int
) -> dict[str, Any]:
    """Return the values that rows.js draws; lists have one entry for each token of a row."""
    texts: dict[str, int] = {}
    drawn = []
    left = max_tokens
    for row, reason in rows:
        drawn.append(row_data(epoch, row, reason, texts, left))
        left -= len(drawn[-1]["ids"])
    return {
        "capacity": epoch.capacity,
        "properties": PROPERTIES,
        "texts": [escape_text(text) for text in texts],
        "rows": drawn,
    }


# --- choosing rows --------------------------------------------------------------------------------


def _choose(epoch: PackedEpoch, max_rows: int, max_tokens: int) -> list[tuple[PackedRow, str]]:
    """Return the first rows, and rows that hold documents with properties that these lack."""
    chosen: list[tuple[PackedRow, str]] = []
    tokens = 0
    for row, reason in _candidates(epoch, max_rows):
        tokens += row.stop - row.start
        if chosen and tokens > max_tokens:
            break
        chosen.append((row, reason))
    return chosen


def _candidates(epoch: PackedEpoch, max_rows: int) -> Iterator[tuple[PackedRow, str]]:
    found: set[str] = set()
    micro_batches = epoch.micro_batch_of_documents()
    for row in islice(epoch.rows(range(int(micro_batches.max(initial=-1)) + 1)), max_rows):
        yield row, ""
        found |= {name for document in row.documents for name in document.properties}
    examples = {
        int(document): name
        for name, has in epoch.with_property().items()
        if name not in found
        for document in np.flatnonzero(has & (micro_batches >= 0))[:_EXAMPLES]
    }
    for row in epoch.rows(np.unique(micro_batches[[*examples]]).tolist() if examples else []):
        for name in {examples[d.number] for d in row.documents if d.number in examples}:
            yield row, f"shown for a document: {name}"
            break


# --- the whole set --------------------------------------------------------------------------------


def _cards(epoch: PackedEpoch) -> str:
    documents = epoch.documents
    tokens, trained = int(documents.lengths().sum()), int(documents.num_trained().sum())
    found = epoch.with_property()
    shown = [
        (f"{documents.num_documents:,}", "documents"),
        (f"{tokens:,}", "tokens"),
        (f"{trained / tokens:.0%}" if tokens else "–", "of them trained"),
        (f"{len(epoch.groups()):,}", "bins" if epoch.capacity else "micro-batches"),
    ]
    if (computed := epoch.computed_tokens()) is not None:
        shown.insert(3, (f"{computed:,}", "computed, prefixes once"))
    if (loads := epoch.sampler.loads) is not None:
        shown.append((f"{loads.images.sum():,}", "images"))
        shown.append((f"{loads.tokens.sum() / tokens:.0%}", "of the tokens in images"))
    for name in (CUT, NO_STOP_TOKEN):
        shown.append((f"{int(found[name].sum()):,}", name))
    return cards(shown)


def _losses(epoch: PackedEpoch) -> list[str]:
    counts = epoch.traced.counts
    if counts is None or not str(counts):
        return []
    return [section("Losses of preparation", f"<pre>{escape(counts)}</pre>")]
