"""What a document as a whole counts in the loss: its own weight, and how its length enters.

    tokens           a1   a2   a3   a4   b1        trained targets of two documents
    loss_weights      1    1    1    1    1        their own weights; without the column, 1
    loss_weight       1    1    1    1    2        that of the document; without the column, 1
    "token"           1    1    1    1    2        every token counts alike
    "sqrt"          1/2  1/2  1/2  1/2    2        divided by √n
    "document"      1/4  1/4  1/4  1/4    2        divided by n: every document counts alike

n is the sum of a document's `loss_weights` over its trained targets, so without them the number of
those; the first token of a document is never one. The loss is Σ w · loss of a token / Σ w over the
whole optimizer step, and so ``"document"`` is the mean of the documents' means: LongAlign's
weighting (https://huggingface.co/papers/2401.18058). A piece of a split document is a document.
"""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)

LOSS_WEIGHTINGS = ("token", "document", "sqrt")

_POWER = {"token": 0.0, "document": 1.0, "sqrt": 0.5}
_MOST = float(np.finfo(np.float32).max)
_WORDS = {
    "token": "all alike",
    "document": "divided by those of its document: documents count alike",
    "sqrt": "divided by the root of those of its document",
}


def in_words(weighting: str, columns: Iterable[str]) -> str:
    """Return what a trained token counts, in words.

    >>> in_words("token", ["input_ids", "loss_weight"])
    'the mean over the trained tokens of a step, all alike, times loss_weight'
    """
    own = [name for name in WEIGHT_COLUMNS if name in columns]
    times = "".join(f", times {name}" for name in own)
    return f"the mean over the trained tokens of a step, {_WORDS[weighting]}{times}"


def weigh_tokens(
    weights: np.ndarray,
    labels: np.ndarray,
    lengths: Sequence[int],
    document_weights: Sequence[float],
    loss_weighting: str,
) -> np.ndarray:
    """Return what every token counts, ``(T,)`` float32, and 0 on what is not trained.

    `weights` ``(T,)`` are those of the tokens, `labels` ``(T,)`` have document starts masked;
    `lengths` and `document_weights` are one number for every document, which lie end to end.

    >>> labels = np.array([-100, 6, 7, -100, 9])
    >>> weigh_tokens(np.ones(5), labels, [3, 2], [1.0, 2.0], "document").tolist()
    [0.0, 0.5, 0.5, 0.0, 2.0]
    """
    if not len(weights):
        return weights.astype(np.float32)
    own = np.where(labels == IGNORE_INDEX, 0.0, weights)
    document = np.repeat(np.arange(len(lengths)), lengths)
    totals = np.bincount(document, own, minlength=len(lengths)) ** _POWER[loss_weighting]
    factors = np.divide(document_weights, totals, out=np.zeros(len(lengths)), where=totals > 0)
    products = own * factors[document]
    if products.max() > _MOST:
        at = int(np.argmax(products))
        raise ValueError(
            f"{TOKEN_WEIGHTS} {own[at]:.3g} times {DOCUMENT_WEIGHT} "
            f"{document_weights[document[at]]:.3g} is more than float32 holds; divide all weights "
            "by one number: only their ratios count"
        )
    return products.astype(np.float32)


def document_weight(document: Mapping[str, Any], which: str = "a document") -> float:
    """Return the `loss_weight` of a document, 1 without one; `which` is its name in a message.

    Raises ValueError if it is no number (None is none), negative, infinite or NaN.

    >>> document_weight({"loss_weight": 0.5}), document_weight({})
    (0.5, 1.0)
    """
    given = document.get(DOCUMENT_WEIGHT, 1.0)
    try:
        weight = float(given)
    except (TypeError, ValueError):
        weight = np.nan
    if not 0 <= weight <= _MOST:  # NaN compares false
        raise ValueError(f"{which} has {wrong_weight(given)}")
    return weight


def wrong_weight(value: Any) -> str:
    """Return what is wrong with a `loss_weight`, as the end of a sentence."""
    return (
        f"{DOCUMENT_WEIGHT}={value!r}; give finite numbers that are not negative (0 leaves "
        "a document out of the loss)"
    )


def token_weights(document: Mapping[str, Any], num_tokens: int) -> np.ndarray:
    """Return the loss weights ``(num_tokens,)`` float32 of a document: its `loss_weights`, else 1.

    Raises ValueError if there is not one for every token, or one is negative, infinite or NaN.

    >>> token_weights({"loss_weights": [0, 0.5]}, 2).tolist(), token_weights({}, 2).tolist()
    ([0.0, 0.5], [1.0, 1.0])
    """
    given = document.get(TOKEN_WEIGHTS)
    if given is None:
        return np.ones(num_tokens, dtype=np.float32)
    with np.errstate(over="ignore"):  # of what float32 cannot hold: infinite, and refused
        weights = np.asarray(given, dtype=np.float32)
    if len(weights) != num_tokens:
        raise ValueError(
            f"{TOKEN_WEIGHTS} has {len(weights)} entries but input_ids has {num_tokens}; "
            "give one weight per token"
        )
    wrong = ~(np.isfinite(weights) & (weights >= 0))
    if wrong.any():
        raise ValueError(
            f"{TOKEN_WEIGHTS} has {weights[wrong][0]} at token {int(np.argmax(wrong))}; "
            "give finite numbers that are not negative (0 leaves a token out of the loss)"
        )
    return weights
