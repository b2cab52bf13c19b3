"""Several data sets for sft_packed.py: TRL's `datasets:`, with `weight` and `epochs` beside it.

    datasets:
      - path: gsm8k_train.jsonl          a file, a folder, or a hub id
        fraction: 0.5                    TRL's: the first rows, so that no data set is repeated
        prompt_column: question          ours: its columns, in the words of recipe_columns.py
        completion_column: answer
      - path: trl-lib/Capybara
        fraction: 0.5
        epochs: 2                        ours: how often an epoch draws each of its documents
        source: chat                     its name in the report and in the log
    test_split_size: 0.02                TRL's: a share of all rows, held out at random

Without `weight` and `epochs`, every document is trained once an epoch, as in TRL's sft.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from datasets import Dataset, IterableDataset, load_dataset
from trl.scripts.utils import DatasetConfig

from trl_packing.data.dataset import LOADERS
from trl_packing.data.prepared import is_prepared, load_prepared, records_of
from trl_packing.recipes.recipe_columns import KEPT_COLUMNS, AnyDataset, InputError, RowColumns

# Options that an entry may have for its own data set, and the attributes of `RowColumns`.
_OF_ROWS = {
    **{name: name for name in ("prompt_column", "completion_column", "messages_column")},
    **{name: name for name in ("prompt_template", "query_field", "chat")},
    "dataset_text_field": "text_column",
}


@dataclass
class SourceConfig(DatasetConfig):
    """TRL's entry of `datasets`, how often an epoch draws its documents, and its columns.

    Attributes:
        weight: its share among the entries with a weight.
        epochs: how often an epoch draws each of its documents.
        source: its name; by default that of the file, the folder or the hub id.
        prompt_column: as the option of that name, for this data set.
        completion_column: likewise.
        messages_column: likewise.
        prompt_template: likewise.
        query_field: likewise.
        chat: likewise.
        dataset_text_field: likewise.
    """

    weight: float | None = None
    epochs: float | None = None
    source: str | None = None
    prompt_column: str | None = None
    completion_column: str | None = None
    messages_column: str | None = None
    prompt_template: str | None = None
    query_field: str | None = None
    chat: bool | None = None
    dataset_text_field: str | None = None

    def options_of_rows(self) -> dict[str, Any]:
        """Return the options of the entry that say how its rows become documents."""
        given = {option: getattr(self, option) for option in _OF_ROWS}
        return {option: value for option, value in given.items() if value is not None}

    def columns_named(self) -> dict[str, Any]:
        """Return the attributes of `RowColumns` that the entry sets."""
        return {_OF_ROWS[option]: value for option, value in self.options_of_rows().items()}


@dataclass
class MixtureArguments:
    """TRL's `datasets`, which replaces `dataset_name`."""

    datasets: list[SourceConfig] = field(
        default_factory=list,
        metadata={
            "help": "Data sets to train together, best in a YAML file: entries with path, name, "
            "data_files, split, columns and fraction as in TRL, and weight, epochs, source, and "
            "prompt_column, completion_column, messages_column, prompt_template, query_field, chat "
            "or dataset_text_field for its rows."
        },
    )
    streaming: bool = field(
        default=False, metadata={"help": "Read the entries of datasets as streams."}
    )

    def __post_init__(self) -> None:
        known = [f.name for f in fields(SourceConfig)]
        for number, entry in enumerate(self.datasets):
            if not isinstance(entry, dict):
                continue
            if unknown := [key for key in entry if key not in known]:
                raise InputError(
                    f"datasets, entry {number + 1}: {unknown[0]!r} is unknown; choose among "
                    f"{', '.join(known)}"
                )
            if "path" not in entry:
                raise InputError(f"datasets, entry {number + 1}: it has no path")
            for key, value in entry.items():
                kind, words = (bool, "true or false") if key == "chat" else (str, "a text")
                if key in _OF_ROWS and value is not None and not isinstance(value, kind):
                    raise InputError(
                        f"datasets, entry {number + 1}: {key}={value!r} must be {words}"
                    )
            self.datasets[number] = SourceConfig(**entry)


