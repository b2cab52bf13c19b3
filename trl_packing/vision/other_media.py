"""Refuses videos and audio by name: only their placeholders would be trained."""

from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from datasets import Dataset

from trl_packing.documents.arrow import stored_rows

_COLUMNS = ("video", "videos", "audio", "audios")
_KINDS = ("video", "video_url", "audio", "audio_url", "input_audio")
_MESSAGES = ("messages", "prompt", "completion")


def check_no_other_media(dataset: Dataset, name: str) -> None:
    """Raise ValueError naming the first row with a video or audio.

    Args:
        dataset: rows for a model with a processor.
        name: of the data set, for messages.
    """
    for column in (c for c in _COLUMNS if c in dataset.column_names):
        rows = np.flatnonzero(_is_filled(dataset.data.column(column))[stored_rows(dataset)])
        if len(rows):
            raise ValueError(
                f"row {rows[0]} of the {name} dataset has {column!r}; only text and images can be "
                "trained here, so remove the row, or the column"
            )
    for column in (c for c in _MESSAGES if c in dataset.column_names):
        found = _kinds_of_parts(dataset.data.column(column)) & {*_KINDS}
        row = _first_row_with(dataset, column, found) if found else None
        if row is not None:
            raise ValueError(
                f"row {row} of the {name} dataset: a message has a part of type "
                f"{sorted(found)[0]!r}; only text and images can be trained here"
            )


def _is_filled(column: pa.ChunkedArray) -> np.ndarray:
    """Return whether each row of a column holds anything, ``(rows,)`` bool."""
    filled = pc.is_valid(column)
    if pa.types.is_list(column.type) or pa.types.is_large_list(column.type):
        filled = pc.fill_null(pc.greater(pc.list_value_length(column), 0), False)
    return np.asarray(filled, dtype=bool)


def _kinds_of_parts(column: pa.ChunkedArray) -> set[Any]:
    """Return the types of the parts of all messages in a column of conversations."""
    for field in ("content", "type"):
        value = getattr(column.type, "value_type", None)
        if value is None or not pa.types.is_struct(value) or value.get_field_index(field) < 0:
            return set()
        column = pc.struct_field(pc.list_flatten(column), field)
    return set(pc.unique(column).to_pylist())


def _first_row_with(dataset: Dataset, column: str, kinds: set[Any]) -> int | None:
    for row, messages in enumerate(dataset.with_format(None)[column]):
        parts = [part for message in messages or () for part in message["content"] or ()]
        if any(part.get("type") in kinds for part in parts):
            return row
    return None
