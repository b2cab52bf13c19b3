"""Loss weights of a batch, packed or padded.

    documents         loss_weights 0 1 .5, loss_weight 2        loss_weights 0 1
    packed row        0  2  1  0  1                             (1, T) float32
    padded rows       0  2  1                                   (rows, T) float32
                      0  1  0

A batch has weights only if a document has any, or if `loss_weighting` is not "token".
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_packing.documents.labels import DOCUMENT_WEIGHT, SOURCE_IDS, TOKEN_WEIGHTS
from trl_packing.documents.weights import document_weight, token_weights, weigh_tokens

Document = Mapping[str, Any]


def has_weights(documents: Sequence[Document], loss_weighting: str) -> bool:
    """Return whether a batch of `documents` has loss weights."""
    return loss_weighting != "token" or any(
        document.get(TOKEN_WEIGHTS) is not None or DOCUMENT_WEIGHT in document
        for document in documents
    )


def packed_weights(
    documents: Sequence[Document],
    rows: Sequence[Sequence[int]],
    labels: torch.Tensor,
    masked: Sequence[int],
    loss_weighting: str,
) -> torch.Tensor:
    """Return the weights of a packed row, (1, T) float32.

    Args:
        documents: items of the batch, each with its weights.
        rows: for each item, the tokens of every document in it.
        labels: (1, T) int64, document starts masked.
        masked: tokens of each masked document behind the items.
        loss_weighting: "token", "document" or "sqrt".
    """
    weights = [_token_weights(d, sum(rows[number]), number) for number, d in enumerate(documents)]
    factors = [
        factor
        for factor, row in zip(_document_weights(documents), rows, strict=True)
        for length in row
        if length
    ]
    return _weigh(
        np.concatenate([*weights, np.ones(sum(masked))]),
        labels,
        [*(length for row in rows for length in row if length), *masked],
        factors + [1.0] * len(masked),
        loss_weighting,
    )


@dataclass
class WeightedPaddedCollator:
    """The padded batches of `collator` (TRL's), with weights and sources as in packed batches."""

    collator: Any
    loss_weighting: str = "token"

    def __call__(self, documents: Sequence[Document]) -> dict[str, Any]:
        """Return a padded batch, with `loss_weights` (rows, T) float32 if there are weights."""
        batch = self.collator(documents)
        labels = batch["labels"]
        if has_weights(documents, self.loss_weighting):
            weights = np.zeros(labels.shape)
            for number, (row, document) in enumerate(zip(weights, documents, strict=True)):
                length = len(document["input_ids"])
                row[:length] = _token_weights(document, length, number)
            weights[:, 0] = 0  # never a target
            factors = _document_weights(documents)
            lengths = [labels.shape[1]] * len(labels)
            batch[TOKEN_WEIGHTS] = _weigh(weights, labels, lengths, factors, self.loss_weighting)
        if any(SOURCE_IDS in document for document in documents):
            source_ids = torch.tensor([int(document[SOURCE_IDS]) for document in documents])
            batch[SOURCE_IDS] = source_ids[:, None].repeat(1, labels.shape[1])
        return batch


def _token_weights(document: Document, num_tokens: int, number: int) -> np.ndarray:
    try:
        return token_weights(document, num_tokens)
    except ValueError as problem:
        raise ValueError(f"document {number} of a micro-batch: {problem}") from None


def _document_weights(documents: Sequence[Document]) -> list[float]:
    return [
        document_weight(document, f"document {number} of a micro-batch")
        for number, document in enumerate(documents)
    ]


def _weigh(
    weights: np.ndarray,
    labels: torch.Tensor,
    lengths: Sequence[int],
    factors: Sequence[float],
    loss_weighting: str,
) -> torch.Tensor:
    """Return the weight of every token, shaped like `labels`, float32."""
    flat = weigh_tokens(weights.ravel(), labels.numpy().ravel(), lengths, factors, loss_weighting)
    return torch.from_numpy(flat).view(labels.shape)
