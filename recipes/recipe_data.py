"""Data of sft_packed.py: one data set or several, and their columns, named for TRL.

    your columns                              options                          columns for TRL
    question, answer                          --prompt_column question         prompt, completion
                                              --completion_column answer
    instruction, input, output                --prompt_template "{instruction}\\n{input}\\n"
                                              --completion_column output       prompt, completion
    chat (role/content or from/value)         --messages_column chat           messages
    body                                      --dataset_text_field body        body
    prompt, completion | messages | text | input_ids           (nothing)       the same
    a folder of `trl-packing prepare`                         (nothing)       documents

Several data sets are TRL's `datasets:` in a YAML file. An entry has the same words for its columns:

    datasets:
      - path: gsm8k_train.jsonl          a file, a folder, or a hub id
        prompt_column: question
        completion_column: answer
      - path: trl-lib/Capybara
        epochs: 2                        ours: how often an epoch draws each of its documents
        source: chat                     its name in the report and in the log
    test_split_size: 0.02                a share of all rows, held out at random

Without `weight` and `epochs`, every document is trained once an epoch, as in TRL's sft.py. Anything
wrong with a data set raises ValueError with one sentence, before anything is written.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from pathlib import Path
from shlex import quote
from typing import Any, NamedTuple, TypeAlias

import numpy as np
from datasets import (
    Dataset,
    IterableDataset,
    concatenate_datasets,
    load_dataset,
    load_dataset_builder,
)
from transformers.hf_argparser import HfArg
from trl import ScriptArguments
from trl.data_utils import get_dataset_column_names
from trl.scripts.utils import DatasetConfig

from trl_packing.data.prepared import LOADERS, is_prepared, load_prepared, read_manifest, records_of
from trl_packing.data.row_format import PromptTemplate, column_among

# TRL reads the first two beside a conversation, and the trainer the weight of a document.
KEPT_COLUMNS = ("tools", "chat_template_kwargs", "loss_weight")

# Names of columns in data sets as people have them, for a refusal that proposes options.
_QUESTIONS = ("instruction", "question", "query", "problem", "input")
_ANSWERS = ("output", "answer", "response", "completion", "solution")

Row = dict[str, Any]
AnyDataset: TypeAlias = Dataset | IterableDataset
Sets: TypeAlias = dict[str, AnyDataset]
Mixture: TypeAlias = dict[str, dict[str, float]] | None


@dataclass
class ColumnArguments:
    """The columns to train on."""

    prompt_column: str | None = HfArg(default=None, help="Column of the prompt. Default: prompt.")
    completion_column: str | None = HfArg(
        default=None, help="Column of the completion. Default: completion."
    )
    messages_column: str | None = HfArg(
        default=None, help="Column of conversations (role/content or from/value)."
    )
    chat: bool | None = HfArg(
        default=None,
        help="Turn prompt and completion strings into a user and an assistant message. Default: "
        "yes if the tokenizer has a chat template and no prompt_template is given.",
    )


@dataclass
class SourceConfig(ColumnArguments, DatasetConfig):
    """TRL's entry of `datasets`, its columns, and how often an epoch draws its documents.

    Attributes:
        prompt_template: makes its prompts of several columns.
        dataset_text_field: its column of plain text.
        weight: its share among the entries with a weight.
        epochs: how often an epoch draws each of its documents.
        source: its name; by default that of the file, the folder or the hub id.
    """

    path: str = ""
    prompt_template: str | None = None
    dataset_text_field: str | None = None
    weight: float | None = None
    epochs: float | None = None
    source: str | None = None

    def named(self) -> list[str]:
        """Return the options that say how its rows become documents, where they are given."""
        return [option for option in _OF_ROWS if getattr(self, option) is not None]


# Options of an entry that say how its rows become documents.
_OF_ROWS = (*(f.name for f in fields(ColumnArguments)), "prompt_template", "dataset_text_field")


@dataclass
class SourceArguments:
    """TRL's `datasets`, which replaces `dataset_name`."""

    datasets: list[SourceConfig] = field(
        default_factory=list,
        metadata={
            "help": "Data sets to train together, best in a YAML file: entries with path, name, "
            "data_files, split, columns and fraction as in TRL, and weight, epochs, source, and "
            "prompt_column, completion_column, messages_column, prompt_template, chat or "
            "dataset_text_field for its rows."
        },
    )
    streaming: bool = HfArg(default=False, help="Read the entries of datasets as streams.")

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, list):
            raise ValueError(
                f"datasets={self.datasets!r} must be a list of entries, each '- path:'"
            )
        self.datasets = [_entry(at + 1, each) for at, each in enumerate(self.datasets)]


