"""Weights of tokens in the loss: `loss_weights` × `loss_weight` of the document × a factor.

    "token"           1    1    1    1 | 2    as they are
    "sqrt"          1/2  1/2  1/2  1/2 | 2    divided by √n
    "document"      1/4  1/4  1/4  1/4 | 2    divided by n, the sum of the document's loss_weights

The loss is Σ w · loss of a token / Σ w over an optimizer step, so ``"document"`` is the mean of the
documents' means (LongAlign, https://huggingface.co/papers/2401.18058). A piece is a document.
"""

from collections.abc import Iterable, Sequence
from contextlib import suppress

import datasets
import numpy as np

from trl_packing.documents.arrow import ArrowDocuments, stored_rows
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
    Document,
    check_one_each,
    row_name,
)

LOSS_WEIGHTINGS = ("token", "document", "sqrt")

_POWER = {"token": 0.0, "document": 1.0, "sqrt": 0.5}
LARGEST_WEIGHT = float(np.finfo(np.float32).max)
_WORDS = {"token": "", "document": "1/n", "sqrt": "1/√n"}


def in_words(weighting: str, columns: Iterable[str]) -> str:
    """Return a description of the loss for the report, which names the weights in `columns`."""
    columns = set(columns)
    factors = [_WORDS[weighting], *(name for name in WEIGHT_COLUMNS if name in columns)]
    weight = " × ".join(filter(None, factors)) or "1"
    counted = "sum of loss_weights" if TOKEN_WEIGHTS in columns else "trained tokens"
    explained = f" (n: {counted} of its document)" if _WORDS[weighting] else ""
    return f"mean over the trained tokens of a step, each with weight {weight}{explained}"


def weigh_tokens(
    weights: np.ndarray,
    labels: np.ndarray,
    lengths: Sequence[int],
    document_weights: Sequence[float],
    loss_weighting: str,
) -> np.ndarray:
    """Return the weight of every token in the loss, ``(T,)`` float32; 0 if it is not trained.

    `weights` and `labels` are those of documents laid end to end, ``(T,)``, with the first token of
    each masked; `lengths` and `document_weights` those of each document.

    Example:
        >>> labels = np.array([-100, 6, 7, -100, 9])
        >>> weigh_tokens(np.ones(5), labels, [3, 2], [1.0, 2.0], "document").tolist()
        [0.0, 0.5, 0.5, 0.0, 2.0]
    """
    if not len(weights):
        return weights.astype(np.float32)
    trained = np.where(labels == IGNORE_INDEX, 0.0, weights)
    document = np.repeat(np.arange(len(lengths)), lengths)
    totals = np.bincount(document, trained, minlength=len(lengths)) ** _POWER[loss_weighting]
    factors = np.divide(document_weights, totals, out=np.zeros(len(lengths)), where=totals > 0)
    products = trained * factors[document]
    if products.max() > LARGEST_WEIGHT:
        raise ValueError("loss_weights times loss_weight exceed float32; divide all of them")
    return products.astype(np.float32)


def document_weight(document: Document, which: str = "a document") -> float:
    """Return the `loss_weight` of a document, 1 without one; `which` is its name in messages."""
    given = document.get(DOCUMENT_WEIGHT, 1.0)
    weight = np.nan
    with suppress(TypeError, ValueError):
        weight = float(given)
    if not 0 <= weight <= LARGEST_WEIGHT:  # NaN compares false
        raise ValueError(f"{which} has loss_weight={given!r}; give finite numbers ≥ 0, in float32")
    return weight


def document_weights_from_rows(dataset: datasets.Dataset, name: str) -> np.ndarray:
    """Return the `loss_weight` of every row, ``(rows,)`` float32.

    Raises ValueError naming the row of the data set `name` whose weight cannot be used.
    """
    values = dataset.data.column(DOCUMENT_WEIGHT).to_numpy()[stored_rows(dataset)]
    if values.dtype.kind in "iuf" and ((values >= 0) & (values <= LARGEST_WEIGHT)).all():
        return values.astype(np.float32)
    weights = [
        document_weight({DOCUMENT_WEIGHT: value}, row_name(row, name))
        for row, value in enumerate(dataset.with_format(None)[DOCUMENT_WEIGHT])
    ]
    return np.array(weights, np.float32)


def token_weights(document: Document, num_tokens: int) -> np.ndarray:
    """Return the `loss_weights` of a document, ``(num_tokens,)`` float32; ones without them.

    Raises ValueError if there is not one per token, or one is negative, infinite or NaN.
    """
    given = document.get(TOKEN_WEIGHTS)
    if given is None:
        return np.ones(num_tokens, dtype=np.float32)
    with np.errstate(over="ignore"):  # too large for float32: infinite, and refused
        weights = np.asarray(given, np.float32)
    check_one_each(TOKEN_WEIGHTS, weights, num_tokens)
    if (wrong := ~(np.isfinite(weights) & (weights >= 0))).any():
        where = f"{weights[wrong][0]} at token {wrong.argmax()}"
        raise ValueError(f"{TOKEN_WEIGHTS} has {where}; give finite numbers of at least 0")
    return weights


def check_token_weights(documents: ArrowDocuments, numbers: Sequence[int] | None = None) -> None:
    """Raise ValueError naming the first document without one weight, finite and ≥ 0, per token."""
    chunks = [values for values, _ in documents.readers[TOKEN_WEIGHTS].chunks if len(values)]
    if np.array_equal(documents.lengths(TOKEN_WEIGHTS), documents.lengths()) and all(
        values.min() >= 0 and float(values.max()) <= LARGEST_WEIGHT for values in chunks
    ):
        return  # NaN compares false
    for at, document in enumerate(documents):  # the table may hold rows that were left out
        try:
            token_weights(document, len(document["input_ids"]))
        except ValueError as problem:
            raise ValueError(f"document {numbers[at] if numbers else at}: {problem}") from None
