"""Padding of rows that were tokenized with ``padding="max_length"`` is cut.

input_ids         5   6   7   0   0          5   6   7
attention_mask    1   1   1   0   0    ──►   1   1   1        at either end
"""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
from trl.data_utils import get_dataset_column_names

from trl_packing.data.fitting import Pieces, cut_documents
from trl_packing.data.limits import check_entries
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    and_others,
)

_MASK = "attention_mask"
_BY_TOKEN = (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS, _MASK)


def cut_padding(
    dataset: datasets.Dataset | datasets.IterableDataset,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[datasets.Dataset | datasets.IterableDataset, str | None]:
    """Return `dataset` without padding, and a sentence that counts the padding, or None.

    Raises ValueError naming the row for an `attention_mask` that is 0 elsewhere than at the ends,
    or in a stream (while it is read) anywhere. Packed rows do not change.
    """
    columns = get_dataset_column_names(dataset)
    if not {"input_ids", _MASK} <= {*columns} or SEQ_LENGTHS in columns:
        return dataset, None
    if isinstance(dataset, datasets.IterableDataset):
        options = {"batched": True, "with_indices": True, "fn_kwargs": {"name": name}}
        return dataset.with_format(None).map(_check_not_padded, **options), None
    documents, where = ArrowDocuments(dataset, ("input_ids", _MASK)), f"of the {name} dataset"
    check_entries(documents, where)
    starts, stops, ones = documents.by_document(_MASK, _ends_of_ones).T
    wrong = np.flatnonzero(stops - starts != ones)
    if len(wrong):
        raise ValueError(
            f"document {wrong[0]} {where} has an {_MASK} that is no padding: it has other values "
            "than 0 and 1, or is 0 between tokens where it is 1; remove these tokens, or give "
            f"lengths of several documents as seq_lengths{and_others(wrong)}"
        )
    padding = documents.lengths() - ones
    note = (
        f"{int((padding > 0).sum()):,} of {len(padding):,} rows {where} were padded beforehand: "
        f"{int(padding.sum()):,} padding tokens ({_MASK} 0) are cut"
    )
    real, by_token = Pieces.of(starts, stops), [c for c in columns if c in _BY_TOKEN]
    desc = f"Cutting padding {where}"
    documents_cut = cut_documents(documents, real, by_token, num_proc=num_proc, desc=desc)
    return documents_cut, note if padding.any() else None


def _check_not_padded(
    batch: Mapping[str, Sequence[Any]], rows: Sequence[int], name: str
) -> dict[str, Sequence[Any]]:
    """Return a batch of a stream. Raise ValueError naming its first document with padding."""
    for row, mask in zip(rows, batch[_MASK], strict=True):
        if {*(mask or ())} - {1}:
            raise ValueError(
                f"document {row} of the {name} stream has an {_MASK} with other values than 1; "
                "tokenize without padding, or pass a Dataset"
            )
    return dict(batch)


def _ends_of_ones(mask: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return where each row's nonzero values begin and end, and how many are 1, ``(rows, 3)``."""
    at = np.append(np.flatnonzero(mask), 0)
    first, behind = (np.searchsorted(at[:-1], ends) for ends in (offsets[:-1], offsets[1:]))
    ends = np.array([at[np.minimum(first, len(at) - 1)], at[behind - 1] + 1]) - offsets[:-1]
    ones = np.diff(np.concatenate([[0], np.cumsum(mask == 1)])[offsets])
    return np.array([*np.where(behind > first, ends, 0), ones]).T
