"""What a run would train, seen before it starts: rows prepared as the trainer does, and printed.

row of a data set  →  documents, by the very code of the trainer  →  text, trained tokens marked
"""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from datasets import Dataset
from transformers import AutoConfig, AutoProcessor, HfArgumentParser
from trl.chat_template_utils import (
    clone_chat_template,
    get_training_chat_template,
    has_generation_markers,
)
from trl.data_utils import is_conversational

from trl_packing.config import PackedSFTConfig
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.eos import EosRule
from trl_packing.data.preparation import prepare
from trl_packing.data.rules import Preparation
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, token_columns
from trl_packing.documents.weights import in_words
from trl_packing.formatting.printable import escape_hidden
from trl_packing.formatting.row_format import RowFormat
from trl_packing.tools.show import show_document
from trl_packing.training.arguments import (
    check_arguments,
    generation_config_of,
    reason_for_trl_path,
)
from trl_packing.training.epoch_report import (
    PackingReport,
    plan_report,
    settings_in_steps,
    training_sampler,
)

# A part of the data set, in messages that are to name the whole.
_NAME = "inspected"

# What a machine without a GPU can be told to use; none of it matters here.
_FIXED = ("--output_dir", "unused", "--use_cpu", "--bf16", "false", "--report_to", "none")


@dataclass(frozen=True)
class ShownRow:
    """A row of a data set as text: its documents, or the reason why none of it is trained."""

    row: int
    documents: tuple[str, ...]
    reason: str = ""

    @property
    def texts(self) -> tuple[str, ...]:
        """Return what is printed of it."""
        return self.documents or (f"row {self.row} · not trained: {self.reason}",)


def inspect(
    dataset: Dataset,
    tokenizer: Any,
    settings: Sequence[str] = (),
    *,
    rows: Sequence[int] | None = None,
    prepares_all: bool = False,
    color: bool = False,
    model: str | None = None,
) -> Iterator[str]:
    """Yield each of `rows` as text with its trained tokens marked, and why it would be dropped.

    settings: options of `PackedSFTConfig` as a command line has them, ["--train_on", "assistant"].
    rows: their numbers; None: the first three.
    prepares_all: yield too what preparing the whole data set loses.
    model: a name or a folder, whose generation config says where generation stops.

    Raises ValueError for rows that are not there, and for settings that cannot be.
    """
    run = PreviewedRun.of(dataset, tokenizer, settings, model)
    for shown in show_rows_of(run, rows, color=color):
        yield from shown.texts
    if prepares_all:
        yield losses_of(run)


def show_rows_of(
    run: "PreviewedRun", rows: Sequence[int] | None = None, *, color: bool = False
) -> Iterator[ShownRow]:
    """Yield each of `rows` (None: the first three) as the run would train it.

    Raises ValueError, before the first is shown, for rows that are not there.
    """
    number = len(run.dataset)
    rows = range(min(3, number)) if rows is None else rows
    for row in rows:
        if not 0 <= row < number:
            raise ValueError(f"row {row} is not among the {number:,} rows of the data set")
    for row in rows:
        documents, reason = run.documents_of(row)
        pieces = [f", piece {i + 1} of {len(documents)}" for i in range(len(documents))]
        texts = [
            show_document(
                document,
                run.preparation.eos.tokenizer,
                color=color,
                name=f"row {row}{piece if len(documents) > 1 else ''}",
            )
            for document, piece in zip(documents, pieces, strict=True)
        ]
        yield ShownRow(row, tuple(texts), escape_hidden(reason))


def losses_of(run: "PreviewedRun") -> str:
    """Return what preparing the whole data set loses, in words."""
    _, counts = run.documents()
    lost = str(counts) if counts is not None else ""
    return f"{len(run.dataset):,} rows\n{lost or 'Nothing is lost.'}"