class LoadedSources(NamedTuple):
    """The entries of `datasets` by source.

    Attributes:
        train: rows to train.
        test: held-out rows.
        mixture: shares that the entries name; None if they name none.
        columns: attributes of `RowColumns` that they set, by source.
    """

    train: dict[str, AnyDataset]
    test: dict[str, AnyDataset]
    mixture: dict[str, dict[str, float]] | None
    columns: dict[str, dict[str, Any]]


def load_sources(
    entries: Sequence[SourceConfig], *, streaming: bool, test_size: float | None, seed: int
) -> LoadedSources:
    """Return the rows that the entries of `datasets` describe.

    Args:
        entries: of `datasets`.
        streaming: read them as streams.
        test_size: share of all rows to hold out; None holds none out.
        seed: draws the held-out rows.

    Raises:
        InputError: an entry cannot be loaded, or the entries do not go together.
    """
    names = _names(entries)
    rows = {
        name: _load(entry, streaming=streaming) for name, entry in zip(names, entries, strict=True)
    }
    rows = _fractions(rows, entries, streaming=streaming)
    test: dict[str, AnyDataset] = {}
    if test_size is not None:
        rows, test = _hold_out(rows, test_size, seed)
    columns = {n: entry.columns_named() for n, entry in zip(names, entries, strict=True)}
    return LoadedSources(rows, test, _mixture(names, entries), columns)


def with_own_columns(loaded: LoadedSources, text_field: str) -> dict[str, AnyDataset]:
    """Return rows to train beside rows with images.

    Data sets whose entries name columns have TRL's columns then; the others stay as they are.

    Args:
        loaded: the entries of `datasets`.
        text_field: the column of plain text in the documents of the run.

    Raises:
        InputError: a data set has other columns than its entry names.
    """
    kept = (*KEPT_COLUMNS, "images", "image")
    columns = RowColumns(text_field=text_field, has_chat_template=True, kept=kept)
    return {
        name: columns.of_source(name, rows, named).convert(rows)
        if (named := loaded.columns[name])
        else rows
        for name, rows in loaded.train.items()
    }


def _names(entries: Sequence[SourceConfig]) -> list[str]:
    """Return a name for each entry, no two the same."""
    names: list[str] = []
    for entry in entries:
        files = entry.data_files
        path = files if isinstance(files, str) and entry.path in LOADERS.values() else entry.path
        name = entry.source or "-".join(filter(None, [Path(path).stem, entry.name]))
        if entry.source is not None and name in names:
            raise InputError(f"two entries of datasets have the source {name!r}; name them apart")
        same = sum(other == name or other.startswith(f"{name}-") for other in names)
        names.append(f"{name}-{same + 1}" if name in names else name)
    return names


def _load(entry: SourceConfig, *, streaming: bool) -> AnyDataset:
    path, options = Path(entry.path).expanduser(), {"data_files": entry.data_files}
    loader = entry.path
    if is_prepared(path):
        return _load_prepared(entry, path, streaming=streaming)
    if path.is_file() and path.suffix in LOADERS:
        loader, options["data_files"] = LOADERS[path.suffix], str(path)
    elif path.suffix in LOADERS:
        raise InputError(f"{entry.path} does not exist (looked from {Path.cwd()})")
    try:
        rows = load_dataset(
            path=loader,
            name=entry.name,
            data_dir=entry.data_dir,
            split=entry.split,
            streaming=streaming,
            **options,
        )
    except (StopIteration, Exception) as error:  # empty files raise StopIteration (datasets 5.2)
        cause = error.__cause__ or error
        reason = "it is empty" if isinstance(cause, StopIteration) else str(cause).split("\n")[0]
        raise InputError(f"cannot load the data set {entry.path}: {reason}") from error
    if entry.columns is None:
        return rows
    missing = [column for column in entry.columns if column not in rows.column_names]
    if missing:
        raise InputError(
            f"{entry.path} has no column {missing[0]!r} among {', '.join(rows.column_names)}"
        )
    return rows.select_columns(entry.columns)


