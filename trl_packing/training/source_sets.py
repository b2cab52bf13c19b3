"""A training set of several data sets, each a source: prepared one by one, then trained as one.

    {"math": rows with prompt, completion          →  documents  ┐
     "chat": rows with messages}                   →  documents  ┴→  one data set, column SOURCE

Rows of different forms have no common columns, but their documents have. A documents' table is not
copied: `datasets` joins the files.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    concatenate_datasets,
)

from trl_packing.config import PackingOptions
from trl_packing.data.checks import check_is_one_set
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.prepared import records_of
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IMAGE_IDS,
    IMAGE_ROW,
    SEQ_LENGTHS,
    SOURCE,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
)
from trl_packing.packing.document_order import packing_seed
from trl_packing.training.arguments import reason_for_trl_path
from trl_packing.training.common_types import with_common_types
from trl_packing.training.mixed_stream import (
    check_stream_is_not_mixed,
    join_streams,
    stream_shares,
)

_COLUMNS = (*TOKEN_COLUMNS, TOKEN_WEIGHTS, DOCUMENT_WEIGHT, IMAGE_IDS, IMAGE_ROW, SEQ_LENGTHS)
_NO_ROW = -1  # of the images of documents that have none


class SourceSets:
    """The data sets of a training set that is a dictionary.

    Args:
        datasets: by the names of their sources.
        args: the settings of the run, which may be None.
        collator: the user's, which may be None.

    Attributes:
        datasets: the user's.
        first: one of them, which stands for all in TRL's constructor.

    Raises:
        ValueError: they cannot be trained together.
    """

    def __init__(self, datasets: Mapping[Any, Any], args: Any = None, collator: Any = None):
        check_source_sets(datasets, collator)
        if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
            raise ValueError(
                "skip_prepare_dataset=True takes one data set as it is, and train_dataset is a "
                "dictionary; leave it out (a tokenized data set is not tokenized again)"
            )
        self.datasets: dict[str, Any] = dict(datasets)
        self.first = next(iter(self.datasets.values()))

    def replace(self, datasets: Mapping[str, Any]) -> Any:
        """Take other data sets of the same names; return the first of them."""
        self.datasets = dict(datasets)
        self.first = next(iter(self.datasets.values()))
        return self.first

    @property
    def are_streams(self) -> bool:
        return isinstance(self.first, IterableDataset)


def source_sets(train_dataset: Any, args: Any = None, collator: Any = None) -> SourceSets | None:
    """Return the data sets of a training set that is a dictionary; None for one data set.

    Raises:
        ValueError: they cannot be trained together, or sources of one stream are to be mixed.
    """
    if isinstance(train_dataset, dict):
        return SourceSets(train_dataset, args, collator)
    check_stream_is_not_mixed(train_dataset, PackingOptions.of(args))
    return None


def check_source_sets(datasets: Mapping[Any, Any], collator: Any = None) -> None:
    """Raise an error for a dictionary that is no training set: for splits, of TRL's type."""
    if isinstance(datasets, (DatasetDict, IterableDatasetDict)):
        raise TypeError(
            "`train_dataset` must be a `Dataset` or `IterableDataset`, or a dictionary of them to "
            f"train as sources; got a {type(datasets).__name__} of the splits "
            f"{', '.join(datasets)}, so pass one of them"
        )
    if not datasets:
        raise ValueError("train_dataset is an empty dictionary; it needs a data set")
    kinds = {type(dataset) for dataset in datasets.values()}
    for name, dataset in datasets.items():
        if not isinstance(name, str) or not name:
            raise ValueError(f"train_dataset has the key {name!r}; sources have names (texts)")
        if not isinstance(dataset, (Dataset, IterableDataset)):
            raise ValueError(
                f"train_dataset[{name!r}] is a {type(dataset).__name__}; pass a Dataset or an "
                "IterableDataset"
            )
        if reason := reason_for_trl_path(dataset, collator, packs_images=True):
            check_is_one_set(datasets, reason)
    if len(kinds) > 1:
        raise ValueError(
            "train_dataset has streams beside data sets with a length; make all of them streams "
            "(dataset.to_iterable_dataset()), or load all of them"
        )


