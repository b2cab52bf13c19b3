"""Data for sft_packed.py: load a hub id, a file or a folder, and rename its columns for TRL.

    your columns                              options                          columns for TRL
    question, answer                          --prompt_column question         prompt, completion
                                              --completion_column answer
    instruction, input, output                --prompt_template "{instruction}\\n{input}\\n"
                                              --completion_column output       prompt, completion
    chat (role/content or from/value)         --messages_column chat           messages
    body                                      --dataset_text_field body        body
    prompt, completion | messages | text | input_ids           (nothing)       the same
    a folder of `trl-packing prepare`                         (nothing)       documents

Anything wrong with a data set raises `InputError` with one sentence, before anything is written.
"""

from collections.abc import Callable
from copy import copy
from dataclasses import dataclass, field, fields
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

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
from trl_packing.data.prepared import is_prepared, load_prepared, read_manifest, records_of
from trl_packing.formatting.prompt_template import PromptTemplate

NAMING = ("prompt_column", "completion_column", "messages_column")

KEPT_COLUMNS = ("tools", "chat_template_kwargs")  # TRL reads these beside a conversation

Row = dict[str, Any]
AnyDataset: TypeAlias = Dataset | IterableDataset


class InputError(ValueError):
    """A mistake in the user's options or data, in one sentence."""


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

    convert = _conversion(args, prompt_template, query_field, has_chat_template, text_field)
    documents = convert(train)
    notes += _notes(next(iter(train)), next(iter(documents)), args)
    return LoadedData(documents, None if test is None else convert(test), notes)


def convert_sources(
    train: dict[str, AnyDataset],
    test: dict[str, AnyDataset],
    args: DataArguments,
    *,
    columns: dict[str, dict[str, str]],
    prompt_template: str | None,
    query_field: str,
    has_chat_template: bool,
    text_field: str,
    source_column: str | None,
) -> LoadedData:
    """Return several data sets in TRL's columns; the other arguments as for `load_documents`.

    Args:
        train: rows to train, by source.
        test: held-out rows, by source. They become one data set if their columns are the same.
        args: the columns.
        columns: columns that a source names for itself, by source and option.
        source_column: a column for the names of sources in the held-out rows.
    """
    for option in NAMING:
        column = getattr(args, option)
        if column and all(column not in rows.column_names for rows in train.values()):
            raise InputError(
                f"none of the datasets has the column {column!r}, which --{option} names"
            )

    def convert(name: str, rows: AnyDataset) -> AnyDataset:
        own = copy(args)
        for option in NAMING:  # a data set without the column has a form of its own
            if getattr(args, option) not in rows.column_names:
                setattr(own, option, None)
        for option, column in columns.get(name, {}).items():
            setattr(own, option, column)
        of_source = _conversion(own, prompt_template, query_field, has_chat_template, text_field)
        try:
            return of_source(rows)
        except InputError as error:
            raise InputError(f"the data set {name}: {error}") from error

    documents = {name: convert(name, rows) for name, rows in train.items()}
    notes: list[str] = []
    for name, rows in train.items():
        if (first := next(iter(rows), None)) is None:
            raise InputError(f"the data set {name} is empty")
        notes += [f"{name}: {note}" for note in _notes(first, next(iter(documents[name])), args)]
    held_out = {name: convert(name, rows) for name, rows in test.items()}
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


def _conversion(
    args: DataArguments,
    prompt_template: str | None,
    query_field: str,
    has_chat_template: bool,
    text_field: str,
) -> Callable[[AnyDataset], AnyDataset]:
    """Return the function that names the columns of a data set for TRL."""
    try:
        template = (
            PromptTemplate.from_setting(prompt_template, query_field) if prompt_template else None
        )
    except ValueError as error:
        raise InputError(str(error)) from error
    chat = has_chat_template and not template if args.chat is None else args.chat
    if chat and not has_chat_template:
        raise InputError("--chat needs a chat template: set one with --chat_template_path")
    return partial(_to_trl_columns, args=args, template=template, text_field=text_field, chat=chat)


