"""Rows that the user padded → documents without padding.

    input_ids         5   6   7   0   0          5   6   7
    attention_mask    1   1   1   0   0    ──►   1   1   1        2 padding tokens cut
    labels            .   6   7   .   .          .   6   7

A tokenizer called with ``padding="max_length"`` makes such rows. Padding at either end is cut.
Zeros in the middle of a row are not padding, and raise an error.
"""

from collections.abc import Mapping, Sequence
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from accelerate.logging import get_logger
from trl.data_utils import get_dataset_column_names

from trl_packing.data.overflow import Pieces, gather
from trl_packing.documents.arrow import ArrowDocuments, flat_lists, list_column
from trl_packing.documents.bad_rows import and_others
from trl_packing.documents.labels import MASK_COLUMNS, SEQ_LENGTHS, TOKEN_COLUMNS, TOKEN_WEIGHTS

logger = get_logger(__name__)

_MASK = "attention_mask"
_BY_TOKEN = (*TOKEN_COLUMNS, *MASK_COLUMNS, SEQ_LENGTHS, TOKEN_WEIGHTS, _MASK)


def cut_padding(
    dataset: datasets.Dataset | datasets.IterableDataset,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[datasets.Dataset | datasets.IterableDataset, str | None]:
    """Return `dataset` without padding, and a sentence that counts the padding, or None.

    Packed rows and rows that are not tokenized do not change.

    Raises:
        ValueError: naming the row, for an `attention_mask` that is 0 elsewhere than at the ends.
    """
    columns = get_dataset_column_names(dataset)
    if not {"input_ids", _MASK} <= {*columns} or SEQ_LENGTHS in columns:
        return dataset, None
    if isinstance(dataset, datasets.IterableDataset):
        return dataset.with_format(None).map(
            _CutStream(name), batched=True, with_indices=True
        ), None
    documents = ArrowDocuments(dataset, ("input_ids", _MASK))
    _check_mask(documents, f"of the {name} dataset", range(len(documents)))
    padding = documents.lengths() - documents.sums(_MASK)
    if not padding.any():
        return dataset, None
    cut = dataset.with_format("arrow").map(
        _cut_table, batched=True, num_proc=num_proc, desc=f"Cutting padding of {name} dataset"
    )
    return cut.with_format(None), _sentence(padding, f"{name} dataset")


def _sentence(padding: np.ndarray, which: str) -> str:
    return (
        f"{int((padding > 0).sum()):,} of {len(padding):,} rows of the {which} were padded "
        f"beforehand: {int(padding.sum()):,} padding tokens (attention_mask 0) are cut"
    )


class _CutStream:
    """Cuts the padding of a stream, batch by batch; warns of the first with padding."""

    def __init__(self, name: str):
        self.name = name
        self._has_told = False

    def __call__(
        self, batch: Mapping[str, Sequence[Any]], rows: Sequence[int]
    ) -> dict[str, list[Any]]:
        present = [column for column in _BY_TOKEN if column in batch]
        if any(mask is None for mask in batch[_MASK]):
            row = rows[next(i for i, mask in enumerate(batch[_MASK]) if mask is None)]
            raise ValueError(
                f"row {row} of the stream has no {_MASK!r}, but others have; give all rows the "
                "same columns, and no null values"
            )
        table = pa.table({column: pa.array(batch[column]) for column in present})
        documents = ArrowDocuments(datasets.Dataset(table), ("input_ids", _MASK))
        _check_mask(documents, "of the stream", rows)
        padding = documents.lengths() - documents.sums(_MASK)
        if not padding.any():
            return {name: list(values) for name, values in batch.items()}
        if not self._has_told:
            self._has_told = True
            logger.warning(f"of the rows read first, {_sentence(padding, f'{self.name} stream')}")
        return {**batch, **_cut_table(table).to_pydict()}


def _cut_table(table: pa.Table) -> pa.Table:
    lists = {
        column: flat_lists(column, table.column(column))
        for column in table.column_names
        if column in _BY_TOKEN
    }
    real = _real_tokens(*lists[_MASK])
    columns = [
        list_column(*gather(lists[field.name], real), field)
        if field.name in lists
        else table.column(field.name)
        for field in table.schema
    ]
    return pa.table(columns, names=table.column_names)


def _real_tokens(mask: np.ndarray, offsets: np.ndarray) -> Pieces:
    """Return the tokens of every row from the first to the last with mask 1."""
    at = np.append(np.flatnonzero(mask), 0)
    first, behind = np.searchsorted(at[:-1], offsets[:-1]), np.searchsorted(at[:-1], offsets[1:])
    some = behind > first
    starts = np.where(some, at[np.minimum(first, len(at) - 1)] - offsets[:-1], 0)
    stops = np.where(some, at[behind - 1] + 1 - offsets[:-1], 0)
    return Pieces(np.arange(len(starts)), starts, stops)


def _check_mask(documents: ArrowDocuments, where: str, numbers: Sequence[int]) -> None:
    lengths, entries = documents.lengths(), documents.lengths(_MASK)
    wrong = np.flatnonzero(lengths != entries)
    if len(wrong):
        row = wrong[0]
        raise ValueError(
            f"document {numbers[row]} {where} has {lengths[row]} input_ids but {entries[row]} "
            f"entries in {_MASK!r}; give one per token{and_others(wrong)}"
        )
    wrong = documents.rows_where(_MASK, lambda mask: (mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(
            f"document {numbers[wrong[0]]} {where} has an {_MASK} of other values than 0 and "
            "1; for rows of several documents, give their lengths in a column seq_lengths instead"
            f"{and_others(wrong)}"
        )
    spans = [np.zeros(0, np.int64)]
    for mask, offsets in documents.readers[_MASK].chunks:
        real = _real_tokens(mask, offsets)
        spans.append(real.stops - real.starts)
    stored = documents.stored_rows(np.arange(len(documents)))
    wrong = np.flatnonzero(np.concatenate(spans)[stored] != documents.sums(_MASK))
    if len(wrong):
        raise ValueError(
            f"document {numbers[wrong[0]]} {where} has an {_MASK} that is 0 between tokens "
            "where it is 1, which is no padding; remove these tokens, or the column"
            f"{and_others(wrong)}"
        )
