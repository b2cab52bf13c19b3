"""Sources of a run: data sets that are trained together, and what an epoch draws of each.

train_dataset={"math": …, "chat": …}   the sources are its names
source_column="source"                 the sources are the values of a column
    │  mixture, mixture_unit
documents an epoch of each source  →  places of an epoch                        (packing/draw.py)

A dictionary is prepared set by set, each by its own form:

    {"math": rows with prompt, completion          →  documents  ┐
     "chat": rows with messages}                   →  documents  ┴→  one data set, column SOURCE

Rows of different forms have no common columns, but their documents have. Nothing is copied. Several
streams become one stream, whose documents are drawn by weight.
"""

import math
import zlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    Features,
    IterableDataset,
    List,
    Value,
    concatenate_datasets,
    interleave_datasets,
)

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.files import records_of
from trl_packing.data.stages import Prepared
from trl_packing.data.stream import NOTHING_TO_TRAIN, columns_kept
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IMAGE_IDS,
    IMAGE_ROW,
    SEQ_LENGTHS,
    SOURCE,
    SOURCE_IDS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)
from trl_packing.documents.weights import check_token_weights, document_weights_from_rows
from trl_packing.loss.sums import Sources, check_weights_can_be_used
from trl_packing.packing.draw import MixtureDraw, packing_seed

# Columns of the documents of all sources, and the types in which no value of them changes.
_TYPES = {
    **dict.fromkeys(TOKEN_COLUMNS, List(Value("int64"))),
    TOKEN_WEIGHTS: List(Value("float64")),
    DOCUMENT_WEIGHT: Value("float64"),
    IMAGE_IDS: List(Value("int32")),
    IMAGE_ROW: Value("int64"),
    SEQ_LENGTHS: List(Value("int64")),
}

_ROW_COLUMNS = (*TOKEN_COLUMNS, TOKEN_WEIGHTS, IMAGE_IDS, SEQ_LENGTHS)
_NO_ROW = -1  # of the images of documents that have none


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


@dataclass(frozen=True)
class SourceShare:
    """A source, and the documents that the first epoch draws of it."""

    name: str
    documents: int  # that it has
    drawn: int  # by an epoch, with repetitions
    tokens: int  # of these
    trained: int

    @property
    def epochs(self) -> float:
        """Times that an epoch draws each document of the source."""
        return self.drawn / self.documents if self.documents else 0.0


@dataclass(frozen=True, eq=False)
class Mixture:
    """The sources of a training set, and how often an epoch draws each."""

    sources: Sources
    draw: MixtureDraw | None  # None draws every document once

    def settings(self) -> dict[str, Any] | None:
        """Return the mixture as a checkpoint saves it; None where every document comes once."""
        if self.draw is None:
            return None
        counts = dict(zip(self.sources.names, self.draw.counts.tolist(), strict=True))
        return {"documents": counts, "sources": zlib.crc32(self.draw.source_ids.tobytes())}

    def shares(self, documents: ArrowDocuments) -> tuple[SourceShare, ...]:
        """Return what the first epoch draws of each source."""
        names, ids = self.sources.names, self.sources.ids
        places = np.arange(len(ids)) if self.draw is None else self.draw.documents(0)
        drawn = ids[places]
        counts = (  # in the order of the fields
            self.sources.num_documents,
            np.bincount(drawn, minlength=len(names)),
            np.bincount(drawn, documents.lengths()[places], len(names)),
            np.bincount(drawn, documents.num_trained()[places], len(names)),
        )
        of_sources = np.stack(counts, axis=1).astype(np.int64).tolist()
        shares = zip(names, of_sources, strict=True)
        return tuple(SourceShare(name, *numbers) for name, numbers in shares)


