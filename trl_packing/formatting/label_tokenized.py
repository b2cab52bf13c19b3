"""Labels for documents that were tokenized before: from their masks, or from a response template.

input_ids          5  6  7  8
completion_mask    0  0  1  1      labels  -100 -100 7 8        label_tokenized
template           5  6            labels  -100 -100 7 8        label_documents
"""

import logging
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
from datasets import Dataset, Features, IterableDataset, List, Value
from trl.data_utils import get_dataset_column_names

from trl_packing.documents.bad_rows import check_same_columns, named_if_beyond_int64
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_WEIGHTS,
    document_labels,
)
from trl_packing.formatting.response_template import ResponseTemplate

logger = logging.getLogger(__name__)


class ResponseLabeler:
    """Finds the trained tokens of documents by `templates`, and counts documents without them.

    Attributes:
        templates: response template, and instruction template if there is one.
        num_seen: documents so far.
        num_not_found: documents among them without the template.
    """

    def __init__(self, templates: ResponseTemplate):
        self.templates = templates
        self.num_seen = self.num_not_found = 0

    def trained(self, input_ids: np.ndarray) -> np.ndarray:
        """Count a document, and return ``(T,)`` bool, True on its trained tokens."""
        trained = self.templates.trained(input_ids)
        self.num_seen += 1
        if trained is not None:
            return trained
        self.num_not_found += 1
        if str(self.num_not_found).rstrip("0") == "1":  # 1, 10, 100, …: not one line per document
            logger.warning(self.templates.not_found(self.num_not_found, self.num_seen, input_ids))
        return np.zeros(len(input_ids), bool)


def label_documents(
    dataset: Dataset | IterableDataset,
    labeler: ResponseLabeler,
    *,
    named: Sequence[str] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[Dataset | IterableDataset, str | None]:
    """Return `dataset` with `labels` from `labeler`, and a sentence on documents without template.

    The sentence is None if all have it. A stream has no sentence: each time it is read, the labeler
    counts its documents and warns. Only its token columns are kept, and those that are `named`.

    Raises:
        ValueError: if no document of a data set has the template.
    """
    if isinstance(dataset, IterableDataset):
        columns = get_dataset_column_names(dataset)
        known = dataset.features or {}
        types = {c: known.get(c, Value("string")) for c in named} | _STREAM_COLUMNS
        kept = [c for c in types if c in {*columns, "labels"}]
        labeled = dataset.map(
            _label_stream,
            batched=True,
            fn_kwargs={"labeler": labeler},
            remove_columns=[c for c in columns if c not in kept],
            # Without these, a look at its columns would read, and count, the first 1,000 documents.
            features=Features({c: types[c] for c in kept}),
        )
        return labeled, None
    # Not the labeler: it could not count in other processes, nor for a cached result.
    labeled = dataset.map(
        _label_batch,
        batched=True,
        fn_kwargs={"templates": labeler.templates},
        num_proc=num_proc,
        desc=f"Finding the response template in {name} dataset",
    )
    seen, not_found = (np.asarray(labeled.with_format("numpy")[c][:]) for c in _COUNTS)
    labeled = labeled.remove_columns(list(_COUNTS))
    labeler.num_seen += int(seen.sum())
    labeler.num_not_found += int(not_found.sum())
    if not not_found.any():
        return labeled, None
    first = np.asarray(labeled[int(np.argmax(not_found > 0))]["input_ids"])
    words = labeler.templates.not_found(int(not_found.sum()), int(seen.sum()), first)
    if (not_found == seen).all():
        raise ValueError(f"no document of the {name} dataset has a trained token left: {words}")
    return labeled, f"{name} dataset: {words}"


_STREAM_COLUMNS = {
    "input_ids": List(Value("int64")),
    "labels": List(Value("int64")),
    SEQ_LENGTHS: List(Value("int64")),
    TOKEN_WEIGHTS: List(Value("float32")),
    DOCUMENT_WEIGHT: Value("float32"),
}
_COUNTS = ("_documents_seen", "_documents_not_found")


def _label_batch(batch: Mapping[str, Any], templates: ResponseTemplate) -> dict[str, list[Any]]:
    labels, seen, not_found = [], [], []
    for documents in _documents_of(batch):
        trained = [templates.trained(ids) for ids in documents]
        labels.append(
            np.concatenate(
                [
                    np.full(len(ids), IGNORE_INDEX) if mask is None else _masked(ids, mask)
                    for ids, mask in zip(documents, trained, strict=True)
                ]
            )
        )
        seen.append(len(documents))
        not_found.append(sum(mask is None for mask in trained))
    return {"labels": labels, **dict(zip(_COUNTS, (seen, not_found), strict=True))}


def _label_stream(batch: Mapping[str, Any], labeler: ResponseLabeler) -> dict[str, list[Any]]:
    labels = [
        np.concatenate([_masked(ids, labeler.trained(ids)) for ids in documents])
        for documents in _documents_of(batch)
    ]
    return {"labels": labels}


def _masked(ids: np.ndarray, trained: np.ndarray) -> np.ndarray:
    return np.where(trained, ids, IGNORE_INDEX)


def _documents_of(batch: Mapping[str, Any]) -> list[list[np.ndarray]]:
    """Return the documents of each row: one, or those that its `seq_lengths` describe."""
    rows = [np.asarray(ids, dtype=np.int64) for ids in batch["input_ids"]]
    if SEQ_LENGTHS not in batch:
        return [[ids] for ids in rows]
    return [
        np.split(ids, np.cumsum(np.asarray(lengths))[:-1])
        for ids, lengths in zip(rows, batch[SEQ_LENGTHS], strict=True)
    ]


# --- by masks -------------------------------------------------------------------------------------


def label_tokenized(
    dataset: Dataset | IterableDataset,
    *,
    completion_only: bool,
    num_proc: int | None = None,
    name: str = "train",
) -> Dataset | IterableDataset:
    """Return `dataset` with `labels` made from its masks, as TRL does; existing labels stay.

    Args:
        dataset: has `input_ids`, and perhaps `completion_mask` and `assistant_masks`.
        completion_only: apply `completion_mask`; `assistant_masks` are always applied.
        num_proc: processes.
        name: of the data set, for messages.
    """
    present = get_dataset_column_names(dataset)
    if "labels" in present:
        return dataset
    options: dict[str, Any] = {
        "fn_kwargs": {"completion_only": completion_only, "columns": present},
        "batched": True,
        "with_indices": True,
    }
    if isinstance(dataset, Dataset):
        options |= {"num_proc": num_proc, "desc": f"Building labels for {name} dataset"}
    masks = [column for column in MASK_COLUMNS if column in present]
    return dataset.with_format(None).map(_label_by_masks, remove_columns=masks, **options)


def _label_by_masks(
    batch: Mapping[str, Sequence[Any]],
    rows_read: Sequence[int],
    completion_only: bool,
    columns: Sequence[str],
) -> dict[str, list[np.ndarray]]:
    check_same_columns(batch, rows_read, columns)
    ignored = () if completion_only else ("completion_mask",)
    masks = [name for name in MASK_COLUMNS if name in batch and name not in ignored]
    rows = zip(batch["input_ids"], *(batch[name] for name in masks), strict=True)
    with named_if_beyond_int64(batch, rows_read):
        labels = [
            document_labels(dict(zip(masks, values, strict=True)), np.asarray(ids, np.int64))
            for ids, *values in rows
        ]
    return {"labels": labels}