def plan(
    dataset: Dataset,
    tokenizer: Any,
    settings: Sequence[str] = (),
    *,
    ranks: int = 1,
    hidden_size: int | None = None,
    model: str | None = None,
) -> PackingReport:
    """Return what an epoch of a run on `ranks` ranks would be made of; settings as in `inspect`.

    hidden_size: the model's, for the balance of ranks. model: as in `inspect`.

    Raises ValueError for settings that cannot be.
    """
    if ranks < 1:
        raise ValueError(f"ranks={ranks} must be at least 1")
    run = PreviewedRun.of(dataset, tokenizer, settings, model)
    args = run.args
    prepared, counts = run.documents()
    columns = [*token_columns(prepared.column_names), SEQ_LENGTHS]
    documents = ArrowDocuments(prepared, [c for c in columns if c in prepared.column_names])
    sampler = training_sampler(
        documents,
        args,
        packing=args.packing,
        batch_size=args.per_device_train_batch_size,
        ranks=ranks,
        hidden_size=hidden_size,
    )
    return plan_report(
        documents,
        sampler,
        attention=None,
        loss=in_words(args.loss_weighting, prepared.column_names),
        preparation=counts or PreparationCounts(),
        tokens_per_micro_batch=_held_tokens(args),
        given_in_steps=settings_in_steps(args),
    )


