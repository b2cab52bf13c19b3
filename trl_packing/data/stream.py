"""Documents of a stream → documents that fit, with losses counted in the process that reads.

stream ──► StreamFit, in the process that reads ──► documents that fit
               └── take_counts()                ──► counts since the last call
"""

import logging
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import datasets
import numpy as np
import pyarrow as pa
from trl.data_utils import get_dataset_column_names

from trl_packing.data.bad_rows import PADDED
from trl_packing.data.counts import PreparationCounts, handled_in
from trl_packing.data.fitting import Overflow, cut_table, fit
from trl_packing.data.limits import NO_LIMITS
from trl_packing.data.stop_tokens import (
    NO_EOS,
    EosRule,
    append_eos_to_table,
    note_going_on,
    note_missing_eos,
)
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    HANDLED,
    TOKEN_WEIGHTS,
    Batch,
    check_same_columns,
    document_columns,
    refused_beyond_int64,
    token_columns,
)
from trl_packing.documents.weights import check_token_weights

logger = logging.getLogger(__name__)

Document = dict[str, Any]

NOTHING_TO_TRAIN = (
    "the stream has no documents left to train on; check its source, max_length and the masks"
)

# Documents in a row without a trained token: after so many a warning, and an error.
_UNTRAINED, _MOST_UNTRAINED = 1_000, 50_000


def fit_stream(
    dataset: datasets.IterableDataset, overflow: Overflow, eos: EosRule = NO_EOS
) -> datasets.IterableDataset:
    """Return `dataset` with `eos` and `overflow` applied as it is read; tokens and weights stay.

    Reading raises ValueError where `fit_and_count` does, but a stream may turn out to be empty.
    """
    columns = get_dataset_column_names(dataset)
    kept = [*token_columns(columns), *document_columns(columns)]
    return dataset.with_format(None).map(  # plain lists, whatever format the user has set
        StreamFit(kept, overflow, eos),
        batched=True,
        with_indices=True,
        remove_columns=[column for column in columns if column not in kept],
    )


@dataclass(eq=False)
class StreamFit:
    """Fits one batch of documents after the other, and counts them; the first note is kept."""

    columns: Sequence[str]
    overflow: Overflow
    eos: EosRule
    _counts: PreparationCounts = field(default_factory=PreparationCounts)
    _num_untrained: int = 0  # documents in a row
    _said: set[str] = field(default_factory=set)  # what was warned of

    def __call__(self, batch: Batch, rows: Sequence[int]) -> dict[str, list[Any]]:
        check_same_columns(batch, rows, self.columns)
        with refused_beyond_int64(rows):
            table = pa.table({name: pa.array(batch[name]) for name in self.columns})
        columns = token_columns(self.columns)
        eos = self.eos

        def named(place: int) -> str:
            return f"document {rows[place]} of the stream"

        documents = ArrowDocuments(datasets.Dataset(table), columns)
        NO_LIMITS.check_documents(documents, named)
        for place, mask in enumerate(batch.get("attention_mask", ())):
            if {*(mask or ())} - {1}:
                raise ValueError(PADDED.format(named(place)))
        if TOKEN_WEIGHTS in self.columns:
            check_token_weights(documents, rows)
        if eos.appends:
            table = append_eos_to_table(table, **eos.ids())
            documents = ArrowDocuments(datasets.Dataset(table), columns)
        pieces, counts = fit(documents, self.overflow, eos.stop_ids, named=named)
        if not self._counts.notes:
            missing = note_missing_eos(documents, eos) or note_going_on(documents, eos)
            if missing is not None:
                counts = replace(counts, notes=(f"of the documents read first, {missing}",))
        if HANDLED in batch:
            handled = handled_in(np.asarray(batch[HANDLED]))
            for stage in handled.stages:
                if stage.why not in self._said:
                    self._said.add(stage.why)
                    logger.warning(f"of the documents of the stream read first, {stage}")
            counts += handled
        self._counts += counts
        before = self._num_untrained
        self._num_untrained = 0 if len(pieces.rows) else before + len(rows)
        words = (
            f"the last {self._num_untrained:,} documents of the stream have nothing to train; "
            "check its answers, response_template, the masks of completions and max_length"
        )
        if self._num_untrained >= _MOST_UNTRAINED:
            raise ValueError(words)
        if before < _UNTRAINED <= self._num_untrained:
            logger.warning(words)
        return cut_table(table, range(len(rows)), pieces, columns).to_pydict()


def with_equal_columns(dataset: Any) -> Any:
    """Return a stream whose rows all have its columns, None where a part of it has not.

    datasets 5.2 batches Arrow tables of interleaved parts before it adds columns, and fails.
    """
    joins = (step for step in steps_of(dataset) if hasattr(step, "ex_iterables"))
    return dataset.map(dict) if any(step.iter_arrow for step in joins) else dataset


def take_counts(dataset: Any) -> PreparationCounts:
    """Return the counts of a stream since the last call, in this process; zeros if unknown."""
    total = PreparationCounts()
    for fits in _fits_of(dataset):
        total += fits._counts
        fits._counts = PreparationCounts()
    return total


def columns_kept(dataset: Any) -> list[str]:
    """Return the columns that `fit_stream` kept; none if unknown."""
    return [column for fits in _fits_of(dataset) for column in fits.columns]


def _fits_of(dataset: Any) -> Iterator[StreamFit]:
    functions = (getattr(step, "function", None) for step in steps_of(dataset))
    return (function for function in functions if isinstance(function, StreamFit))


def steps_of(documents: Iterable[Document]) -> Iterator[Any]:
    """Yield the iterables of which `datasets` composes a stream, the last one first."""
    left = [getattr(documents, "_ex_iterable", None)]
    while left:
        yield (iterable := left.pop(0))
        inner = getattr(iterable, "ex_iterable", None)
        left[:0] = [inner] if inner is not None else getattr(iterable, "ex_iterables", [])
