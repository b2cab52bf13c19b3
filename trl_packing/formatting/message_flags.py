"""Messages that carry their own "train" or "weight", which decide whether and how much they train.

{"role": "assistant", "content": …, "train": false}      not trained
{"role": "assistant", "content": …, "weight": 0.5}       trained, with half the weight
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
from datasets import Dataset, IterableDataset

Row = Mapping[str, Any]


def says_what_is_trained(row: Row) -> bool:
    """Return whether a message of `row` has a "train" or "weight" that is not null."""
    return any(message.get(flag) is not None for message in _all_messages(row) for flag in _FLAGS)


def has_flags(dataset: Dataset | IterableDataset, first: Row) -> bool:
    """Return whether any message of a data set has a "train" or "weight" that is not null.

    For a stream, return whether messages of its `first` row have such keys: if they are null there,
    later rows may still set them.
    """
    named = any(flag in message for message in _all_messages(first) for flag in _FLAGS)
    if not named or isinstance(dataset, IterableDataset):
        return named
    columns = [name for name in _MESSAGE_COLUMNS if name in dataset.column_names]
    return any(_has_flags(chunk) for name in columns for chunk in dataset.data.column(name).chunks)


def _has_flags(chunk: pa.Array) -> bool:
    kind = chunk.type
    if not pa.types.is_list(kind) and not pa.types.is_large_list(kind):
        return not pa.types.is_string(kind)  # e.g. JSON, where reading all rows would be slow
    if not pa.types.is_struct(kind.value_type):
        return False
    messages = chunk.flatten()
    names = {field.name for field in kind.value_type} & set(_FLAGS)
    return any(messages.field(name).null_count < len(messages) for name in names)


_FLAGS = ("train", "weight")
_MESSAGE_COLUMNS = ("prompt", "completion", "messages", "conversations")


def _all_messages(row: Row) -> list[Mapping[str, Any]]:
    lists = [row.get(name) for name in _MESSAGE_COLUMNS]
    messages = [m for each in lists if isinstance(each, list) for m in each]
    return [message for message in messages if isinstance(message, dict)]
