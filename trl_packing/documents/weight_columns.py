"""Checks of the weight columns of a data set, before anything is trained.

    loss_weights   [0 1 .5] [1 1]       one float32 for every token
    loss_weight    0.5      2           one float32 for every document

A piece of a document has the `loss_weight` of the document.
"""

import datasets
import numpy as np
import pyarrow as pa

from trl_packing.documents.arrow import ArrowDocuments, stored_rows
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
    document_labels,
)
from trl_packing.documents.weights import token_weights, wrong_weight


def document_weights_from_rows(dataset: datasets.Dataset, which: str) -> np.ndarray:
    """Return the `loss_weight` of every row, ``(rows,)`` float32.

    Args:
        dataset: has the column `loss_weight`.
        which: name of the data set, for messages.

    Raises:
        ValueError: naming the row, if a weight is missing, negative, infinite or NaN, or if the
            column does not hold numbers.
    """
    column = dataset.data.column(DOCUMENT_WEIGHT)
    if not (pa.types.is_integer(column.type) or pa.types.is_floating(column.type)):
        raise ValueError(
            f"column {DOCUMENT_WEIGHT!r} of {which} holds {column.type}, but it says what "
            "each document counts; convert it to numbers, or drop it"
        )
    rows = stored_rows(dataset)
    with np.errstate(over="ignore"):  # too large for float32: infinite, and refused
        weights = column.to_numpy()[rows].astype(np.float32)  # missing ones become NaN
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        row = int(np.argmax(wrong))
        raise ValueError(f"row {row} of {which} has {wrong_weight(column[rows[row]].as_py())}")
    return weights


def check_token_weights(documents: ArrowDocuments) -> None:
    """Raise ValueError naming the first document without one weight, finite and ≥ 0, per token."""
    chunks = [values for values, _ in documents.readers[TOKEN_WEIGHTS].chunks if len(values)]
    one_each = np.array_equal(documents.lengths(TOKEN_WEIGHTS), documents.lengths())
    most = np.finfo(np.float32).max
    if one_each and all(values.min() >= 0 and values.max() <= most for values in chunks):
        return  # NaN compares false
    for number, document in enumerate(documents):  # the table may hold rows that were left out
        try:
            token_weights(document, len(document["input_ids"]))
        except ValueError as problem:
            raise ValueError(f"document {number}: {problem}") from None


def check_some_weight(documents: ArrowDocuments) -> None:
    """Raise ValueError naming the columns if every trained token of `documents` has weight 0.

    Reads documents up to the first with a positive weight, mostly one. No-op without weights.
    """
    present = (*documents.columns, *documents.scalars)
    names = [name for name in WEIGHT_COLUMNS if name in present]
    if not names or not len(documents):
        return
    for document in documents:
        weights = token_weights(document, len(document["input_ids"]))
        trained = document_labels(document, document["input_ids"]) != IGNORE_INDEX
        if document.get(DOCUMENT_WEIGHT, 1.0) and weights[1:][trained[1:]].any():
            return
    raise ValueError(
        f"{' and '.join(names)} leave every trained token of a data set out of the loss: each "
        "weighs 0; give some a number above 0, or drop the column: "
        f"dataset.remove_columns({names})"
    )
