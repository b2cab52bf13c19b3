"""Documents of a stream → documents that fit, and the losses, counted where they are read.

    stream ──► StreamFit, in the process that reads ──► documents that fit
                   └── take_counts()                ──► what it read and lost since the last time

A stream is read in a dataloader worker, again every epoch, and ahead of the training; so counts are
taken from time to time and added up by whoever reads (`streaming`, `stream_batches`).
"""

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

import datasets
import pyarrow as pa

from trl_packing.data.counts import PreparationCounts, count_losses
from trl_packing.data.model_limits import ModelLimits
from trl_packing.data.overflow import Overflow, fit_table
from trl_packing.documents.arrow import TOKEN_COLUMNS, ArrowDocuments, token_columns_of
from trl_packing.documents.bad_rows import check_same_columns
from trl_packing.documents.labels import SEQ_LENGTHS, document_columns_of

Batch = Mapping[str, Sequence[Any]]


def fit_stream(
    dataset: datasets.IterableDataset,
    overflow: Overflow,
    *,
    before: Callable[[pa.Table], pa.Table] | None = None,
    stop_ids: Iterable[int] = (),
    note: Callable[[datasets.Dataset], str | None] | None = None,
) -> datasets.IterableDataset:
    """Return `dataset` with `overflow` applied as it is read; its tokens and weights are kept.

    `before` changes each batch of documents first, and `note` says what is to be said of it: the
    first such sentence is kept. Reading raises ValueError for what `fit_documents` refuses, except
    that a stream may turn out to be empty.
    """
    columns = dataset.column_names or list(next(iter(dataset), {}))
    kept = [*token_columns_of(columns), *document_columns_of(columns)]
    return dataset.with_format(None).map(  # plain lists, whatever format the user has set
        StreamFit(kept, overflow, before, stop_ids, note),
        batched=True,
        with_indices=True,
        remove_columns=[column for column in columns if column not in kept],
    )


class StreamFit:
    """What `fit_stream` does to a batch of documents; it counts what went in and came out."""

    def __init__(
        self,
        columns: Sequence[str],
        overflow: Overflow,
        before: Callable[[pa.Table], pa.Table] | None = None,
        stop_ids: Iterable[int] = (),
        note: Callable[[datasets.Dataset], str | None] | None = None,
    ):
        self.columns = columns
        self.overflow = overflow
        self.before = before
        self.stop_ids = frozenset(stop_ids)
        self.note = note
        self._counts = PreparationCounts()

    def __call__(self, batch: Batch, rows: Sequence[int]) -> dict[str, list[Any]]:
        check_same_columns(batch, rows, self.columns)
        table = pa.table({name: pa.array(batch[name]) for name in self.columns})
        read = ArrowDocuments(datasets.Dataset(table), TOKEN_COLUMNS)
        ModelLimits().check_documents(read, "of the stream", rows)
        table = table if self.before is None else self.before(table)
        fitted = fit_table(table, self.overflow)
        documents = datasets.Dataset(table)
        self._counts += count_losses(
            ArrowDocuments(documents, TOKEN_COLUMNS),
            ArrowDocuments(datasets.Dataset(fitted), TOKEN_COLUMNS),
            self.overflow,
            self.stop_ids,
        )
        if self.note is not None and not self._counts.notes:
            note = self.note(documents)
            self._counts = self._counts if note is None else self._counts.with_note(note)
        return fitted.to_pydict()

    def take_counts(self) -> PreparationCounts:
        """Return what was read since the last time, in this process."""
        counts, self._counts = self._counts, PreparationCounts()
        return counts


def take_counts(dataset: Any) -> PreparationCounts:
    """Return what was read of `dataset` since the last time, in this process; nothing if unknown.

    dataset: what `fit_stream` returned, or any stream or part made of that.
    """
    return sum((fit.take_counts() for fit in _fits_of(dataset)), PreparationCounts())


def columns_kept(dataset: Any) -> list[str]:
    """Return the columns that `fit_stream` has kept, without reading; none if unknown."""
    return [column for fit in _fits_of(dataset) for column in fit.columns]


def _fits_of(dataset: Any) -> Iterator[StreamFit]:
    functions = (getattr(step, "function", None) for step in steps_of(dataset))
    return (function for function in functions if isinstance(function, StreamFit))


Document = dict[str, Any]


def steps_of(documents: Iterable[Document]) -> Iterator[Any]:
    """Yield the steps of which a stream of `datasets` is made, the last one first."""
    yield from _steps(getattr(documents, "_ex_iterable", None))


def _steps(iterable: Any) -> Iterator[Any]:
    yield iterable
    inner = getattr(iterable, "ex_iterable", None)
    for source in [inner] if inner is not None else getattr(iterable, "ex_iterables", []):
        yield from _steps(source)


NOTHING_TO_TRAIN = (
    "the stream has no documents left to train on; check its source, max_length and the completion "
    "or assistant masks"
)


def check_lengths(row: Document, number: int) -> None:
    """Raise ValueError if a packed row misstates the lengths of its documents."""
    lengths = row.get(SEQ_LENGTHS)
    if lengths is not None and (
        min(lengths, default=0) < 0 or sum(lengths) != len(row["input_ids"])
    ):
        raise ValueError(
            f"row {number} of the stream holds {len(row['input_ids'])} tokens, but its seq_lengths "
            f"are {list(lengths)}; they must name every token, and none can be negative"
        )
