"""Data for sft_packed.py: load a hub id, a file or a folder, and name its columns for TRL.

recipe_columns.py lists the columns that can be named, and how. Anything wrong with a data set
raises `InputError` with one sentence, before anything is written.
"""

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple

from datasets import (
    Dataset,
    IterableDataset,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
)
from trl import ScriptArguments
from trl.data_utils import get_dataset_column_names

from trl_packing.data.dataset import LOADERS
from trl_packing.data.prepared import is_prepared, load_prepared, read_manifest
from trl_packing.recipes.recipe_columns import AnyDataset, InputError, RowColumns

NAMING = ("prompt_column", "completion_column", "messages_column", "chat")


class LoadedData(NamedTuple):
    """Documents in TRL's columns, and notes for the user about how they were made.

    Several sources are a dictionary, and so are held-out documents of different columns.
    """

    train: AnyDataset | dict[str, AnyDataset]
    test: AnyDataset | dict[str, AnyDataset] | None
    notes: list[str]


@dataclass
class DataArguments(ScriptArguments):
    """TRL's script arguments, and the columns to train on."""

    dataset_name: str | None = field(
        default=None,
        metadata={"help": "Hub id, a .json, .jsonl or .parquet file, or a folder of such files."},
    )
    prompt_column: str | None = field(
        default=None, metadata={"help": "Column that holds the prompt. Default: prompt."}
    )
    completion_column: str | None = field(
        default=None, metadata={"help": "Column that holds the completion. Default: completion."}
    )
    messages_column: str | None = field(
        default=None,
        metadata={"help": "Column that holds conversations (role/content or from/value)."},
    )
    chat: bool | None = field(
        default=None,
        metadata={
            "help": "Turn prompt and completion strings into a user and an assistant message. "
            "Default: yes if the tokenizer has a chat template and no prompt_template is given."
        },
    )
    test_split_size: float | None = field(
        default=None,
        metadata={"help": "Share of the training split to hold out, if there is no test split."},
    )

    def columns(self, **more: Any) -> RowColumns:
        """Return the columns that the arguments name, with `more` attributes of `RowColumns`."""
        return RowColumns(**{name: getattr(self, name) for name in NAMING}, **more)


def load_documents(
    args: DataArguments,
    *,
    prompt_template: str | None = None,
    query_field: str = "query",
    needs_test: bool = False,
    has_chat_template: bool = False,
    text_field: str = "text",
    seed: int = 42,
) -> LoadedData:
    """Return the training documents that `args` describe, and held-out ones if needed.

    The held-out documents are the split ``dataset_test_split``, or a share of the training split
    if that split does not exist and ``test_split_size`` is given.

    Args:
        args: the data set and its columns.
        prompt_template: makes prompts from raw columns.
        query_field: the column that `prompt_template` uses as the query.
        needs_test: hold documents out even without ``test_split_size``.
        has_chat_template: make conversations of prompts and completions by default.
        text_field: the column of plain text.
        seed: draws the held-out documents.

    Raises:
        InputError: the data set cannot be loaded, or has other columns.
    """
    if is_prepared(str(args.dataset_name)):
        return _load_prepared(args, prompt_template, needs_test)
    splits, notes = _load_splits(args)
    train = _pick(splits, args.dataset_train_split, args.dataset_name)
    test = None
    if args.dataset_test_split not in splits and args.test_split_size is not None:
        train, test = _hold_out(train, args.test_split_size, seed)
    elif needs_test or args.test_split_size is not None:
        test = _pick(splits, args.dataset_test_split, args.dataset_name)

    columns = args.columns(
        prompt_template=prompt_template,
        query_field=query_field,
        has_chat_template=has_chat_template,
        text_field=text_field,
    )
    documents = columns.convert(train)
    notes += columns.notes(next(iter(train)), next(iter(documents)))
    return LoadedData(documents, None if test is None else columns.convert(test), notes)


def convert_sources(
    train: dict[str, AnyDataset],
    test: dict[str, AnyDataset],
    columns: RowColumns,
    named: Mapping[str, Mapping[str, Any]],
    source_column: str | None = None,
) -> LoadedData:
    """Return several data sets in TRL's columns.

    Args:
        train: rows to train, by source.
        test: held-out rows, by source. They become one data set if their columns are the same.
        columns: those that are named for all of them.
        named: attributes of `RowColumns` that the entry of a source sets.
        source_column: a column for the names of sources in the held-out rows.

    Raises:
        InputError: a source is empty, or has other columns than are named.
    """
    _check_some_have(columns, train)
    own = {name: columns.of_source(name, rows, named.get(name, {})) for name, rows in train.items()}
    documents, notes = {}, []
    for name, rows in train.items():
        if (first := next(iter(rows), None)) is None:
            raise InputError(f"the data set {name} is empty")
        documents[name] = own[name].convert(rows)
        notes += [f"{name}: {note}" for note in own[name].notes(first, next(iter(documents[name])))]
    held_out = {
        name: (own.get(name) or columns.of_source(name, rows, named.get(name, {}))).convert(rows)
        for name, rows in test.items()
    }
    if source_column is not None:
        held_out = {
            name: rows.remove_columns(
                [c for c in rows.column_names if c == source_column]
            ).add_column(source_column, [name] * len(rows))
            for name, rows in held_out.items()
        }
    if len({str(rows.features) for rows in held_out.values()}) > 1:
        return LoadedData(documents, held_out, notes)
    joined = concatenate_datasets([*held_out.values()]) if held_out else None
    return LoadedData(documents, joined, notes)