def _notes(row: Row, document: Row, args: DataArguments) -> list[str]:
    """Return notes on surprises in the first row and the document made from it."""
    prompt, completion = document.get("prompt"), document.get("completion")
    if isinstance(prompt, str) and isinstance(completion, str):
        if prompt[-1:].isspace() or completion[:1].isspace() or not (prompt and completion):
            return []
        return [
            f"the model reads {prompt[-12:] + completion[:12]!r} where prompt and completion meet; "
            "--prompt_template can put a space or a line break there"
        ]
    was_conversation = isinstance(row.get(args.prompt_column or "prompt"), list)
    if prompt is None or was_conversation or args.chat:
        return []
    return [
        "prompt and completion become a user and an assistant message, because the tokenizer has a "
        "chat template; --chat false trains on the plain text"
    ]


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


# --- columns ------------------------------------------------------------------------------------


def _to_trl_columns(
    dataset: AnyDataset,
    *,
    args: DataArguments,
    template: PromptTemplate | None,
    text_field: str,
    chat: bool,
) -> AnyDataset:
    """Return `dataset` with columns for TRL, as the table at the top of this file shows."""
    if records_of(dataset):
        return dataset
    columns = get_dataset_column_names(dataset)
    named = args.prompt_column or template or args.completion_column
    kept = [column for column in KEPT_COLUMNS if column in columns]
    rewrite: Callable[..., Row]
    if args.messages_column:
        if named:
            raise InputError("--messages_column is the whole document: name no prompt beside it")
        _require(columns, args.messages_column, "--messages_column")
        rewrite = partial(_conversation, column=args.messages_column)
    elif named or ("prompt" in columns and "input_ids" not in columns):
        rewrite = _prompt_completion(columns, args, template, chat)
    elif "input_ids" in columns:
        return dataset
    else:
        forms = ("messages", "conversations", text_field)
        form = next((form for form in forms if form in columns), None)
        if form is None:
            raise InputError(
                f"no column to train on among {_listed(columns)}: name yours with --prompt_column "
                "and --completion_column, --messages_column or --dataset_text_field"
            )
        return dataset.select_columns([*kept, form])
    dropped = [column for column in columns if column not in kept]
    options = {} if isinstance(dataset, IterableDataset) else {"desc": "Naming columns"}
    return dataset.map(rewrite, with_indices=True, remove_columns=dropped, **options)


def _prompt_completion(
    columns: list[str], args: DataArguments, template: PromptTemplate | None, chat: bool
) -> Callable[[Row, int], Row]:
    """Return the function that makes a prompt and a completion from a row."""
    if args.prompt_column and template:
        raise InputError("give --prompt_column or --prompt_template, not both")
    completion = args.completion_column or "completion"
    sources = template.fields if template else [args.prompt_column or "prompt"]
    for column in sources:
        _require(columns, column, "--prompt_template" if template else "--prompt_column")
    _require(columns, completion, "--completion_column")

    def rewrite(row: Row, index: int) -> Row:
        for column in (*sources, completion):
            if row[column] is None:
                raise InputError(f"row {index} has no value in the column {column!r}")
        document = {
            "prompt": template.prompt(row) if template else row[sources[0]],
            "completion": row[completion],
        }
        if chat and not isinstance(document["prompt"], list):
            roles = {"prompt": "user", "completion": "assistant"}
            return {k: [{"role": roles[k], "content": str(v)}] for k, v in document.items()}
        return {k: v if isinstance(v, list) else str(v) for k, v in document.items()}

    return rewrite


def _conversation(row: Row, index: int, *, column: str) -> Row:
    """Return the row's messages (role and content, or ShareGPT's from and value)."""
    if not row[column]:
        raise InputError(f"row {index} has no message in the column {column!r}")
    return {"messages": row[column]}


def _require(columns: list[str], column: str, flag: str) -> None:
    if column not in columns:
        raise InputError(f"no column {column!r} among {_listed(columns)}: name yours with {flag}")


def _listed(names: Any) -> str:
    return ", ".join(map(str, names))