def _held_tokens(args: PackedSFTConfig) -> int | None:
    """Return the tokens of every micro-batch where shapes are held, None elsewhere."""
    if not args.static_shapes:
        return None
    multiple = args.pad_to_multiple_of or 1
    return -(-args.max_length * args.per_device_train_batch_size // multiple) * multiple


# --- the run ----------------------------------------------------------------------------------
@dataclass(frozen=True)
class PreviewedRun:
    """The settings of a run, and its data as the trainer would prepare them."""

    args: PackedSFTConfig
    dataset: Dataset
    preparation: Preparation

    @classmethod
    def of(
        cls, dataset: Dataset, tokenizer: Any, settings: Sequence[str], model: str | None = None
    ) -> "PreviewedRun":
        """Return the run that `settings` describe; arguments and errors as in `inspect`."""
        args = config_of(settings)
        check_arguments(args, dataset)
        trl_path = reason_for_trl_path(dataset, None)
        if trl_path:
            raise ValueError(f"{trl_path}: TRL's own code prepares it; it cannot be shown here")
        generation_config = None if model is None else generation_config_of(model, args)
        tokenizer = tokenizer_of_run(tokenizer, args)
        return cls(args, dataset, _preparation(args, tokenizer, dataset[0], generation_config))

    def documents(self) -> tuple[Dataset, PreparationCounts | None]:
        """Return the documents of the whole data set, and what became of its tokens."""
        return self._prepared(self.dataset, self.preparation, "train")

    def documents_of(self, row: int) -> tuple[list[Mapping[str, Any]], str]:
        """Return the documents of one row, or none and the reason.

        The first row is prepared with it: it says of which form the rows are, and whether messages
        say themselves what is trained.
        """
        first, reason = self._alone(0)
        if row == 0 or reason:
            return (first, reason) if row == 0 else self._alone(row)
        try:
            documents = self._those_of([0, row])[len(first) :]
        except (ValueError, RuntimeError) as error:
            return [], _numbered(str(error), [0, row], row)
        if documents:
            return documents, ""
        return [], self._alone(row)[1] or "preparation leaves nothing of it"

    def _alone(self, row: int) -> tuple[list[Mapping[str, Any]], str]:
        try:
            return self._those_of([row]), ""
        except (ValueError, RuntimeError) as error:
            return [], _numbered(str(error), [row], row)

    def _those_of(self, rows: list[int]) -> list[Mapping[str, Any]]:
        in_order = copy.copy(self.args)
        in_order.shuffle_dataset = False
        in_order.dataset_num_proc = None
        preparation = replace(self.preparation, args=in_order)
        documents, _ = self._prepared(self.dataset.select(rows), preparation, _NAME)
        return list(documents)

    def _prepared(
        self, dataset: Dataset, preparation: Preparation, name: str
    ) -> tuple[Dataset, PreparationCounts | None]:
        if not (self.args.dataset_kwargs or {}).get("skip_prepare_dataset", False):
            return prepare(dataset, preparation, name=name)
        if "input_ids" not in dataset.column_names:
            raise ValueError(
                "skip_prepare_dataset=True takes rows as they are, and these have no input_ids: "
                f"they have {dataset.column_names}; leave it out"
            )
        return dataset, None


class _Parser(HfArgumentParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # without the usage, which has hundreds of lines


def config_of(settings: Sequence[str]) -> PackedSFTConfig:
    """Return the config that options of a command line describe. Raises ValueError for others."""
    args, unknown = _Parser((PackedSFTConfig,)).parse_args_into_dataclasses(
        args=[*_FIXED, *settings], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        raise ValueError(f"PackedSFTConfig has no option {' '.join(unknown)}; check its spelling")
    return args


def load_processing_class(model: str, settings: Sequence[str] = ()) -> Any:
    """Return the tokenizer or processor that a trainer with these settings would load.

    Raises OSError or ValueError where there is none.
    """
    check_path_exists("--model", model)
    return AutoProcessor.from_pretrained(model, **_loading(config_of(settings)))


def check_path_exists(option: str, name: str) -> None:
    """Raise ValueError for the name of a file or folder that is not there; a hub id may be."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if (is_path or name.endswith((".jinja", ".j2"))) and not Path(name).exists():
        raise ValueError(f"{option} {name} does not exist (looked from {Path.cwd()})")


def hidden_size_of(model: str, settings: Sequence[str] = ()) -> int | None:
    """Return the hidden size in the config of a model, None without a config."""
    try:
        config = AutoConfig.from_pretrained(model, **_loading(config_of(settings)))
    except (OSError, ValueError):  # a folder that holds a tokenizer alone
        return None
    return getattr(config.get_text_config(), "hidden_size", None)


def _loading(args: PackedSFTConfig) -> dict[str, Any]:
    given = args.model_init_kwargs or {}
    trusts = given.get("trust_remote_code", args.trust_remote_code)
    return {"revision": given.get("revision") or "main", "trust_remote_code": trusts}


def tokenizer_of_run(tokenizer: Any, args: PackedSFTConfig) -> Any:
    """Return `tokenizer` as TRL's constructor changes it: a copy with the run's EOS and template.

    Raises ValueError for an EOS or padding token that it does not have, and OSError for a
    `chat_template_path` that is neither a template nor a tokenizer.
    """
    tokenizer = copy.deepcopy(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # of a processor
    if args.eos_token is not None:
        _check_in_vocabulary(inner, "eos_token", args.eos_token)
        inner.eos_token = args.eos_token
    path = args.chat_template_path
    if path is not None and Path(path).is_file() and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        check_path_exists("chat_template_path", path)
        _, tokenizer, _ = clone_chat_template(_NoModel(), tokenizer, path)
    pad_token = args.pad_token or inner.pad_token or inner.eos_token
    if args.pad_token is not None:
        _check_in_vocabulary(inner, "pad_token", args.pad_token)
    inner.pad_token = pad_token
    return tokenizer


def _check_in_vocabulary(tokenizer: Any, name: str, token: str) -> None:
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"{name}={token!r} is not in the vocabulary of the tokenizer; name one of its tokens"
        )


class _NoModel:
    """Stands in for the model whose embeddings `clone_chat_template` resizes."""

    def __init__(self) -> None:
        self.vocab_size = 0
        self.config = self.generation_config = SimpleNamespace(eos_token_id=None)
        self.config.get_text_config = lambda: self.config

    def can_generate(self) -> bool:
        return True

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> None:
        multiple = pad_to_multiple_of or 1
        self.vocab_size = -(-new_num_tokens // multiple) * multiple


def _numbered(message: str, rows: Sequence[int], row: int) -> str:
    """Return `message` on a selection of `rows`, said of `row` in the numbers of the data set."""
    message = re.sub(
        rf"\b(row|document) (\d+) of the {_NAME} dataset",
        lambda found: f"{found[1]} {rows[int(found[2])]} of the data set",
        message,
    ).replace(f"the {_NAME} dataset", "the data set")
    return message.removeprefix(f"row {row} of the data set: ")


def _preparation(
    args: PackedSFTConfig, tokenizer: Any, first: dict[str, Any], generation_config: Any
) -> Preparation:
    template = None
    if args.assistant_only_loss:
        if not is_conversational(first):
            raise ValueError("assistant_only_loss=True needs conversations, and there are none")
        if not has_generation_markers(tokenizer.chat_template):
            template = get_training_chat_template(tokenizer)  # as TRL's trainer does
    completion_only = args.completion_only_loss
    if completion_only is None:
        completion_only = "prompt" in first and "completion" in first
    inner = getattr(tokenizer, "tokenizer", tokenizer)
    return Preparation(
        args,
        tokenizer,
        packing=args.packing,
        row_format=RowFormat.from_args(
            args, inner, chat_template=template, completion_only=completion_only
        ),
        eos=EosRule.from_args(args, inner, tokenizer, generation_config),
        by_trl=_refuse,
    )


def _refuse(dataset: Any, formatting_func: Any, name: str) -> Any:
    raise ValueError("TRL's own code prepares data for this tokenizer; it cannot be shown here")
