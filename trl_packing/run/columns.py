"""Columns of prepared data sets that training reads: tokens, labels and weights."""

from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_packing.data.stream import columns_kept
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IMAGE_IDS,
    IMAGE_ROW,
    SEQ_LENGTHS,
    SOURCE_IDS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)
from trl_packing.documents.weights import check_token_weights, document_weights_from_rows
from trl_packing.loss.sums import Sources, check_weights_can_be_used

_ROW_COLUMNS = (*TOKEN_COLUMNS, TOKEN_WEIGHTS, IMAGE_IDS, SEQ_LENGTHS)


def documents_of(
    dataset: Dataset, compute_loss_func: Any, sources: Sources | None = None
) -> ArrowDocuments:
    """Return the documents of prepared rows, read from Arrow without a copy.

    `sources` are those of the rows whose losses are told apart. Raises ValueError for weights that
    are damaged, or that `compute_loss_func`, a user's, does not know.
    """
    check_weights_can_be_used(compute_loss_func, dataset.column_names)
    scalars = {}
    if DOCUMENT_WEIGHT in dataset.column_names:
        scalars[DOCUMENT_WEIGHT] = document_weights_from_rows(dataset, "prepared")
    if IMAGE_ROW in dataset.column_names:
        scalars[IMAGE_ROW] = np.asarray(dataset.with_format("numpy")[IMAGE_ROW][:])
    if sources is not None:
        scalars[SOURCE_IDS] = sources.ids
    present = [name for name in _ROW_COLUMNS if name in dataset.column_names]
    documents = ArrowDocuments(dataset, present, scalars)
    if TOKEN_WEIGHTS in present:
        check_token_weights(documents)
    return documents


def columns_of(dataset: Any) -> list[str]:
    """Return the names of the columns; none unless it is a data set of `datasets`."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return []
    names = dataset.column_names or columns_kept(dataset)
    return names or list(next(iter(dataset), {}))  # some streams know them only by being read


def weight_columns(dataset: Any) -> list[str]:
    """Return the columns of `dataset` that weigh its tokens or its documents."""
    return [column for column in columns_of(dataset) if column in WEIGHT_COLUMNS]


def training_columns(dataset: IterableDataset, *named: str) -> list[str]:
    """Return the columns of a stream that training reads, and those of `named` that it has."""
    present = columns_of(dataset)
    return [name for name in (*_ROW_COLUMNS, DOCUMENT_WEIGHT, *named) if name in present]
