"""A document made visible: what it says, and which of it is trained.

document · 31 tokens · 13 trained (42%) · ends in '<|im_end|>', trained
<|im_start|>user
Hi<|im_end|>
<|im_start|>assistant
⟦Hello<|im_end|>⟧
"""

from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np

from trl_packing.labels import IGNORE_INDEX, document_labels, document_weights

_MARKS = ("⟦", "⟧")
_COLORS = ("\x1b[1;32m", "\x1b[0m")  # bold green


def show_document(
    document: Mapping[str, Any], tokenizer: Any, *, color: bool = False, name: str = "document"
) -> str:
    """Return `document` as text, its trained tokens between ⟦ and ⟧, or in color.

    document: has `input_ids` ``(T,)``, and `labels` or masks as `PackedCollator` takes them, and
        maybe `loss_weights`.
    tokenizer: decodes it.
    color: bold green instead of ⟦ and ⟧.
    name: what the heading calls it.

    A weight other than 1 is written before its tokens: ⟦0.5×Hello⟧. The first token of a document
    is never a target and shown so.

    Raises ValueError if labels, masks or weights are not one per token.
    """
    ids = np.asarray(document["input_ids"], np.int64)
    labels = document_labels(document, ids)
    weights = np.where(labels == IGNORE_INDEX, 0, document_weights(document, len(ids)))
    weights[:1] = 0
    return "\n".join(
        [_heading(name, ids, weights, tokenizer), _body(ids, weights, tokenizer, color)]
    )


def _heading(name: str, ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> str:
    if not len(ids):
        return f"{name} · empty"
    trained = int((weights > 0).sum())
    last = tokenizer.decode(ids[-1:].tolist())
    return (
        f"{name} · {len(ids):,} tokens · {trained:,} trained ({trained / len(ids):.0%}) · "
        f"ends in {last!r}, {'trained' if weights[-1] else 'not trained'}"
    )


def _body(ids: np.ndarray, weights: np.ndarray, tokenizer: Any, color: bool) -> str:
    opening, closing = _COLORS if color else _MARKS
    parts = []
    for weight, text in _stretches(ids, weights, tokenizer):
        times = "" if weight in (0, 1) else f"{weight:g}×"
        parts.append(f"{opening}{times}{text}{closing}" if weight else text)
    return "".join(parts)


def _stretches(ids: np.ndarray, weights: np.ndarray, tokenizer: Any) -> Iterator[tuple[float, str]]:
    """Yield tokens of the same weight together, as text that adds up to the decoded document."""
    starts = np.flatnonzero(np.diff(weights, prepend=np.nan))
    shown = ""
    for start, stop in zip(starts, np.append(starts, len(ids))[1:], strict=True):
        # Decoded with what is before it: a word's space, or half of a character, belongs to it.
        text = tokenizer.decode(ids[:stop].tolist(), clean_up_tokenization_spaces=False)
        text = text.rstrip("\N{REPLACEMENT CHARACTER}") if stop < len(ids) else text
        yield float(weights[start]), text[len(shown) :]
        shown = text
