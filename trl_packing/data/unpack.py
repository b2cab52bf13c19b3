"""Packed rows → their documents, in order, for callers who expect one row of logits per document.

input_ids    11 12 13 21 22      seq_lengths  3 2       one row
             11 12 13                                   its documents, each with the row's
             21 22                                      values in other columns
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from trl.data_utils import get_dataset_column_names

from trl_packing.data.overflow import Pieces, gather
from trl_packing.documents.arrow import list_column, lists_of, token_lists
from trl_packing.documents.labels import SEQ_LENGTHS

AnyDataset = TypeVar("AnyDataset", datasets.Dataset, datasets.IterableDataset)


def unpack_rows(dataset: AnyDataset) -> AnyDataset:
    """Return the documents of `dataset`, whose rows have `seq_lengths`, in order."""
    if isinstance(dataset, datasets.Dataset):
        unpacked = dataset.with_format("arrow").map(unpack_table, batched=True)
        return unpacked.with_format(None)
    columns = get_dataset_column_names(dataset)
    return dataset.with_format(None).map(_unpack_batch, batched=True, remove_columns=columns)


def _unpack_batch(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    return unpack_table(
        pa.table({name: pa.array(values) for name, values in batch.items()})
    ).to_pydict()


def unpack_table(table: pa.Table) -> pa.Table:
    """Return a row for every document of the rows of `table`, without `seq_lengths`."""
    packed = table.column(SEQ_LENGTHS).combine_chunks()
    lengths, offsets = lists_of(SEQ_LENGTHS, packed)
    lengths, rows = lengths[offsets[0] : offsets[-1]], table.drop_columns(SEQ_LENGTHS)
    if "labels" not in rows.column_names:  # every token is trained
        rows = rows.append_column("labels", rows.column("input_ids"))
    tokens = token_lists(rows)
    row_of = np.repeat(np.arange(len(rows)), np.diff(offsets))
    stops = np.cumsum(lengths)
    first = tokens["input_ids"][1][row_of]
    pieces = Pieces(row_of, stops - lengths - first, stops - first)
    columns = [
        list_column(*gather(tokens[field.name], pieces), field)
        if field.name in tokens
        else rows.column(field.name).take(pa.array(row_of))
        for field in rows.schema
    ]
    return pa.table(columns, names=rows.column_names)
