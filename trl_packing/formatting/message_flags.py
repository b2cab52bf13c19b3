"""Messages that carry their own "train" or "weight", which decide whether and how much they train.

{"role": "assistant", "content": …, "train": false}      not trained
{"role": "assistant", "content": …, "weight": 0.5}       trained, with half the weight

Every message of a data set decides, not the first row or the type of a column: `load_dataset`
stores messages with unlike keys as JSON, others with nulls. A stream cannot be read ahead, so its
first row decides, and flags that appear later are refused when they are rendered (`row_format.py`).
"""

from collections.abc import Mapping
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset, IterableDataset

Row = Mapping[str, Any]


def flag_of(message: Any) -> str | None:
    """Return "train" or "weight" if a message has a value there, None if it has neither."""
    if not isinstance(message, Mapping):
        return None
    return next((flag for flag in _FLAGS if message.get(flag) is not None), None)


def has_flags(dataset: Dataset | IterableDataset, first: Row) -> bool:
    """Return whether any message of a data set has a "train" or "weight" that is not null.

    For a stream, return whether messages of its `first` row name one of them, also if it is null.
    """
    if isinstance(dataset, IterableDataset):
        return any(isinstance(m, Mapping) and {*_FLAGS} & m.keys() for m in messages_in(first))
    columns = [name for name in _MESSAGE_COLUMNS if name in dataset.column_names]
    rows = dataset.select_columns(columns).with_format(None)
    kinds = [dataset.data.schema.field(name).type for name in columns]
    if not any(_may_name_flags(kind) for kind in kinds):
        return False
    tables = rows.with_format("arrow")  # without rows that a selection has left out
    for start in range(0, len(rows), _ROWS_AT_ONCE):
        table = tables[start : start + _ROWS_AT_ONCE]
        if any(_may_hold_flags(chunk) for column in table.columns for chunk in column.chunks):
            batch = rows.select(range(start, start + len(table)))
            if any(flag_of(message) for row in batch for message in messages_in(row)):
                return True
    return False


def _may_name_flags(kind: pa.DataType) -> bool:
    """Whether messages of a column of this type may have one of the keys."""
    if pa.types.is_nested(kind) and not pa.types.is_struct(kind):
        return _may_name_flags(kind.value_type)
    if pa.types.is_struct(kind):
        return bool({*_FLAGS} & {field.name for field in kind})
    return isinstance(kind, pa.BaseExtensionType)  # JSON; other values are no messages


def _may_hold_flags(values: pa.Array) -> bool:
    """Whether a look at the rows is needed: a key has a value, or the JSON has its name."""
    kind = values.type
    if isinstance(kind, pa.BaseExtensionType):
        return bool(pc.any(pc.match_substring_regex(values.storage, _NAMES)).as_py())
    if pa.types.is_struct(kind):
        names = {*_FLAGS} & {field.name for field in kind}
        return any(values.field(name).null_count < len(values) for name in names)
    return pa.types.is_nested(kind) and _may_hold_flags(values.flatten())


_FLAGS = ("train", "weight")
_NAMES = '"(train|weight)"'
_MESSAGE_COLUMNS = ("prompt", "completion", "messages", "conversations")
_ROWS_AT_ONCE = 10_000


def messages_in(row: Row) -> list[Any]:
    """Return the messages in all columns of a row."""
    lists = [row.get(name) for name in _MESSAGE_COLUMNS]
    return [message for each in lists if isinstance(each, list) for message in each]