def _entry(number: int, given: Any) -> SourceConfig:
    """Return an entry of `datasets`, whose keys and values are checked."""
    if isinstance(given, SourceConfig):
        return given
    where, known = f"datasets, entry {number}:", [each.name for each in fields(SourceConfig)]
    if not isinstance(given, dict):
        raise ValueError(f"{where} {given!r} must have keys such as path")
    if unknown := [key for key in given if key not in known]:
        raise ValueError(f"{where} {unknown[0]!r} is unknown; choose among {', '.join(known)}")
    if not isinstance(given.get("path"), str):
        raise ValueError(f"{where} it needs a path, and path is {given.get('path')!r}")
    for key, value in given.items():
        kind, word = (bool, "true or false") if key == "chat" else (str, "a text")
        is_checked = key in (*_OF_ROWS, "source", "name", "split") and value is not None
        if is_checked and not isinstance(value, kind):
            raise ValueError(f"{where} {key}={value!r} must be {word}")
    if not 0 <= float(given.get("fraction") or 0) <= 1:
        raise ValueError(
            f"{where} fraction={given['fraction']!r} must be from 0 to 1; epochs trains a data set "
            "more than once"
        )
    return SourceConfig(**given)


@dataclass
class DataArguments(SourceArguments, ColumnArguments, ScriptArguments):
    """TRL's script arguments, and the columns to train on."""

    dataset_name: str | None = HfArg(
        default=None, help="Hub id, a .json, .jsonl or .parquet file, or a folder of such files."
    )
    dataset_train_split: str = HfArg(
        default="train", help="Split to train, or part of it: 'train[:1000]'."
    )
    test_split_size: float | None = HfArg(
        default=None, help="Share of the rows to hold out, in place of dataset_test_split."
    )


class LoadedData(NamedTuple):
    """Documents in TRL's columns, and notes for the user about how they were made.

    Several sources are a dictionary, and so are held-out documents of different columns.
    """

    train: AnyDataset | Sets
    test: AnyDataset | Sets | None
    notes: list[str]
    mixture: Mixture = None


def load_documents(
    args: DataArguments,
    *,
    prompt_template: str | None = None,
    needs_test: bool = False,
    has_chat_template: bool = False,
    text_field: str = "text",
    source_column: str | None = None,
    kept: Sequence[str] = (),
    seed: int = 42,
) -> LoadedData:
    """Return the training documents that `args` describe, and held-out ones if needed.

    The held-out documents are a share of all rows (``test_split_size``), or a split.

    Args:
        args: the data sets and their columns.
        prompt_template: makes prompts from raw columns.
        needs_test: hold documents out even without ``test_split_size``.
        has_chat_template: make conversations of prompts and completions by default.
        text_field: the column of plain text.
        source_column: a column for the names of sources in the held-out rows.
        kept: columns that stay beside the documents, such as that of a curriculum.
        seed: draws the held-out documents.

    Raises:
        ValueError: a data set cannot be loaded, or has other columns.
    """
    named = {each.name: getattr(args, each.name) for each in fields(ColumnArguments)}
    named["prompt_template"] = prompt_template
    form = text_field, has_chat_template, (*KEPT_COLUMNS, *kept)
    share, name = args.test_split_size, str(args.dataset_name)
    if args.datasets:
        if needs_test and share is None:
            raise ValueError("with datasets, evaluation needs a test_split_size to hold out")
        for option, value in named.items():
            if value is not None:
                raise ValueError(f"with datasets, {option} belongs into the entries: move it there")
        sources = load_sources(args.datasets, args.streaming, share, seed)
        columns = {name: RowColumns(e, *form, name) for name, e in sources.entries.items()}
        return _convert_sources(sources, columns, source_column)
    if is_prepared(name):
        return _load_prepared(args, named, needs_test)
    given = {"path": name, "name": args.dataset_config, **named}
    entry = SourceConfig(split=args.dataset_train_split, **given)
    train, notes, test = read(entry, args.dataset_streaming), _unread_files(name), None
    if share is not None:
        train, test = (part[name] for part in _hold_out({name: train}, share, seed))
    elif needs_test:
        held_out = SourceConfig(split=args.dataset_test_split, **given)
        test = read(held_out, args.dataset_streaming)
    own = RowColumns(entry, *form)
    documents = own.convert(train)
    notes += own.notes(next(iter(train)), next(iter(documents)))
    return LoadedData(documents, None if test is None else own.convert(test), notes)


