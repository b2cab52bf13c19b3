"""Documents in, one flat packed batch out; the only place that spells Hugging Face's batch keys.

    documents           [11 12 13] [21 22]        completion masks [0 1 1] [0 1]
    input_ids           11  12  13  21  22        (1, T) int64
    labels            -100  12  13 -100 22        (1, T) int64, prompt and document starts −100
    position_ids         0   1   2   0   1        (1, T) int64
    loss_weights         0   1  .5   0   1        (1, T) float32, 0 on what is not trained; only if
                                                  documents have weights, or loss_weighting is set
    source_ids           0   0   0   3   3        (1, T) int64, −1 on padding; only if documents
                                                  have a `source_ids` each (document_columns)
    seq_idx              0   0   0   1   1        (1, T) int32, for short convolutions
    cu_seq_lens_q/k      0           3       5    (N + 1,) int32
    max_length_q/k       3                        int   } for a model that knows nothing of packing:
    use_cache            False                          } not in a batch of `tensors_only`

With `static_shapes` T, N and max_length are the same in every batch (static_shapes).

There is no attention_mask and no cache, ever: given either one, transformers skips its detection of
packed documents and every token sees the documents before it, without a message
(tests/attention/test_packed_models.py::test_attention_mask_or_cache_breaks_isolation).
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch

from trl_packing.documents.boundaries import boundaries_of_row, lengths_from_numbers
from trl_packing.documents.host_row import HostRow, PackedBatch
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    SEQ_LENGTHS,
    SOURCE_IDS,
    TOKEN_WEIGHTS,
    document_labels,
)
from trl_packing.documents.weights import document_weight, token_weights, weigh_tokens
from trl_packing.packing.static_shapes import StaticShapes


@dataclass
class PackedCollator:
    """Flatten documents into one padding-free row.

    A document is a mapping with `input_ids` and, in this order of precedence, `labels`, or
    `completion_mask` and/or `assistant_masks` (1 on trained tokens), or nothing (every token is
    trained). With `seq_lengths`, or an `attention_mask` that numbers its documents (1 1 2 2 2), it
    is a row that already holds several. `loss_weights` say how much each trained token counts, and
    `loss_weight`, a number, how much all of them do (in a row of several documents, those of each).
    `PackedSFTTrainer` takes the weights out of the batch again, and in a loop of your own they are
    for your loss, not for the model.

    pad_token_id: fills the tail that `pad_to_multiple_of` asks for.
    pad_to_multiple_of: T becomes a multiple of it by one more document, all of it masked.
    loss_weighting: "token", "document" or "sqrt", how a document's length enters its weights
        (weighting); the batch has `loss_weights` under the last two, also without documents.
    static_shapes: every batch is of this shape; takes the place of `pad_to_multiple_of`.
    tensors_only: the batch has no `max_length_q/k` and no `use_cache`, which are no tensors, but in
        `host` what the host knows (`PackedBatch`). For models of `PackedSFTTrainer` and
        `enable_packing`, which add them.
    host_row: False where the batch is changed before it is used, so that `host` is None.

    An empty list of documents gives a batch with one masked token, so that a rank without documents
    left still takes part in the step.

    >>> collate = PackedCollator()
    >>> batch = collate(
    ...     [
    ...         {"input_ids": [11, 12, 13], "completion_mask": [0, 1, 1]},
    ...         {"input_ids": [21, 22], "completion_mask": [0, 1]},
    ...     ]
    ... )
    >>> batch["labels"].tolist(), batch["cu_seq_lens_q"].tolist()
    ([[-100, 12, 13, -100, 22]], [0, 3, 5])
    """

    pad_token_id: int = 0
    pad_to_multiple_of: int | None = None
    loss_weighting: str = "token"
    static_shapes: StaticShapes | None = None
    tensors_only: bool = False
    host_row: bool = True

    def __post_init__(self) -> None:
        if self.pad_to_multiple_of is not None and self.pad_to_multiple_of < 1:
            raise ValueError(
                f"pad_to_multiple_of={self.pad_to_multiple_of} must be at least 1, or None"
            )

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> PackedBatch:
        """Return the batch described in this module's docstring.

        Raises ValueError if labels, masks, weights or `seq_lengths` do not match `input_ids`, or
        weights are not finite and ≥ 0.
        """
        input_ids = [_token_ids(document["input_ids"]) for document in documents]
        labels = [
            document_labels(document, ids)
            for document, ids in zip(documents, input_ids, strict=True)
        ]
        rows = list(_seq_lengths(documents, input_ids))
        lengths = [length for row in rows for length in row if length]
        tails = self._tails(sum(lengths))
        tail = sum(tails)
        empty = self._empty_documents(len(lengths) + len(tails))
        lengths += [0] * empty + tails
        input_ids.append(np.full(tail, self.pad_token_id, dtype=np.int64))
        labels.append(np.full(tail, IGNORE_INDEX, dtype=np.int64))
        batch = _batch(
            np.concatenate(input_ids), np.concatenate(labels), lengths, self.static_shapes
        )
        if _weighs(documents, self.loss_weighting):
            weights = [
                _token_weights(document, len(ids), number)
                for number, (document, ids) in enumerate(
                    zip(documents, input_ids, strict=False)  # no document: a tail
                )
            ]
            batch[TOKEN_WEIGHTS] = _weights(
                np.concatenate([*weights, np.ones(tail)]),
                batch["labels"],
                lengths,
                [
                    document_weight(document, _WHICH.format(number))
                    for number, (document, row) in enumerate(zip(documents, rows, strict=True))
                    for length in row
                    if length
                ]
                + [1.0] * (empty + len(tails)),
                self.loss_weighting,
            )
        if any(SOURCE_IDS in document for document in documents):
            ids_of_rows = [*(document[SOURCE_IDS] for document in documents), *[-1] * bool(tail)]
            source_ids = np.repeat(ids_of_rows, [*map(sum, rows), *[tail] * bool(tail)])
            batch[SOURCE_IDS] = torch.from_numpy(source_ids)[None]
        if not self.tensors_only:
            return PackedBatch(batch)
        tensors = {name: value for name, value in batch.items() if torch.is_tensor(value)}
        # What a class of the user's own changes in a batch, the host would not know of.
        if not self.host_row or type(self).__call__ is not PackedCollator.__call__:
            return PackedBatch(tensors)
        is_trained = tensors["labels"][0].numpy() != IGNORE_INDEX
        boundaries = np.cumsum([0, *lengths], dtype=np.int64)
        return PackedBatch(
            tensors, HostRow(boundaries, is_trained, tail, max_length=batch["max_length_q"])
        )

    def _tails(self, num_tokens: int) -> list[int]:
        """Return the lengths of the masked documents behind so many tokens."""
        if self.static_shapes is not None:
            return self.static_shapes.tail(num_tokens)
        multiple = self.pad_to_multiple_of or 1
        tail = -num_tokens % multiple if num_tokens else multiple
        return [tail] if tail else []

    def _empty_documents(self, num_documents: int) -> int:
        """Return how many documents without tokens stand in front of the masked ones."""
        return self.static_shapes.empty_documents(num_documents) if self.static_shapes else 0


class DataCollatorWithFlattening(PackedCollator):
    """transformers' class of this name, whose batch also says where its documents end.

    Takes its arguments. Boundaries, `seq_idx` and `position_ids` are always in the batch, so
    `return_flash_attn_kwargs` and `return_seq_idx` change nothing; `return_position_ids` must be
    True, `separator_id` -100, `position_ids_start` 0 and `return_tensors` "pt". A model that needs
    them to keep documents apart (`tests/drop_in/test_articles.py` has one) also needs
    `enable_packing(model)`.

    Raises ValueError for settings under which a batch would be another one: a `separator_id` that
    is trained, no `position_ids` or other ones, other tensors than PyTorch's.
    """

    def __init__(
        self,
        *,
        return_position_ids: bool = True,
        separator_id: int = IGNORE_INDEX,
        return_flash_attn_kwargs: bool = True,
        return_seq_idx: bool = True,
        position_ids_start: int = 0,
        return_tensors: str = "pt",
    ):
        for name, value, needed in (
            ("return_position_ids", return_position_ids, True),
            ("separator_id", separator_id, IGNORE_INDEX),
            ("position_ids_start", position_ids_start, 0),
            ("return_tensors", return_tensors, "pt"),
        ):
            if value != needed:
                raise ValueError(
                    f"{name}={value!r} is not possible here, only {needed!r}; leave it out, or "
                    "take transformers' DataCollatorWithFlattening"
                )
        super().__init__()


@dataclass
class WeightedPaddedCollator:
    """The padded batches of `collator` (TRL's), with the weights and sources of the packed ones."""

    collator: Any
    loss_weighting: str = "token"

    def __call__(self, documents: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
        """Return its batch; `loss_weights` ``(rows, T)`` float32 as in the packed batch."""
        batch = self.collator(documents)
        labels = batch["labels"]
        if _weighs(documents, self.loss_weighting):
            weights = np.zeros(labels.shape)
            for number, (row, document) in enumerate(zip(weights, documents, strict=True)):
                length = len(document["input_ids"])
                row[:length] = _token_weights(document, length, number)
            weights[:, 0] = 0  # never a target
            factors = [document_weight(d, _WHICH.format(n)) for n, d in enumerate(documents)]
            lengths = [labels.shape[1]] * len(labels)
            batch[TOKEN_WEIGHTS] = _weights(weights, labels, lengths, factors, self.loss_weighting)
        if any(SOURCE_IDS in document for document in documents):
            source_ids = torch.tensor([int(document[SOURCE_IDS]) for document in documents])
            batch[SOURCE_IDS] = source_ids[:, None].repeat(1, labels.shape[1])
        return batch


_WHICH = "document {} of a micro-batch"


def _token_weights(document: Mapping[str, Any], num_tokens: int, number: int) -> np.ndarray:
    try:
        return token_weights(document, num_tokens)
    except ValueError as problem:
        raise ValueError(f"{_WHICH.format(number)}: {problem}") from None


def _weighs(documents: Sequence[Mapping[str, Any]], loss_weighting: str) -> bool:
    return loss_weighting != "token" or any(
        document.get(TOKEN_WEIGHTS) is not None or DOCUMENT_WEIGHT in document
        for document in documents
    )


def _weights(
    weights: np.ndarray,
    labels: torch.Tensor,
    lengths: Sequence[int],
    factors: Sequence[float],
    loss_weighting: str,
) -> torch.Tensor:
    """Return what every token counts, as `labels` and float32, given its own weight."""
    flat = weigh_tokens(weights.ravel(), labels.numpy().ravel(), lengths, factors, loss_weighting)
    return torch.from_numpy(flat).view(labels.shape)


def _token_ids(values: Any) -> np.ndarray:
    ids = np.asarray(values)
    if ids.dtype.kind not in "iu" and ids.size:
        raise ValueError(f"input_ids must be integers, got {ids.dtype}; tokenize the text first")
    return ids.astype(np.int64, copy=False)


def _seq_lengths(
    documents: Sequence[Mapping[str, Any]], input_ids: Sequence[np.ndarray]
) -> Iterator[list[int]]:
    for row, (document, ids) in enumerate(zip(documents, input_ids, strict=True)):
        if document.get(SEQ_LENGTHS) is None:
            numbers = np.asarray(document.get("attention_mask", ()))
            is_packed = numbers.size > 0 and numbers.max() > 1  # a row of `PackedDataset`
            yield lengths_from_numbers(numbers).tolist() if is_packed else [len(ids)]
            continue
        lengths = np.asarray(document[SEQ_LENGTHS]).tolist()
        if sum(lengths) != len(ids):
            raise ValueError(
                f"row {row} of the batch holds {len(ids)} tokens but its seq_lengths sum to "
                f"{sum(lengths)}; they must name every token"
            )
        yield lengths


def _batch(
    input_ids: np.ndarray, labels: np.ndarray, lengths: list[int], shapes: StaticShapes | None
) -> dict[str, Any]:
    seq_lengths = torch.tensor(lengths, dtype=torch.int64)
    flat_labels = torch.from_numpy(labels)
    starts = seq_lengths.cumsum(0) - seq_lengths
    flat_labels[starts[seq_lengths > 0]] = IGNORE_INDEX
    return {
        "input_ids": torch.from_numpy(input_ids)[None],
        "labels": flat_labels[None],
        **boundaries_of_row(seq_lengths, longest=shapes.max_length if shapes else 0),
    }
