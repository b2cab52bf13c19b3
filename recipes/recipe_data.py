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
    test_split_size: 0.02                a share of each data set, held out at random

Without `weight` and `epochs`, every document is trained once an epoch, as in TRL's sft.py. Anything
wrong with a data set raises ValueError with one sentence, before anything is written.
"""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
from accelerate import PartialState
from datasets import Dataset, IterableDataset, concatenate_datasets
from transformers.hf_argparser import HfArg
from trl import ScriptArguments
from trl.data_utils import get_dataset_column_names
from trl.scripts.utils import DatasetConfig

from trl_packing import PackedSFTConfig
from trl_packing.config import PackingOptions
from trl_packing.data.files import (
    is_prepared,
    load_prepared,
    read_manifest,
    read_rows,
    records_of,
)
from trl_packing.data.row_format import BESIDE, PromptTemplate, column_among

# TRL reads the first two beside a conversation, and the trainer the weight of a document.
KEPT_COLUMNS = ("tools", "chat_template_kwargs", "loss_weight")

# Names of columns in data sets as people have them, for a refusal that proposes options.
_ASKED = ("instruction", "question", "query", "problem", "input")
_ANSWERS = ("output", "answer", "response", "completion", "solution")

AnyDataset: TypeAlias = Dataset | IterableDataset
Sets: TypeAlias = dict[str, AnyDataset]


@dataclass
class ColumnArguments:
    """The columns to train on."""

    prompt_column: str | None = HfArg(default=None, help="Column of the prompt (prompt).")
    completion_column: str | None = HfArg(default=None, help="Column of the answer (completion).")
    messages_column: str | None = HfArg(default=None, help="Column of conversations.")
    chat: bool | None = HfArg(
        default=None,
        help="Make messages of prompts and completions. Default: if the tokenizer has a chat "
        "template and no prompt_template is given.",
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

    prompt_template: str | None = None
    dataset_text_field: str | None = None
    weight: float | None = None
    epochs: float | None = None
    source: str | None = None

    @classmethod
    def of(cls, number: int, given: Any) -> "SourceConfig":
        """Return an entry of `datasets`, whose keys are checked."""
        if isinstance(given, cls):
            return given
        keys = [each.name for each in fields(cls)]
        unknown = [key for key in given if key not in keys] if isinstance(given, dict) else [given]
        if unknown or given.get("path") is None:
            wrong = f"unknown key {unknown[0]!r}" if unknown else "no path"
            raise ValueError(f"datasets, entry {number}: {wrong}; its keys are {', '.join(keys)}")
        entry = cls(**given)
        if entry.chat not in (None, True, False):
            raise ValueError(f"datasets, entry {number}: chat={entry.chat!r} must be true or false")
        return entry

    def named(self) -> list[str]:
        """Return the options that say how its rows become documents, where they are given."""
        options = (*(each.name for each in fields(ColumnArguments)), "prompt_template")
        return [o for o in (*options, "dataset_text_field") if getattr(self, o) is not None]


@dataclass
class DataArguments(ColumnArguments, ScriptArguments):
    """TRL's script arguments, the columns to train on, and TRL's `datasets` in their place."""

    test_split_size: float | None = HfArg(default=None, help="Share of the rows to hold out.")
    datasets: list[SourceConfig] = field(default_factory=list)  # in a YAML file
    streaming: bool = HfArg(default=False, help="Read the entries of datasets as streams.")

    def __post_init__(self) -> None:
        if not isinstance(self.datasets, list):
            raise ValueError("datasets must be a list of entries, each '- path:'")
        self.datasets = [SourceConfig.of(at + 1, each) for at, each in enumerate(self.datasets)]


def load_data(
    args: DataArguments,
    run: PackedSFTConfig,
    tokenizer: Any,
    *,
    needs_test: bool = False,
    kept: tuple[str, ...] = (),
) -> tuple[Any, Any]:
    """Return the rows to train, and those to hold out or None, in TRL's columns.

    Several sources are a dictionary, and so are held-out rows of different columns.

    Args:
        args: the data sets and their columns.
        run: the settings of the run. Its prompt template is applied here, so it becomes None, and
            the shares of `datasets` become its mixture.
        tokenizer: or a processor. With a chat template, prompts and completions become messages.
        needs_test: hold rows out even without ``test_split_size``: those of a split.
        kept: columns that stay beside the documents.

    Raises:
        ValueError: a data set cannot be loaded, or has other columns.
    """
    own = {each.name: getattr(args, each.name) for each in fields(ColumnArguments)}
    own["prompt_template"] = run.prompt_template
    run.prompt_template = None
    share, streaming = args.test_split_size, args.dataset_streaming
    if args.datasets:
        for option, value in {"dataset_name": args.dataset_name, **own}.items():
            if value is not None:
                raise ValueError(f"with datasets, {option} belongs into the entries: move it there")
        if needs_test and share is None:
            raise ValueError("with datasets, evaluation needs a test_split_size to hold out")
        sources, shares = _by_name(args.datasets)
        streaming = args.streaming
        if shares and run.mixture:
            raise ValueError("mixture and a weight or epochs in datasets say the same; give one")
        run.mixture = shares or run.mixture
    elif is_prepared(str(args.dataset_name)):
        return _load_prepared(args, own, needs_test)
    else:
        given = {"path": str(args.dataset_name), "name": args.dataset_config, **own}
        sources = {"": SourceConfig(split=args.dataset_train_split, **given)}
    rows = _fractions({name: read(entry, streaming) for name, entry in sources.items()}, sources)
    held_out: Sets = {}
    if share is not None:
        for name, dataset in rows.items():
            rows[name], held_out[name] = _hold_out(dataset, share, run.seed)
    elif needs_test:
        try:
            held_out[""] = read(SourceConfig(split=args.dataset_test_split, **given), streaming)
        except ValueError as error:
            raise ValueError(
                f"{error}; evaluation needs held-out rows: --test_split_size 0.02 takes a share of "
                "the rows, --dataset_test_split names a split"
            ) from error
    has_template = bool(tokenizer.chat_template or run.chat_template_path)
    kept = (*KEPT_COLUMNS, *PackingOptions.of(run).named_columns(), *kept)
    columns = {
        name: RowColumns(entry, run.dataset_text_field, has_template, kept, name)
        for name, entry in sources.items()
    }
    train = {name: columns[name].convert(dataset) for name, dataset in rows.items()}
    test = {name: columns[name].convert(dataset) for name, dataset in held_out.items()}
    if args.datasets and (column := run.source_column) is not None:
        for name, each in test.items():
            others = each.select_columns([other for other in each.column_names if other != column])
            test[name] = others.add_column(column, [name] * len(each))
    if args.datasets and len({str(dataset.features) for dataset in test.values()}) == 1:
        test = {"": concatenate_datasets([*test.values()])}
    return train.get("", train), test.get("", test or None)


# --- reading --------------------------------------------------------------------------------------


def read(entry: SourceConfig, streaming: bool) -> AnyDataset:
    """Return the rows of one data set.

    Raises:
        ValueError: it does not exist, cannot be read, or is empty.
    """
    if is_prepared(entry.path):
        given = entry.named() + ["columns"] * bool(entry.columns) + ["streaming"] * streaming
        if given:
            raise ValueError(f"{entry.path} holds prepared data: leave {given[0]} out")
        return load_prepared(entry.path, entry.split)
    options = {"data_dir": entry.data_dir, "data_files": entry.data_files, "streaming": streaming}
    rows = read_rows(entry.path, entry.split, entry.name, **options)
    missing = {*(entry.columns or ())} - {*get_dataset_column_names(rows)}
    if missing:
        raise ValueError(f"the data set {entry.path} has no column {min(missing)!r}")
    return rows if entry.columns is None else rows.select_columns(entry.columns)


def _load_prepared(args: DataArguments, own: dict[str, Any], needs_test: bool) -> tuple[Any, Any]:
    """Return the sets of a folder that `trl-packing prepare` wrote, if they fit the options."""
    folder = str(args.dataset_name)
    manifest = read_manifest(folder)
    if args.dataset_streaming:
        raise ValueError(f"{folder} holds prepared data: leave dataset_streaming out")
    # Options that made the columns and the splits. They must not change afterwards.
    made_by = ("dataset_config", "dataset_train_split", "dataset_test_split", "test_split_size")
    defaults = {each.name: each.default for each in fields(DataArguments)}
    for name, value in (own | {option: getattr(args, option) for option in made_by}).items():
        stored = manifest["options"].get(name)
        if value != defaults.get(name) and str(value).lower() != str(stored).lower():
            raise ValueError(
                f"{folder} was prepared with {name}={stored!r}, and here {name}={value!r}; leave "
                "it out, or prepare the data again"
            )
    has_test = needs_test or "eval" in manifest["sets"]
    return load_prepared(folder), load_prepared(folder, "eval") if has_test else None


def _hold_out(rows: AnyDataset, share: float, seed: int) -> tuple[Dataset, Dataset]:
    """Return rows to train and rows to hold out, both in their order."""
    if isinstance(rows, IterableDataset) or records_of(rows):
        raise ValueError(
            f"test_split_size={share} cannot divide a stream or prepared data; name a test split, "
            "or the rows that were prepared"
        )
    number = math.ceil(share * len(rows))
    if not 0 < number < len(rows):
        raise ValueError(
            f"test_split_size={share} must be between 0 and 1, and leave a document on each side"
        )
    drawn = np.random.default_rng(seed).permutation(len(rows))
    return rows.select(np.sort(drawn[number:])), rows.select(np.sort(drawn[:number]))


# --- several data sets ----------------------------------------------------------------------------


def _by_name(entries: list[SourceConfig]) -> tuple[dict[str, SourceConfig], Any]:
    """Return the entries of `datasets` by the names of their sources, and their shares."""
    sources, shares = {}, {}
    for entry in entries:
        name = entry.source or "-".join(filter(None, [Path(entry.path).stem, entry.name]))
        if name in sources:
            raise ValueError(
                f"two entries of datasets have the name {name!r}; give one of them another source"
            )
        sources[name] = entry
        share = {"weight": entry.weight, "epochs": entry.epochs}
        shares[name] = {kind: value for kind, value in share.items() if value is not None}
    return sources, {name: share for name, share in shares.items() if share}


def _fractions(rows: Sets, sources: Mapping[str, SourceConfig]) -> Sets:
    """Return the first rows of each, as TRL's `fraction` says; all of them without it."""
    fractions = [source.fraction for source in sources.values() if source.fraction is not None]
    if not fractions:
        return rows
    are_streams = any(isinstance(dataset, IterableDataset) for dataset in rows.values())
    is_share = sum(fractions) > 0 and 0 <= min(fractions) <= max(fractions) <= 1
    if are_streams or len(fractions) < len(sources) or not is_share:
        raise ValueError(
            f"fraction={fractions[0]!r}: set one from 0 to 1 for all entries of datasets or none, "
            "and none for streams; epochs trains a data set more than once"
        )
    sizes = np.array([len(dataset) for dataset in rows.values()])
    shares = np.array(fractions) / sum(fractions)
    total = min(sizes[shares > 0] / shares[shares > 0])
    numbers = [round(number) for number in shares * total]
    return {  # a prepared data set that stays whole keeps its counts
        name: dataset if number == len(dataset) else dataset.select(range(number))
        for (name, dataset), number in zip(rows.items(), numbers, strict=True)
        if number
    }