def _load_prepared(entry: SourceConfig, path: Path, *, streaming: bool) -> Dataset:
    """Return the documents of a folder that `trl-packing prepare` wrote."""
    if streaming:
        raise InputError(f"{entry.path} holds prepared data: leave streaming out")
    named = [*entry.options_of_rows(), *(["columns"] if entry.columns else [])]
    if named:
        raise InputError(
            f"{entry.path} holds prepared data, which has no columns to name: leave {named[0]} out "
            "of its entry"
        )
    return load_prepared(path, entry.split)


def _fractions(
    rows: dict[str, AnyDataset], entries: Sequence[SourceConfig], *, streaming: bool
) -> dict[str, AnyDataset]:
    """Return the first rows of each, as TRL's `fraction` says; all of them without it."""
    fractions = [entry.fraction for entry in entries]
    given = [fraction for fraction in fractions if fraction is not None]
    if not given:
        return rows
    if len(given) < len(fractions):
        raise InputError("fraction must be set for all entries of datasets, or for none")
    if streaming:
        raise InputError("fraction needs the sizes of data sets, which streams do not tell")
    if min(given) < 0 or not sum(given):
        raise InputError(f"fractions {given} must be numbers from 0, and one of them above 0")
    shares = [fraction / sum(given) for fraction in given]
    sizes = [len(dataset) for dataset in rows.values()]
    total = min(size / share for size, share in zip(sizes, shares, strict=True) if share > 0)
    numbers = [round(share * total) for share in shares]
    return {  # a prepared data set that stays whole keeps its counts
        name: dataset if number == len(dataset) else dataset.select(range(number))
        for (name, dataset), number in zip(rows.items(), numbers, strict=True)
        if number
    }


def _hold_out(
    rows: dict[str, AnyDataset], share: float, seed: int
) -> tuple[dict[str, AnyDataset], dict[str, AnyDataset]]:
    """Return rows to train and rows to hold out, drawn from all data sets together."""
    for name, dataset in rows.items():
        if records_of(dataset):
            raise InputError(
                f"test_split_size={share} cannot divide {name!r}, which is prepared: a row may be "
                "several documents; name its rows as path, or leave test_split_size out"
            )
    if any(isinstance(dataset, IterableDataset) for dataset in rows.values()):
        raise InputError("test_split_size cannot hold out a share of a stream")
    ends = np.cumsum([len(dataset) for dataset in rows.values()])
    number = int(np.ceil(share * ends[-1])) if 0 < share < 1 else 0
    if not 0 < number < ends[-1]:
        raise InputError(
            f"test_split_size={share} must be between 0 and 1, and leave a document on each side"
        )
    is_test = np.zeros(ends[-1], bool)
    is_test[np.random.default_rng(seed).permutation(ends[-1])[:number]] = True
    parts: tuple[dict[str, Dataset], dict[str, Dataset]] = ({}, {})
    for (name, dataset), of_source in zip(rows.items(), np.split(is_test, ends[:-1]), strict=True):
        for part, chosen in zip(parts, (~of_source, of_source), strict=True):
            if chosen.any():
                part[name] = dataset.select(np.flatnonzero(chosen))
    return parts


def _mixture(
    names: Sequence[str], entries: Sequence[SourceConfig]
) -> dict[str, dict[str, float]] | None:
    mixture: dict[str, dict[str, float]] = {}
    for name, entry in zip(names, entries, strict=True):
        given = {"weight": entry.weight, "epochs": entry.epochs}
        share = {kind: value for kind, value in given.items() if value is not None}
        if len(share) > 1:
            raise InputError(f"the entry {name!r} of datasets has a weight and epochs; give one")
        if share:
            mixture[name] = share
    return mixture or None