def join_documents(documents: Mapping[str, Dataset], named: Sequence[str] = ()) -> Dataset:
    """Return the documents of all sources, with the column SOURCE.

    Args:
        documents: prepared, by the names of their sources.
        named: columns that are kept if all of them have them.

    Raises:
        ValueError: some rows were packed before, and others were not; or a column has types that
            have nothing in common.
    """
    columns = [name for name in _COLUMNS if any(name in d.column_names for d in documents.values())]
    columns += [
        name for name in named if all(name in each.column_names for each in documents.values())
    ]
    packed = [name for name, d in documents.items() if SEQ_LENGTHS in d.column_names]
    if packed and len(packed) < len(documents):
        raise ValueError(
            f"rows of train_dataset[{packed[0]!r}] were packed before (they have seq_lengths), and "
            "others were not; pass documents everywhere"
        )
    parts = with_common_types(
        {name: _with_columns(dataset, columns) for name, dataset in documents.items()}
    )
    joined = concatenate_datasets(parts)
    ids = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    feature = ClassLabel(names=[*documents])
    return joined.add_column(SOURCE, ids, feature=feature)


def _with_columns(dataset: Dataset, columns: list[str]) -> Dataset:
    """Return `dataset` with these columns alone; missing weights are 1, missing images none."""
    if DOCUMENT_WEIGHT in columns and DOCUMENT_WEIGHT not in dataset.column_names:
        ones: Any = np.ones(len(dataset))
        dataset = dataset.add_column(DOCUMENT_WEIGHT, ones)
    if TOKEN_WEIGHTS in columns and TOKEN_WEIGHTS not in dataset.column_names:
        dataset = dataset.map(_with_unit_weights, batched=True, desc="Adding weights")
    if IMAGE_IDS in columns and IMAGE_IDS not in dataset.column_names:
        number, feature = len(dataset), List(Value("int32"))
        dataset = dataset.add_column(IMAGE_IDS, [()] * number, feature=feature)
        dataset = dataset.add_column(IMAGE_ROW, np.full(number, _NO_ROW))
    return dataset.select_columns(columns).with_format(None)


def _with_unit_weights(batch: Mapping[str, Any]) -> dict[str, Any]:
    return {TOKEN_WEIGHTS: [[1.0] * len(ids) for ids in batch["input_ids"]]}


def join_counts(counts: Mapping[str, PreparationCounts | None]) -> PreparationCounts | None:
    """Return the counts of all sources together; their notes name the source."""
    known = {name: found for name, found in counts.items() if found is not None}
    if not known:
        return None
    notes = tuple(f"{name}: {note}" for name, found in known.items() for note in found.notes)
    total = sum((replace(found, notes=()) for found in known.values()), PreparationCounts())
    return replace(total, notes=notes)


def prepare_sources(
    sets: SourceSets | None,
    prepare: Callable[[Any, str], tuple[Any, PreparationCounts | None]],
    args: Any,
    dataset: Any = None,
    name: str = "train",
) -> tuple[Any, PreparationCounts | None]:
    """Return the documents of all sources, and counts of what was kept and lost.

    Args:
        sets: the user's.
        prepare: does the same for a data set and its name.
        args: the settings of the run.
        dataset: a data set that is prepared alone, unless it stands for `sets`.
        name: of that data set.
    """
    if sets is None:
        return prepare(dataset, name)
    # Messages write "the 'web' dataset": the name of a source may be any word.
    prepared = {name: prepare(dataset, repr(name)) for name, dataset in sets.datasets.items()}
    documents = {name: found for name, (found, _) in prepared.items()}
    options = PackingOptions.of(args)
    if not sets.are_streams:
        counts = join_counts({name: counts for name, (_, counts) in prepared.items()})
        return join_documents(documents, options.named_columns()), counts
    shares = stream_shares([*documents], options)
    return join_streams(documents, shares, packing_seed(args)), None


def trains_completions(dataset: Any, completion_only: bool | None) -> bool:
    """Return whether only completions of `dataset` are trained, as TRL decides for it alone.

    Args:
        dataset: the user's rows, or documents that were prepared from them.
        completion_only: `completion_only_loss` of the settings.
    """
    if completion_only is not None:
        return completion_only
    if records := records_of(dataset):
        return any(record.rules.settings["completion_only_loss"] for record in records)
    return {"prompt", "completion"} <= set(dataset.column_names or next(iter(dataset), {}))