# --- reading --------------------------------------------------------------------------------------


def read(entry: SourceConfig, streaming: bool) -> AnyDataset:
    """Return the rows of one data set.

    Raises:
        ValueError: it does not exist, cannot be read, or is empty.
    """
    path, loader, files = Path(entry.path).expanduser(), entry.path, entry.data_files
    endings, where = ", ".join(LOADERS), ""
    if path.is_file():
        if path.suffix not in LOADERS:
            raise ValueError(f"{entry.path} must end in one of {endings}")
        loader, files = LOADERS[path.suffix], str(path)
    elif path.is_dir():
        loader = str(path)
        if not any(file.suffix in LOADERS for file in path.rglob("*")):
            raise ValueError(f"the folder {path} holds no file that ends in one of {endings}")
    elif path.suffix in LOADERS or loader.startswith((".", "/", "~")) or loader.count("/") > 1:
        raise ValueError(f"{entry.path} does not exist (looked from {Path.cwd()})")
    else:
        where = " (no file or folder here, so taken for a hub id)"
    options = {"data_dir": entry.data_dir, "data_files": files, "streaming": streaming}
    name = None if path.exists() else entry.name
    try:
        rows = load_dataset(loader, name, split=entry.split, **options)
        if next(iter(rows), None) is None:
            raise StopIteration
    except (StopIteration, Exception) as error:  # empty files raise StopIteration (datasets 5.2)
        cause = error.__cause__ or error
        reason = str(cause).strip().split("\n")[0].rstrip(".")
        if isinstance(cause, StopIteration) or "corresponds to no data" in reason:
            reason = "it is empty"
        hint = "; name a split, or hold out a --test_split_size" if "split" in reason else ""
        text = f"cannot load the data set {entry.path}{where}: {reason}{hint}"
        raise ValueError(text) from error
    if entry.columns is None:
        return rows
    if missing := [column for column in entry.columns if column not in rows.column_names]:
        found = ", ".join(rows.column_names)
        raise ValueError(f"{entry.path} has no column {missing[0]!r} among {found}")
    return rows.select_columns(entry.columns)


def _unread_files(name: str) -> list[str]:
    """Return a note on files of a folder that are not read, as their names belong to no split."""
    folder = Path(name).expanduser()
    if not folder.is_dir():
        return []
    files = {path.resolve() for path in folder.rglob("*") if path.suffix in LOADERS}
    used = load_dataset_builder(str(folder)).config.data_files
    unused = files - {Path(file).resolve() for split in used.values() for file in split}
    unread = ", ".join(sorted(file.name for file in unused))
    text = f"not read, because their names belong to no split of {name}: {unread}"
    return [text] if unused else []


def _load_prepared(args: DataArguments, named: Row, needs_test: bool) -> LoadedData:
    """Return the sets of a folder that `trl-packing prepare` wrote, if they fit the options."""
    folder, manifest = str(args.dataset_name), read_manifest(str(args.dataset_name))
    if args.dataset_streaming:
        raise ValueError(f"{folder} holds prepared data: leave dataset_streaming out")
    # Options that made the columns and the splits. They must not change afterwards.
    made_by = ("dataset_config", "dataset_train_split", "dataset_test_split", "test_split_size")
    defaults = {each.name: each.default for each in fields(DataArguments)}
    for name, value in ({option: getattr(args, option) for option in made_by} | named).items():
        stored = manifest["options"].get(name)
        if value != defaults.get(name) and str(value).lower() != str(stored).lower():
            raise ValueError(
                f"{folder} was prepared with {name}={stored!r}, and here {name}={value!r}; leave "
                "it out, or prepare the data again"
            )
    if needs_test and "eval" not in manifest["sets"]:
        raise ValueError(f"{folder} was prepared without a test split; prepare it with one")
    test = load_prepared(folder, "eval") if "eval" in manifest["sets"] else None
    return LoadedData(load_prepared(folder), test, [])


