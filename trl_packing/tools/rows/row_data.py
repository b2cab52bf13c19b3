"""One packed row as the values that rows.js draws: tokens, documents, segments of a shared row."""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_ROW, TARGET_COUNTS, TOKEN_WEIGHTS
from trl_packing.formatting.printable import quote
from trl_packing.tools.preview.show import CONTEXT, token_texts
from trl_packing.tools.rows.packed_rows import PackedEpoch, PackedRow, RowDocument, levels_of


def row_data(
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
    tokenizer = epoch.run.preparation.eos.tokenizer
    ids = row.values("input_ids")[:most]
    weights = row.values(TOKEN_WEIGHTS)[:most] if TOKEN_WEIGHTS in row.batch else None
    words = _words(row, ids, tokenizer)
    return {
        **_names(row, epoch),
        "reason": reason,
        "microBatch": row.micro_batch,
        "start": row.start,
        "stop": row.stop,
        "ids": ids.tolist(),
        "labels": row.values("labels")[:most].tolist(),
        "positions": row.values("position_ids")[:most].tolist(),
        # The shortest digits that give the same float32.
        "weights": None if weights is None else [float(str(weight)) for weight in weights],
        "texts": [texts.setdefault(word, len(texts)) for word in words],
        "documents": [_document_data(document, row, tokenizer) for document in row.documents],
        "images": list(_images(epoch, row)),
        **(_tree_data(row, most) if row.segments else {}),
    }


def _images(epoch: PackedEpoch, row: PackedRow) -> Iterator[dict[str, Any]]:
    """Yield the size of each image and its tokens, counted from the first of the row."""
    for document in row.documents:
        for image in document.images:
            user_row = int(epoch.documents.scalars[IMAGE_ROW][document.number])
            height, width = epoch.run.images.store.sizes(user_row)[image.image].tolist()
            first = document.start - row.start
            yield {
                "start": first + image.start,
                "stop": first + image.stop,
                "size": f"{width} × {height}",
            }


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


def _tree_data(row: PackedRow, most: int) -> dict[str, Any]:
    """Return the segments of a row with shared prefixes, and the documents that train a token."""
    levels = levels_of(row.segments)
    return {
        "realTokens": row.real_tokens,
        "counts": row.values(TARGET_COUNTS)[:most].tolist(),
        "segments": [
            {
                "start": segment.start,
                "stop": segment.stop,
                "position": segment.position,
                "parent": segment.parent,
                "level": level,
                "documents": segment.holders,
                "repeats": segment.repeats,
            }
            for segment, level in zip(row.segments, levels, strict=True)
        ],
    }


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


def _names(row: PackedRow, epoch: PackedEpoch) -> dict[str, str]:
    number = f"{row.micro_batch + 1:,}"
    if row.start == 0 and row.stop == row.batch["input_ids"].shape[1]:
        return {"name": f"Micro-batch {number}", "short": number}
    return {
        "name": f"Micro-batch {number}, {epoch.unit} {row.index + 1}",
        "short": f"{number}.{row.index + 1}",
    }