def training_sources(dataset: Any, options: PackingOptions) -> Sources | None:
    """Return the sources of a prepared training set; None if it names none.

    The column of a mixture takes precedence over `source_column`. Of streams, only names are known.
    """
    columns = columns_of(dataset)
    none = np.zeros(0, np.int64)
    if isinstance(dataset, IterableDataset):
        mixture: Any = options.mixture if SOURCE in columns else {}
        names = tuple(name for name, share in mixture.items() if share.get("weight"))
        return Sources(names, none, none) if names else None
    column = SOURCE if SOURCE in columns else options.source_column or ""
    return Sources.of(dataset, column, "the training set") if column in columns else None


def mixture_of(documents: ArrowDocuments, args: Any) -> Mixture | None:
    """Return the mixture of a training set; None if its sources are not known.

    Raises:
        ValueError: a mixture is asked for, but the sources are not known or are other ones.
    """
    options = PackingOptions.of(args)
    sources = training_sources(documents.dataset, options)
    if options.mixture is None:
        return None if sources is None else Mixture(sources, None)
    if sources is None:
        raise ValueError(
            "a mixture draws sources, but the training set has no column of them (it has "
            f"{documents.dataset.column_names}); pass a dictionary of data sets"
        )
    if is_packed(documents):
        raise ValueError("a mixture cannot draw documents of packed rows; pass the documents")
    counts = _documents_an_epoch(sources, documents, options)
    return Mixture(sources, MixtureDraw(sources.ids, counts, packing_seed(args)))


def _documents_an_epoch(
    sources: Sources, documents: ArrowDocuments, options: PackingOptions
) -> np.ndarray:
    """Return the documents that an epoch draws of each source, ``(sources,)`` int64.

    Weights divide the units (documents, or tokens) that all sources with a weight have together.
    """
    names = sources.names
    sizes = sources.num_documents
    unit = options.mixture_unit
    given: Any = options.mixture or {}
    shares: dict[str, Any] = {str(name): share for name, share in given.items()}
    if unknown := [name for name in shares if name not in names]:
        raise ValueError(
            f"mixture names {unknown[0]!r}, but the sources with a document to train are "
            f"{', '.join(names)}; name one of them"
        )
    epochs = np.array([shares.get(name, {}).get("epochs", 1.0) for name in names], float)
    weights = np.array([shares.get(name, {}).get("weight", np.nan) for name in names], float)
    is_weighed = ~np.isnan(weights)
    units = sizes
    if unit != "documents":
        values = documents.lengths() if unit == "tokens" else documents.num_trained()
        units = np.bincount(sources.ids, values, minlength=len(names))
    weights, held = weights[is_weighed], units[is_weighed]
    epochs[is_weighed] = weights / (weights.sum() or 1.0) * held.sum() / np.maximum(held, 1)
    drawn = np.rint(np.minimum(epochs * sizes, 2.0**60)).astype(np.int64)
    counts = np.maximum(drawn, (epochs > 0) & (sizes > 0))
    if not counts.sum() or not held.all():
        no_unit = f"no {unit.replace('_', ' ')}"
        raise ValueError(f"mixture draws no document: all have a share of 0, or one has {no_unit}")
    return counts


def join_streams(
    documents: Mapping[str, IterableDataset], options: PackingOptions, seed: int
) -> IterableDataset:
    """Return one stream of the prepared documents of several, with the column SOURCE.

    Each document is drawn from one of them, by weight. A stream that ends begins again, until all
    have ended once, so that no document is left out. A weight of 0 leaves its stream out.

    Raises:
        ValueError: the streams have no weights, no documents, or other columns than others.
    """
    mixture: Any = options.mixture or {}
    weights = {name: float(share.get("weight", math.nan)) for name, share in mixture.items()}
    is_by_size = options.mixture_unit != "documents"
    if is_by_size or {*weights} != {*documents} or not sum(weights.values()) > 0:
        raise ValueError(
            "streams do not tell their sizes: give each of them a weight in mixture ("
            f"{', '.join(documents)}; one weight above 0), and leave mixture_unit out"
        )
    streams = {name: documents[name] for name, weight in weights.items() if weight}
    columns = {name: sorted(training_columns(stream)) for name, stream in streams.items()}
    first = next(iter(columns.values()))
    if any(found != first for found in columns.values()):
        raise ValueError(f"streams of a mixture need the same columns, and have {columns}")
    named = [
        stream.select_columns(first).map(dict, fn_kwargs={SOURCE: name})
        for name, stream in streams.items()
    ]
    try:
        return interleave_datasets(
            named,
            probabilities=[weights[name] / sum(weights.values()) for name in streams],
            seed=seed,
            stopping_strategy="all_exhausted",
        )
    except StopIteration:  # datasets 5.2 reads the first documents of each stream
        empty = next(name for name, stream in streams.items() if next(iter(stream), None) is None)
        raise ValueError(f"train_dataset[{empty!r}]: {NOTHING_TO_TRAIN}") from None


