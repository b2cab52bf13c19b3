"""Checks of a data set that run before anything is computed on it."""

from collections.abc import Iterable
from typing import Any

import numpy as np
from datasets import Dataset, IterableDataset

from trl_packing.data.limits import NO_LIMITS
from trl_packing.documents.arrow import AnyDataset, ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    SEQ_LENGTHS,
    TOKEN_WEIGHTS,
    and_others,
    row_name,
)


def check_is_dataset(dataset: Any, name: str) -> None:
    """Raise TypeError for an object without columns, ValueError for a stream of packed rows."""
    if not hasattr(dataset, "column_names"):
        kind = type(dataset).__name__
        raise TypeError(f"the {name} dataset is a {kind}; pass a Dataset or an IterableDataset")
    if isinstance(dataset, IterableDataset) and is_packed(dataset):
        raise ValueError(f"rows of the {name} stream were packed before; pass them as a Dataset")


def check_not_empty(dataset: AnyDataset, name: str) -> None:
    """Raise ValueError if `dataset` has no rows."""
    if not len(dataset) if isinstance(dataset, Dataset) else next(iter(dataset), None) is None:
        raise ValueError(f"the {name} dataset is empty: it has no rows; check how it was loaded")


def check_is_one_set(dataset: Any, reason: str) -> None:
    """Raise ValueError if a training set is a dictionary; `reason` is that for TRL's path."""
    if isinstance(dataset, dict):
        raise ValueError(f"only packed runs train a dictionary of data sets, but {reason}")


def check_columns(dataset: AnyDataset, name: str, text_field: str) -> None:
    """Raise ValueError if `dataset` has no column to train on, or token columns do not match."""
    columns = dataset.column_names
    if columns is None:  # a stream whose columns are known only by reading it
        return
    if not {"input_ids", "messages", "conversations", "prompt", text_field} & set(columns):
        raise ValueError(
            f"the {name} dataset has no column to train on: it has {columns}; name one "
            f"{text_field!r}, 'messages', 'prompt' or 'input_ids', or pass formatting_func"
        )
    NO_LIMITS.check(dataset, name)  # no id is negative


def check_weights_have_tokens(columns: Iterable[str], name: str) -> None:
    """Raise ValueError if rows that are not tokenized have one weight per token."""
    if TOKEN_WEIGHTS in columns and "input_ids" not in columns:
        raise ValueError(
            f"the {name} dataset has {TOKEN_WEIGHTS!r}, one weight per token, but no 'input_ids'; "
            f"give each document a {DOCUMENT_WEIGHT!r}, each message a 'weight', or tokenized rows"
        )


PADDED = "{} has other masks than 1; tokenize without padding"


def check_not_padded(dataset: Dataset, name: str) -> None:
    """Raise ValueError for tokenized rows whose `attention_mask` is not 1; packed ones may be."""
    masks = ArrowDocuments(dataset, ("attention_mask", "input_ids"))
    if len(masks.columns) < 2 or SEQ_LENGTHS in dataset.column_names:
        return
    if len(rows := masks.rows_where("attention_mask", lambda mask: mask != 1)):
        raise ValueError(PADDED.format(row_name(rows[0], name, "document")) + and_others(rows))


def check_packed_rows(rows: Dataset, capacity: int | None, name: str) -> None:
    """Raise ValueError if packed rows exceed `capacity` or misstate their lengths."""
    documents = ArrowDocuments(rows, ["input_ids", SEQ_LENGTHS])
    lengths = documents.lengths()
    is_wrong = lengths != documents.sums(SEQ_LENGTHS)
    is_wrong[documents.rows_where(SEQ_LENGTHS, lambda stated: stated < 0)] = True
    if len(wrong := np.flatnonzero(is_wrong)):
        stated = documents[int(wrong[0])][SEQ_LENGTHS].tolist()
        raise ValueError(
            f"{row_name(wrong[0], name)} holds {lengths[wrong[0]]} input_ids, but its "
            f"seq_lengths are {stated}; they must name every token{and_others(wrong)}"
        )
    if capacity is not None and lengths.max() > capacity:
        which = f"{row_name(int(lengths.argmax()), name)} is packed"
        raise ValueError(f"{which} and has {lengths.max()} tokens; raise max_length={capacity}")
