"""Documents of a data set on which isolation is checked: the shortest, a middling, the longest."""

from collections.abc import Iterator, Mapping
from itertools import accumulate, islice
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_packing.attention.model_facts import length_constants
from trl_packing.data.limits import NO_LIMITS, ModelLimits
from trl_packing.data.stream import NOTHING_TO_TRAIN, check_lengths
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import SEQ_LENGTHS

_OF_STREAM = 16  # rows of a stream that are read


def representative_documents(lengths: np.ndarray) -> list[int]:
    """Return the indices of the shortest, a middling and the longest document, in data-set order.

    Args:
        lengths: tokens of each document, ``(N,)`` int64, at least one document.

    Examples:
        >>> representative_documents(np.array([5, 90, 7, 30, 2]))
        [1, 2, 4]
    """
    order = np.argsort(lengths, kind="stable")
    return sorted({int(order[i]) for i in (0, len(order) // 2, -1)})


def sample_documents(
    dataset: Any, model: Any, max_length: int | None, limits: ModelLimits = NO_LIMITS
) -> list[np.ndarray]:
    """Return the token ids ``(T,)`` of documents that represent a prepared data set.

    Args:
        dataset: documents or packed rows, stored or streamed. Only the first rows of a stream are
            read. A longer document is added if those to come may cross a length at which the model
            changes.
        model: the model that will run them.
        max_length: most tokens of a document of a stream; None if unknown.
        limits: the model's limits, which documents of a stream must respect.

    Raises:
        ValueError: a stream is empty, or one of its documents exceeds `limits`.
    """
    if isinstance(dataset, IterableDataset):
        return _of_stream(dataset, model, max_length, limits)
    documents = ArrowDocuments(dataset, ["input_ids"])
    rows, starts, lengths = _places(dataset, documents.lengths())
    return [
        documents[int(rows[i])]["input_ids"][starts[i] : starts[i] + lengths[i]]
        for i in representative_documents(lengths)
    ]


def _of_stream(
    dataset: IterableDataset, model: Any, max_length: int | None, limits: ModelLimits
) -> list[np.ndarray]:
    first = list(islice(dataset, _OF_STREAM))
    if not first:
        raise ValueError(NOTHING_TO_TRAIN)
    for number, row in enumerate(first):
        check_lengths(row, number)
        limits.check_document(row, f"document {number} of the stream")
    found = [
        np.asarray(row["input_ids"])[start : start + length]
        for row in first
        for start, length in _documents_of_row(row)
    ]
    # Documents that are still to come may be as long as max_length allows.
    beyond = [
        constant
        for constant in length_constants(model)
        if max(map(len, found)) <= constant < (max_length or 0)
    ]
    return [*found, np.resize(found[0], beyond[-1] + 1)] if beyond else found


def _documents_of_row(row: Mapping[str, Any]) -> Iterator[tuple[int, int]]:
    """Yield first token and length of each document; a packed row holds several."""
    lengths = row.get(SEQ_LENGTHS)
    lengths = [len(row["input_ids"])] if lengths is None else lengths
    yield from (
        (end - length, length) for length, end in zip(lengths, accumulate(lengths), strict=True)
    )


def _places(dataset: Dataset, lengths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return row, first token and length of every document, ``(N,)`` each.

    Args:
        dataset: documents, or packed rows, which hold several documents each.
        lengths: tokens of each row.
    """
    if not is_packed(dataset):
        return np.arange(len(lengths)), np.zeros(len(lengths), dtype=np.int64), lengths
    packed = [row[SEQ_LENGTHS] for row in ArrowDocuments(dataset, [SEQ_LENGTHS])]
    rows = np.repeat(np.arange(len(packed)), [len(row) for row in packed])
    starts = np.concatenate([np.cumsum(row) - row for row in packed])
    return rows, starts, np.concatenate(packed)