def _check_some_have(columns: RowColumns, sources: Mapping[str, AnyDataset]) -> None:
    """Raise InputError for an option whose columns no source has."""
    present = [set(get_dataset_column_names(rows)) for rows in sources.values()]
    for option in (*NAMING[:3], "prompt_template"):
        needed = columns.columns_of(option)
        if needed and not any(each.issuperset(needed) for each in present):
            raise InputError(
                f"none of the datasets has the column {', '.join(map(repr, needed))}, which "
                f"--{option} names"
            )


# --- prepared documents -------------------------------------------------------------------------

# Options that made the columns and the splits. They must not change afterwards.
_MADE_BY = (
    *("dataset_config", "dataset_train_split", "dataset_test_split", "test_split_size"),
    *("prompt_column", "completion_column", "messages_column", "chat"),
)


def _load_prepared(args: DataArguments, template: str | None, needs_test: bool) -> LoadedData:
    """Return the sets of a folder that `trl-packing prepare` wrote, if they fit the options."""
    folder, manifest = str(args.dataset_name), read_manifest(str(args.dataset_name))
    if args.dataset_streaming:
        raise InputError(f"{folder} holds prepared data: leave dataset_streaming out")
    given = {name: getattr(args, name) for name in _MADE_BY} | {"prompt_template": template}
    defaults = {each.name: each.default for each in fields(DataArguments)}
    for name, value in given.items():
        stored = manifest["options"].get(name)
        if value != defaults.get(name) and str(value).lower() != str(stored).lower():
            raise InputError(
                f"{folder} was prepared with {name}={stored!r}, and here {name}={value!r}; leave "
                "it out, or prepare the data again"
            )
    if needs_test and "eval" not in manifest["sets"]:
        raise InputError(f"{folder} was prepared without a test split; prepare it with one")
    test = load_prepared(folder, "eval") if "eval" in manifest["sets"] else None
    return LoadedData(load_prepared(folder), test, [])


# --- reading ------------------------------------------------------------------------------------


def _load_splits(args: DataArguments) -> tuple[dict[str, AnyDataset], list[str]]:
    """Return the splits of ``dataset_name``, and a note on files that belong to no split."""
    name, path = str(args.dataset_name), Path(str(args.dataset_name)).expanduser()
    endings = ", ".join(LOADERS)
    if path.is_file():
        if path.suffix not in LOADERS:
            raise InputError(f"{name} must end in one of {endings}")
        return _read(name, args, LOADERS[path.suffix], data_files=str(path)), []
    if path.is_dir():
        files = {p.resolve() for p in path.rglob("*") if p.suffix in LOADERS}
        if not files:
            raise InputError(f"the folder {name} holds no file that ends in one of {endings}")
        splits = _read(name, args, str(path))
        # File names decide the splits. If one file is called train, files whose names belong to no
        # split are not read.
        used = load_dataset_builder(str(path)).config.data_files
        unused = files - {Path(file).resolve() for split in used.values() for file in split}
        if not unused:
            return splits, []
        unread = ", ".join(sorted(file.name for file in unused))
        return splits, [f"not read, because their names belong to no split of {name}: {unread}"]
    if path.suffix in LOADERS or name.startswith((".", "/", "~")) or name.count("/") > 1:
        raise InputError(f"{name} does not exist (looked from {Path.cwd()})")
    hub_id = f"{name} (no file or folder here, so taken for a hub id)"
    return _read(hub_id, args, name, name=args.dataset_config), []


def _read(
    source: str, args: DataArguments, loader: str, **options: str | None
) -> dict[str, AnyDataset]:
    """Call `load_dataset`; turn its errors into one sentence."""
    try:
        return load_dataset(loader, streaming=args.dataset_streaming, **options)
    except (StopIteration, Exception) as error:  # empty files raise StopIteration (datasets 5.2)
        cause = error.__cause__ or error
        reason = str(cause).strip().split("\n")[0]
        if isinstance(cause, StopIteration) or "corresponds to no data" in reason:
            reason = "it is empty"
        raise InputError(f"cannot load the data set {source}: {reason}") from error


def _pick(splits: dict[str, AnyDataset], split: str, name: str | None) -> AnyDataset:
    if split not in splits:
        raise InputError(
            f"{name} has no split {split!r}, only {_listed(splits)}; name one with "
            "--dataset_train_split, --dataset_test_split, or hold out a --test_split_size"
        )
    if next(iter(splits[split]), None) is None:
        raise InputError(f"the split {split!r} of {name} is empty")
    return splits[split]


def _hold_out(train: AnyDataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    if isinstance(train, IterableDataset):
        raise InputError("test_split_size cannot hold out a share of a stream: name a test split")
    if not 0 < share < 1 or round(share * len(train)) in (0, len(train)):
        raise InputError(
            f"test_split_size={share} must be between 0 and 1, and leave a document on each side"
        )
    parts = train.train_test_split(test_size=share, seed=seed)
    return parts["train"], parts["test"]


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