def _hold_out(rows: Sets, share: float, seed: int) -> tuple[Sets, Sets]:
    """Return rows to train and rows to hold out, drawn from all data sets together."""
    for name, dataset in rows.items():
        if records_of(dataset):
            raise ValueError(
                f"test_split_size={share} cannot divide {name!r}, which is prepared: a row may be "
                "several documents; name its rows as path, or leave test_split_size out"
            )
        if isinstance(dataset, IterableDataset):
            raise ValueError(
                "test_split_size cannot hold out a share of a stream: name a test split"
            )
    ends = np.cumsum([len(dataset) for dataset in rows.values()])
    number = int(np.ceil(share * ends[-1])) if 0 < share < 1 else 0
    if not 0 < number < ends[-1] or round(share * ends[-1]) == 0:
        raise ValueError(
            f"test_split_size={share} must be between 0 and 1, and leave a document on each side"
        )
    is_test = np.zeros(ends[-1], bool)
    is_test[np.random.default_rng(seed).permutation(ends[-1])[:number]] = True
    train: Sets = {}
    test: Sets = {}
    for (name, dataset), of_source in zip(rows.items(), np.split(is_test, ends[:-1]), strict=True):
        for part, chosen in ((train, ~of_source), (test, of_source)):
            if chosen.any():
                part[name] = dataset.select(np.flatnonzero(chosen))
    return train, test


# --- several data sets ----------------------------------------------------------------------------


class LoadedSources(NamedTuple):
    """The entries of `datasets` by source: rows, held-out rows, shares, and entries."""

    train: Sets
    test: Sets
    mixture: Mixture
    entries: dict[str, SourceConfig]


def load_sources(
    entries: Sequence[SourceConfig], streaming: bool, test_size: float | None, seed: int
) -> LoadedSources:
    """Return the rows that the entries of `datasets` describe.

    Args:
        entries: of `datasets`.
        streaming: read them as streams.
        test_size: share of all rows to hold out; None holds none out.
        seed: draws the held-out rows.

    Raises:
        ValueError: an entry cannot be loaded, or the entries do not go together.
    """
    named: dict[str, SourceConfig] = {}
    mixture: dict[str, dict[str, float]] = {}
    for entry in entries:
        in_files = isinstance(entry.data_files, str) and entry.path in LOADERS.values()
        stem = Path(str(entry.data_files) if in_files else entry.path).stem
        name = entry.source or "-".join(filter(None, [stem, entry.name]))
        if name in named:
            raise ValueError(
                f"two entries of datasets have the name {name!r}; give one of them another source"
            )
        named[name] = entry
        given = {"weight": entry.weight, "epochs": entry.epochs}
        share = {kind: value for kind, value in given.items() if value is not None}
        if len(share) > 1:
            raise ValueError(f"the entry {name!r} of datasets has a weight and epochs; give one")
        mixture |= {name: share} if share else {}
    rows = {name: _read_source(entry, streaming) for name, entry in named.items()}
    rows = _fractions(rows, entries, streaming=streaming)
    test: Sets = {}
    if test_size is not None:
        rows, test = _hold_out(rows, test_size, seed)
    return LoadedSources(rows, test, mixture or None, named)


def load_named(args: SourceArguments, run: Any, kept: tuple[str, ...]) -> tuple[Sets, Mixture]:
    """Return the rows of `datasets` and their shares; only entries that name columns get TRL's.

    Args:
        args: name the data sets.
        run: the settings of the run.
        kept: columns that stay beside a conversation.
    """
    sources = load_sources(args.datasets, args.streaming, None, run.seed)
    rows: Sets = {}
    for name, each in sources.train.items():
        entry = sources.entries[name]
        columns = RowColumns(entry, run.dataset_text_field, True, kept, name)
        rows[name] = columns.convert(each) if entry.named() else each
    return rows, sources.mixture


def _read_source(entry: SourceConfig, streaming: bool) -> AnyDataset:
    if not is_prepared(entry.path):
        return read(entry, streaming)
    if streaming:
        raise ValueError(f"{entry.path} holds prepared data: leave streaming out")
    if named := [*entry.named(), *["columns"] * bool(entry.columns)]:
        raise ValueError(
            f"{entry.path} holds prepared data, which has no columns to name: leave {named[0]} out "
            "of its entry"
        )
    return load_prepared(entry.path, entry.split)