def trains_completions(dataset: Any, completion_only: bool | None) -> bool:
    """Return whether only completions of rows, or of documents, are trained, as TRL decides."""
    if completion_only is not None:
        return completion_only
    if records := records_of(dataset):
        return any(record.settings["completion_only_loss"] for record in records)
    return {"prompt", "completion"} <= set(dataset.column_names or next(iter(dataset), {}))


def prepare_sources(
    sets: Mapping[str, Any],
    prepare_rows: Callable[[Any, str], Prepared],
    args: Any,
) -> Prepared:
    """Return the documents of all sources, and counts of what was kept and lost.

    `prepare_rows` does the same for a data set and its name.
    """
    # Messages write "the 'web' dataset": the name of a source may be any word.
    prepared = {name: prepare_rows(dataset, repr(name)) for name, dataset in sets.items()}
    documents = {name: found for name, (found, _) in prepared.items()}
    options = PackingOptions.of(args)
    if any(isinstance(dataset, IterableDataset) for dataset in sets.values()):
        return join_streams(documents, options, packing_seed(args)), None
    joined = _join_documents(documents, options.named_columns())
    known = {name: counts for name, (_, counts) in prepared.items() if counts is not None}
    notes = tuple(f"{name}: {note}" for name, found in known.items() for note in found.notes)
    counts = replace(sum(known.values(), PreparationCounts()), notes=notes)
    return joined, counts if known else None


def _join_documents(documents: Mapping[str, Dataset], named: Sequence[str]) -> Dataset:
    """Return the documents of all sources, with the column SOURCE, and `named` if all have them."""
    held = [{*dataset.column_names} for dataset in documents.values()]
    if SEQ_LENGTHS in set.union(*held) - set.intersection(*held):
        raise ValueError(
            "rows of some sources of train_dataset were packed before (they have seq_lengths), and "
            "others were not; pass documents everywhere"
        )
    columns = [column for column in _TYPES if column in set.union(*held)]
    columns += [column for column in named if column in set.intersection(*held)]
    parts = [_with_columns(dataset, columns) for dataset in documents.values()]
    if any(part.features != parts[0].features for part in parts):
        common = Features({c: _TYPES.get(c, parts[0].features[c]) for c in columns})
        parts = [part.cast(common) for part in parts]
    ids = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    names = ClassLabel(names=[*documents])
    return concatenate_datasets(parts).add_column(SOURCE, ids, feature=names)


def _with_columns(dataset: Dataset, columns: list[str]) -> Dataset:
    """Return `dataset` with these columns alone; missing weights are 1, missing images none."""
    number = len(dataset)
    missing = {*columns} - {*dataset.column_names}
    if DOCUMENT_WEIGHT in missing:
        dataset = dataset.add_column(DOCUMENT_WEIGHT, np.ones(number))
    if TOKEN_WEIGHTS in missing:
        dataset = dataset.map(lambda row: {TOKEN_WEIGHTS: [1.0] * len(row["input_ids"])})
    if IMAGE_IDS in missing:
        dataset = dataset.add_column(IMAGE_IDS, [()] * number, feature=_TYPES[IMAGE_IDS])
        dataset = dataset.add_column(IMAGE_ROW, np.full(number, _NO_ROW))
    return dataset.select_columns(columns).with_format(None)
