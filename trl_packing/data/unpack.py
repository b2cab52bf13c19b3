"""Tokenized rows that hold more than one document's tokens → documents.

    input_ids         5   6   7   0   0          5   6   7
    attention_mask    1   1   1   0   0    ──►   1   1   1        padding at either end is cut

    input_ids    11 12 13 21 22      seq_lengths  3 2       a packed row
                 11 12 13                                   its documents, in order, each with the
                 21 22                                      row's values in other columns

A tokenizer called with ``padding="max_length"`` makes padded rows. Zeros in the middle of a row are
not padding, and raise an error. Packed rows are unpacked for callers who expect one row of logits
for each document.
"""

from collections.abc import Mapping, Sequence
from typing import Any, TypeVar

import datasets
import numpy as np
import pyarrow as pa
from accelerate.logging import get_logger
from trl.data_utils import get_dataset_column_names

from trl_packing.data.fitting import Pieces, cut_documents, cut_table
from trl_packing.data.limits import check_entries
from trl_packing.documents.arrow import ArrowDocuments, lists_of
from trl_packing.documents.labels import (
    MASK_COLUMNS,
    SEQ_LENGTHS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    and_others,
    token_columns,
)

logger = get_logger(__name__)

AnyDataset = TypeVar("AnyDataset", datasets.Dataset, datasets.IterableDataset)

_MASK = "attention_mask"
_BY_TOKEN = (*TOKEN_COLUMNS, *MASK_COLUMNS, TOKEN_WEIGHTS, _MASK)


# --- padding --------------------------------------------------------------------------------------


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
        cut = _CutStream(name)
        return dataset.with_format(None).map(cut, batched=True, with_indices=True), None
    documents = ArrowDocuments(dataset, ("input_ids", _MASK))
    real = _real_tokens(documents, f"of the {name} dataset", range(len(documents)))
    padding = documents.lengths() - real.sizes
    if not padding.any():
        return dataset, None
    words, columns = f"Cutting padding of {name} dataset", [c for c in columns if c in _BY_TOKEN]
    cut = cut_documents(dataset, documents.lengths(), real, columns, num_proc=num_proc, desc=words)
    return cut, _sentence(padding, f"{name} dataset")


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
        missing = [row for row, mask in zip(rows, batch[_MASK], strict=True) if mask is None]
        if missing:
            raise ValueError(
                f"row {missing[0]} of the stream has no {_MASK!r}, but others have; give all rows "
                "the same columns, and no null values"
            )
        present = [column for column in _BY_TOKEN if column in batch]
        table = pa.table({column: pa.array(batch[column]) for column in present})
        documents = ArrowDocuments(datasets.Dataset(table), ("input_ids", _MASK))
        real = _real_tokens(documents, "of the stream", rows)
        padding = documents.lengths() - real.sizes
        if not padding.any():
            return {name: list(values) for name, values in batch.items()}
        if not self._has_told:
            self._has_told = True
            logger.warning(f"of the rows read first, {_sentence(padding, f'{self.name} stream')}")
        return {**batch, **cut_table(table, real, present).to_pydict()}


def _real_tokens(documents: ArrowDocuments, where: str, numbers: Sequence[int]) -> Pieces:
    """Return the tokens of every row from the first to the last with mask 1."""
    check_entries(documents, where, numbers)
    wrong = documents.rows_where(_MASK, lambda mask: (mask != 0) & (mask != 1))
    if len(wrong):
        raise ValueError(
            f"document {numbers[wrong[0]]} {where} has an {_MASK} of other values than 0 and "
            "1; for rows of several documents, give their lengths in a column seq_lengths instead"
            f"{and_others(wrong)}"
        )
    starts, stops = [], []
    for mask, offsets in documents.readers[_MASK].chunks:
        at = np.append(np.flatnonzero(mask), 0)
        first, behind = (np.searchsorted(at[:-1], ends) for ends in (offsets[:-1], offsets[1:]))
        some = behind > first
        starts.append(np.where(some, at[np.minimum(first, len(at) - 1)] - offsets[:-1], 0))
        stops.append(np.where(some, at[behind - 1] + 1 - offsets[:-1], 0))
    real = Pieces.of(documents.in_order(starts), documents.in_order(stops))
    wrong = np.flatnonzero(real.sizes != documents.sums(_MASK))
    if len(wrong):
        raise ValueError(
            f"document {numbers[wrong[0]]} {where} has an {_MASK} that is 0 between tokens "
            "where it is 1, which is no padding; remove these tokens, or the column"
            f"{and_others(wrong)}"
        )
    return real


# --- packed rows ----------------------------------------------------------------------------------


def unpack_rows(dataset: AnyDataset) -> AnyDataset:
    """Return the documents of `dataset`, whose rows have `seq_lengths`, in order."""
    if isinstance(dataset, datasets.Dataset):
        unpacked = dataset.with_format("arrow").map(unpack_table, batched=True)
        return unpacked.with_format(None)
    columns = get_dataset_column_names(dataset)
    return dataset.with_format(None).map(_unpack_batch, batched=True, remove_columns=columns)


def _unpack_batch(batch: Mapping[str, Sequence[Any]]) -> dict[str, list[Any]]:
    table = pa.table({name: pa.array(values) for name, values in batch.items()})
    return unpack_table(table).to_pydict()


def unpack_table(table: pa.Table) -> pa.Table:
    """Return a row for every document of the rows of `table`, without `seq_lengths`."""
    packed = table.column(SEQ_LENGTHS).combine_chunks()
    lengths, offsets = lists_of(SEQ_LENGTHS, packed)
    lengths, rows = lengths[offsets[0] : offsets[-1]], table.drop_columns(SEQ_LENGTHS)
    if "labels" not in rows.column_names:  # every token is trained
        rows = rows.append_column("labels", rows.column("input_ids"))
    row_of, stops = np.repeat(np.arange(len(rows)), np.diff(offsets)), np.cumsum(lengths)
    tokens = np.bincount(row_of, lengths, minlength=len(rows)).astype(np.int64)
    stops -= (np.cumsum(tokens) - tokens)[row_of]
    documents = Pieces(row_of, stops - lengths, stops, np.zeros_like(stops))
    return cut_table(rows, documents, token_columns(rows.column_names))
