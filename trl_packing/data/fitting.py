"""Documents of any length → documents that fit.

    documents           input_ids, labels, any length
        │  pieces_of    the tokens [start, stop) of each document that the policy keeps
        │  is_kept      drops pieces without a trained token
        ▼
    documents           each ≤ capacity, each with something to train

`overflow.py` has the policies. A whole batch is cut at once.
"""

from collections.abc import Sequence
from typing import Any

import numpy as np
import pyarrow as pa

from trl_packing.data.overflow import (
    Overflow,
    gather,
    mask_contexts,
    pieces_of,
    prompt_lengths,
    too_long_error,
)
from trl_packing.data.whole_images import keep_images_whole
from trl_packing.documents.arrow import (
    ArrowDocuments,
    FlatLists,
    count_after_first,
    list_column,
    token_lists,
)
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_IDS


def fit_documents(
    documents: ArrowDocuments,
    overflow: Overflow,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> ArrowDocuments:
    """Return documents within capacity, each with something to train.

    Args:
        documents: `input_ids` and `labels`. Other columns of the data set are kept (and repeated
            for pieces), and its `loss_weights` are cut with the tokens.
        overflow: policy for documents that are too long.
        num_proc: processes that cut.
        name: of the data set, for messages.

    Raises:
        ValueError: if a document is too long under ``"error"``, or if nothing is left.
    """
    dataset, lengths = documents.dataset, documents.lengths()
    too_long = np.zeros(len(lengths), bool)
    if overflow.capacity is not None:
        too_long = lengths > overflow.capacity
    if overflow.policy == "error" and too_long.any():
        row = int(np.argmax(too_long))
        raise too_long_error(
            f"document {row} of the {name} dataset", lengths[row], overflow.capacity
        )
    if overflow.policy == "wrapped" or (overflow.policy != "drop" and too_long.any()):
        # `map` caches by the function and its arguments, so a second run reads the result.
        cut = dataset.with_format("arrow").map(
            fit_table,
            **_arguments_of_fit(lengths, overflow),
            batched=True,
            num_proc=num_proc,
            desc=f"Fitting {name} dataset to max_length",
        )
        fitted = documents.with_dataset(cut.with_format(None))
    else:
        keeps = [is_kept(chunk, overflow) for chunk in documents.readers["labels"].chunks]
        kept = np.flatnonzero(documents.in_order(keeps) & ~too_long)
        fitted = documents
        if len(kept) < len(dataset):
            fitted = documents.with_dataset(dataset.select(kept))
    if not len(fitted) or not fitted.num_trained().any():
        if not lengths.any():
            raise ValueError(
                f"all {len(lengths):,} rows of the {name} dataset are empty: they have no "
                "messages or tokens; check how it was loaded"
            )
        raise ValueError(
            f"no document of the {name} dataset has a trained token left "
            f"({len(lengths)} read, {int(too_long.sum())} longer than max_length="
            f"{overflow.capacity}, overflow={overflow.policy!r}); raise max_length, or check the "
            "completion or assistant masks"
        )
    return fitted


def _arguments_of_fit(lengths: np.ndarray, overflow: Overflow) -> dict[str, Any]:
    """Return arguments of `map` that make it call `fit_table`."""
    if overflow.policy != "wrapped" or overflow.capacity is None:
        return {"fn_kwargs": {"overflow": overflow}}
    begins = (np.cumsum(lengths) - lengths) % overflow.capacity
    return {"with_indices": True, "fn_kwargs": {"overflow": overflow, "begins": begins}}


def fit_table(
    table: pa.Table,
    indices: Sequence[int] | None = None,
    *,
    overflow: Overflow,
    begins: np.ndarray | None = None,
) -> pa.Table:
    """Apply `overflow` to a table of documents and drop pieces without a trained token.

    Args:
        table: documents.
        indices: of these documents among all.
        overflow: the policy.
        begins: with ``"wrapped"``, tokens of the row before each document of all, ``(all,)`` int64.
    """
    tokens = token_lists(table)
    lengths = np.diff(tokens["input_ids"][1])
    before = None if begins is None else begins[indices]
    pieces = pieces_of(lengths, overflow, prompt_lengths(*tokens["labels"]), before)
    if IMAGE_IDS in tokens and overflow.capacity is not None:
        values, offsets = tokens[IMAGE_IDS]
        images = np.concatenate([[0], np.cumsum(values > 0)])[offsets]
        pieces = keep_images_whole(pieces, (np.diff(images) > 0) & (lengths > overflow.capacity))
    cut = {name: gather(lists, pieces) for name, lists in tokens.items()}
    if pieces.contexts is not None:
        mask_contexts(*cut["labels"], pieces.contexts)
    kept = pa.array(np.flatnonzero(is_kept(cut["labels"], overflow)))
    columns = [
        list_column(*cut[field.name], field).take(kept)
        if field.name in cut
        else table.column(field.name).take(pa.array(pieces.rows)).take(kept)
        for field in table.schema
    ]
    return pa.table(columns, names=table.column_names)


def is_kept(labels: FlatLists, overflow: Overflow) -> np.ndarray:
    """Return which documents have something to train and are kept, ``(documents,)`` bool."""
    values, offsets = labels
    if not overflow.drops_as_padded:
        return count_after_first(values, offsets, IGNORE_INDEX) > 0
    if overflow.capacity is None:
        return np.diff(offsets) > 0
    running = np.concatenate([[0], np.cumsum(values != IGNORE_INDEX)])
    return running[offsets[1:]] > running[offsets[:-1]]