def _fractions(rows: Sets, entries: Sequence[SourceConfig], *, streaming: bool) -> Sets:
    """Return the first rows of each, as TRL's `fraction` says; all of them without it."""
    fractions = [entry.fraction for entry in entries if entry.fraction is not None]
    if not fractions:
        return rows
    if len(fractions) < len(entries) or not sum(fractions):
        raise ValueError(
            "fraction must be set for all entries of datasets, or for none, and one must be above 0"
        )
    if streaming:
        raise ValueError("fraction needs the sizes of data sets, which streams do not tell")
    shares = [fraction / sum(fractions) for fraction in fractions]
    sizes = [len(dataset) for dataset in rows.values()]
    total = min(size / share for size, share in zip(sizes, shares, strict=True) if share > 0)
    numbers = [round(share * total) for share in shares]
    return {  # a prepared data set that stays whole keeps its counts
        name: dataset if number == len(dataset) else dataset.select(range(number))
        for (name, dataset), number in zip(rows.items(), numbers, strict=True)
        if number
    }


def _convert_sources(
    sources: LoadedSources, columns: Mapping[str, "RowColumns"], source_column: str | None
) -> LoadedData:
    """Return several data sets in TRL's columns; those held out as one if their columns agree."""
    documents: Sets = {}
    held_out: Sets = {}
    notes: list[str] = []
    for name, rows in sources.train.items():
        documents[name] = columns[name].convert(rows)
        found = columns[name].notes(next(iter(rows)), next(iter(documents[name])))
        notes += [f"{name}: {note}" for note in found]
    for name, rows in sources.test.items():
        held_out[name] = columns[name].convert(rows)
        if source_column is not None:
            others = [c for c in held_out[name].column_names if c != source_column]
            chosen = held_out[name].select_columns(others)
            held_out[name] = chosen.add_column(source_column, [name] * len(chosen))
    if len({str(rows.features) for rows in held_out.values()}) > 1:
        return LoadedData(documents, held_out, notes, sources.mixture)
    joined = concatenate_datasets([*held_out.values()]) if held_out else None
    return LoadedData(documents, joined, notes, sources.mixture)


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowColumns:
    """The columns of one data set to train on, and the form of its documents.

    Attributes:
        entry: names the columns.
        text_field: the column of plain text in the documents of the run.
        has_chat_template: whether conversations can be rendered.
        kept: columns that stay beside a conversation.
        source: the name of the data set, if it is one of several.
    """

    entry: SourceConfig
    text_field: str
    has_chat_template: bool
    kept: tuple[str, ...]
    source: str | None = None

    def convert(self, dataset: AnyDataset) -> AnyDataset:
        """Return `dataset` with columns for TRL, as the table at the top of this file shows.

        Raises:
            ValueError: a column is missing, or the names contradict each other.
        """
        if records_of(dataset):
            return dataset
        entry, columns = self.entry, get_dataset_column_names(dataset)
        if entry.chat and not self.has_chat_template:
            word = self._word("chat")
            raise self._error(f"{word} needs a chat template: set one with --chat_template_path")
        if image := {*columns} & {"image", "images"} - {*self.kept}:
            text = f"the column {image.pop()!r} holds images: train them with recipes/vision.py"
            raise self._error(f"{text}, or remove it")
        makes_prompts = entry.prompt_column or entry.prompt_template or entry.completion_column
        wholes = {"messages_column": "messages", "dataset_text_field": self.text_field}
        for option, form in wholes.items():
            if (column := getattr(entry, option)) is not None:
                if makes_prompts:
                    word = self._word(option)
                    raise self._error(f"{word} is the whole document: name no prompt beside it")
                self._require(columns, column, option)
                rows = dataset.select_columns([*(c for c in self.kept if c in columns), column])
                return rows if column == form else rows.rename_column(column, form)
        if makes_prompts or ("prompt" in columns and "input_ids" not in columns):
            dropped = [column for column in columns if column not in self.kept]
            options = {} if isinstance(dataset, IterableDataset) else {"desc": "Naming columns"}
            rewrite = self._prompt_completion(columns)
            return dataset.map(rewrite, with_indices=True, remove_columns=dropped, **options)
        if "input_ids" in columns:
            return dataset
        forms = ("messages", "conversations", self.text_field)
        form = next((form for form in forms if form in columns), "")
        if not form:
            raise self._no_form(columns)
        return dataset.select_columns([*(c for c in self.kept if c in columns), form])

    def notes(self, row: Row, document: Row) -> list[str]:
        """Return notes on surprises in the first row and the document made from it."""
        prompt, completion = document.get("prompt"), document.get("completion")
        if isinstance(prompt, str) and isinstance(completion, str):
            if prompt[-1:].isspace() or completion[:1].isspace() or not (prompt and completion):
                return []
            text = f"the model reads {prompt[-12:] + completion[:12]!r} where prompt and completion"
            word = self._word("prompt_template")
            return [f"{text} meet; {word} can put a space or a line break there"]
        was_conversation = isinstance(row.get(self.entry.prompt_column or "prompt"), list)
        if prompt is None or was_conversation or self.entry.chat:
            return []
        off = "--chat false" if self.source is None else "chat: false in its entry"
        text = "prompt and completion become a user and an assistant message, because the tokenizer"
        return [f"{text} has a chat template; {off} trains on the plain text"]

    def _prompt_completion(self, columns: list[str]) -> Any:
        """Return the function that makes a prompt and a completion from a row."""
        entry, template = self.entry, None
        if entry.prompt_column and entry.prompt_template:
            one, other = self._word("prompt_column"), self._word("prompt_template")
            raise self._error(f"give {one} or {other}, not both")
        names, option = [entry.prompt_column or "prompt"], "prompt_column"
        completion, chat = entry.completion_column or "completion", entry.chat
        if entry.prompt_template is not None:
            try:  # its {query} is the column query, instruction or question
                query = column_among(columns, "query")
                template = PromptTemplate.from_setting(entry.prompt_template, query)
                names, option = template.fields, "prompt_template"
            except ValueError as error:
                raise self._error(str(error)) from error
            completion = entry.completion_column or column_among(columns, "response")
        for column in names:
            self._require(columns, column, option)
        self._require(columns, completion, "completion_column")
        if chat is None:
            chat = self.has_chat_template and template is None

        def rewrite(row: Row, index: int) -> Row:
            for column in (*names, completion):
                if row[column] is None:
                    raise self._error(f"row {index} has no value in the column {column!r}")
            prompt = template.prompt(row) if template else row[names[0]]
            document = {"prompt": prompt, "completion": row[completion]}
            if chat and not isinstance(prompt, list):
                roles = {"prompt": "user", "completion": "assistant"}
                return {k: [{"role": roles[k], "content": str(v)}] for k, v in document.items()}
            return {k: v if isinstance(v, list) else str(v) for k, v in document.items()}

        return rewrite

    # --- mistakes -------------------------------------------------------------------------------

    def _no_form(self, columns: list[str]) -> ValueError:
        """Return the refusal of columns that no option names, with options that may fit them."""
        found, where = ", ".join(columns), "" if self.source is None else " in its entry"
        answer = next((name for name in _ANSWERS if name in columns), None)
        question = next((name for name in _QUESTIONS if name in columns), None)
        if not (answer and question):
            words = [self._word(o) for o in (*_OF_ROWS[:3], "dataset_text_field")]
            return self._error(
                f"no column to train on among {found}: name yours{where} with {words[0]} and "
                f"{words[1]}, {words[2]} or {words[3]}"
            )
        fits = {"prompt_column": question, "completion_column": answer}
        if {"instruction", "input"} <= {*columns}:
            fits = {"prompt_template": "alpaca", "completion_column": answer}
        sign = " " if self.source is None else ": "
        options = " ".join(f"{self._word(name)}{sign}{quote(fits[name])}" for name in fits)
        return self._error(
            f"no column to train on among {found}; these options fit{where}: {options}"
        )

    def _require(self, columns: list[str], column: str, option: str) -> None:
        if column not in columns:
            raise self._error(
                f"no column {column!r} among {', '.join(columns)}: name yours with "
                f"{self._word(option)}"
            )

    def _word(self, option: str) -> str:
        """Return an option as the user writes it: in an entry of `datasets`, without dashes."""
        return option if self.source is not None else f"--{option}"

    def _error(self, sentence: str) -> ValueError:
        return ValueError(
            sentence if self.source is None else f"the data set {self.source}: {sentence}"
        )