# --- columns --------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RowColumns:
    """The columns of one data set to train on, and the form of its documents.

    Attributes:
        entry: names the columns.
        text_field: the column of plain text in the documents of the run.
        has_chat_template: whether conversations can be rendered.
        kept: columns that stay beside a conversation.
        source: the name of the data set among several; "" of a single one.
    """

    entry: SourceConfig
    text_field: str
    has_chat_template: bool
    kept: tuple[str, ...]
    source: str

    def convert(self, dataset: AnyDataset) -> AnyDataset:
        """Return `dataset` with columns for TRL, as the table at the top of this file shows.

        Raises:
            ValueError: a column is missing, or the names contradict each other.
        """
        entry = self.entry
        columns = get_dataset_column_names(dataset)
        if records_of(dataset) or ("images" in self.kept and not entry.named()):
            return dataset
        if images := {*columns} & {"image", "images"} - {*self.kept}:
            raise self._error(f"column {images} holds images: train it with recipes/vision.py")
        whole = entry.messages_column or entry.dataset_text_field
        makes_prompts = entry.prompt_column or entry.prompt_template or entry.completion_column
        if whole and makes_prompts:
            raise self._error(f"{whole!r} is the whole document: name no prompt beside it")
        kept = [column for column in columns if column in self.kept]
        if not entry.dataset_text_field:  # the trainer warns of parts that nothing reads
            template = entry.prompt_template or ""
            kept += [c for c in BESIDE if c in {*columns} - {*kept} and f"{{{c}}}" not in template]
        if makes_prompts or (not whole and "prompt" in columns and "input_ids" not in columns):
            dropped = [column for column in columns if column not in kept]
            rewrite = self._prompt_completion(columns, next(iter(dataset)))
            return dataset.map(rewrite, with_indices=True, remove_columns=dropped)
        if not whole and "input_ids" in columns:
            return dataset
        form = "messages" if entry.messages_column else self.text_field
        if whole:
            option = "messages_column" if entry.messages_column else "dataset_text_field"
            self._require(columns, whole, option)
        else:
            forms = ("messages", "conversations", self.text_field)
            whole = form = next((name for name in forms if name in columns), "")
            if not form:
                raise self._no_form(columns)
        rows = dataset.select_columns([*kept, whole])
        return rows if whole == form else rows.rename_column(whole, form)

    def _prompt_completion(self, columns: list[str], first: dict[str, Any]) -> Any:
        """Return the function that makes a prompt and a completion from a row."""
        entry = self.entry
        template = None
        if entry.prompt_column and entry.prompt_template:
            raise self._error("give --prompt_column or --prompt_template, not both")
        names = [entry.prompt_column or "prompt"]
        option = "prompt_column"
        completion = entry.completion_column or "completion"
        chat = entry.chat
        if entry.prompt_template is not None:
            try:  # its {query} is the column query, instruction or question
                query = column_among(columns, "query")
                template = PromptTemplate.from_setting(entry.prompt_template, query)
                completion = entry.completion_column or column_among(columns, "response")
            except ValueError as error:
                raise self._error(str(error)) from error
            names = template.fields
            option = "prompt_template"
        for column in names:
            self._require(columns, column, option)
        self._require(columns, completion, "completion_column")
        if chat is None:
            chat = self.has_chat_template and template is None
            if chat and not isinstance(first[names[0]], list):
                PartialState().print(
                    f"note: {self.source} prompt and completion become a user and an assistant "
                    "message, because the tokenizer has a chat template; --chat false trains on "
                    "the plain text"
                )

        def rewrite(row: dict[str, Any], index: int) -> dict[str, Any]:
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
        hint = "name yours with --prompt_column and --completion_column, --messages_column or "
        hint += "--dataset_text_field"
        question, answer = (
            next((name for name in names if name in columns), None) for names in (_ASKED, _ANSWERS)
        )
        if question and answer:
            is_alpaca = {"instruction", "input"} <= {*columns}
            prompt = "--prompt_template alpaca" if is_alpaca else f"--prompt_column {question}"
            hint = f"these options fit: {prompt} --completion_column {answer}"
        return self._error(f"no column to train on among {', '.join(columns)}: {hint}")

    def _require(self, columns: list[str], column: str, option: str) -> None:
        if column not in columns:
            found = ", ".join(columns)
            raise self._error(f"no column {column!r} among {found}: name yours with --{option}")

    def _error(self, sentence: str) -> ValueError:
        """Return a refusal; options of an entry of `datasets` have no dashes."""
        if not self.source:
            return ValueError(sentence)
        return ValueError(f"the data set {self.source}: {sentence.replace('--', '')}")
