"""A run before it starts: its settings, its rows as text, its data prepared as by the trainer.

    a row          →  documents, by the trainer's code
    all rows       →  documents and counts                              →  what preparation loses
    all documents  →  `Sampling`, the trainer's, without its model      →  bins and optimizer steps

The rows of a `train_dataset` that is a dictionary are numbered as one.
"""

import copy
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, NamedTuple

import numpy as np
from datasets import (
    Dataset,
    IterableDataset,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from trl import SFTConfig
from trl.data_utils import is_conversational

from trl_packing.attention.backends import check_is_backend
from trl_packing.config import PackingOptions
from trl_packing.data.chat_template import tokenizer_in
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.files import records_of
from trl_packing.data.printable import escape_hidden
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
from trl_packing.data.rules import Rules
from trl_packing.data.stages import WholeDocuments, fit_documents, prepare, whole_documents
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    IMAGE_COLUMNS,
    IMAGE_ROW,
    IMAGE_SIZES,
    SomeRows,
    row_name,
)
from trl_packing.pages.show import show_document
from trl_packing.tools.training_command import (
    TrainerCall,
    config_from_settings,
    configure_tokenizer,
    hidden_size_of,
    processing_class_of,
)
from trl_packing.training.arguments import (
    check_arguments,
    check_weights_and_sources,
    generation_config_of,
    reason_for_trl_path,
    training_template,
)
from trl_packing.training.run_data import prepare_sources, source_sets, trains_completions
from trl_packing.training.sampling import Sampling
from trl_packing.vision.run_images import RunImages
from trl_packing.vision.support import has_images

# Preparation carries one column along for every document, the `source_column` of evaluation sets:
# this one, which holds the number of its row.
ROW = "trl_packing_row"


@dataclass(frozen=True)
class PreviewedRun:
    """The settings of a run, and its data as the trainer would prepare them.

    Attributes:
        call: the arguments of the trainer.
        args: its settings, which may be changed.
        dataset: the rows; of a stream, the first ones; or a dictionary of several data sets.
        preparation: the rules by which rows become documents.
        is_stream: whether `dataset` is only the beginning of a stream.
        chat_template: replaces that of the tokenizer, as in the trainer.
        images: prepares rows with images.
    """

    call: TrainerCall
    args: Any
    dataset: Any
    preparation: Rules
    is_stream: bool
    chat_template: str | None
    images: RunImages

    @classmethod
    def from_settings(
        cls,
        dataset: Dataset,
        tokenizer: Any,
        settings: Sequence[str] = (),
        model: str | None = None,
    ) -> "PreviewedRun":
        """Return the run of rows that `settings` describe: ``["--train_on", "assistant"]``.

        The tokenizer, or processor, is copied. The generation config of `model`, a name, lists the
        tokens that end a generation. Raises ValueError as `from_call`.
        """
        return cls.from_call(TrainerCall(model, config_from_settings(settings), dataset, tokenizer))

    @classmethod
    def from_call(cls, call: TrainerCall, *, stream_rows: int = 1000) -> "PreviewedRun":
        """Return the run of a trainer with these arguments, which reads `stream_rows` of a stream.

        Raises:
            ValueError: the arguments cannot be used, or TRL's code would prepare the data.
        """
        args, given, collator = call.args, call.train_dataset, call.data_collator
        sets_of_rows = (dict, Dataset, IterableDataset)
        if not isinstance(args, SFTConfig) or not isinstance(given, sets_of_rows):
            raise ValueError("only a run with args and a train_dataset of datasets can be shown")
        options = PackingOptions.of(args)
        images = RunImages()
        model = call.model
        sets = source_sets(given, args, collator) or {"train": given}
        first = next(iter(sets.values()))
        check_arguments(args, first, call.compute_loss_func)
        check_is_backend(options.attention)
        trl_path = reason_for_trl_path(first, collator)
        if not trl_path and has_images(given):
            if model is None:
                raise ValueError("the data set has images, which some models pack; name the model")
            trl_path = images.why_not_packed(model, given, None, args)
        if trl_path:
            raise ValueError(f"{trl_path}: TRL's own code prepares it; it cannot be shown here")
        labeler = collator if isinstance(collator, DataCollatorForCompletionOnlyLM) else None
        processing_class = call.processing_class or (labeler and labeler.tokenizer)
        loaded = {
            name: rows if isinstance(rows, Dataset) else _first_rows(rows, stream_rows)
            for name, rows in sets.items()
        }
        rows = next(iter(loaded.values()))
        tokenizer = configure_tokenizer(processing_class or processing_class_of(model, args), args)
        template = _training_template(args, tokenizer, rows)
        rules = Rules.of_run(
            args,
            tokenizer,
            tokenizer_in(tokenizer),
            packing=args.packing,
            chat_template=template,
            completion_only=trains_completions(rows, args.completion_only_loss),
            generation_config=generation_config_of(model, args),
            by_trl=_refuse,
            labeler=labeler,
        )
        dataset = loaded if isinstance(given, dict) else rows
        is_stream = rows is not first
        return cls(call, args, dataset, rules, is_stream, template, images)

    @property
    def sets(self) -> dict[str, Dataset]:
        """The data sets by the names of their sources."""
        return self.dataset if isinstance(self.dataset, dict) else {"train": self.dataset}

    @property
    def num_rows(self) -> int:
        """Rows of all data sets."""
        return sum(map(len, self.sets.values()))

    def sampling(self, ranks: int = 1) -> Sampling:
        """Return what draws the micro-batches of the run on rank 0 of `ranks`."""
        # An image belongs to one document.
        groups = PackingOptions.of(self.args).prefix_sharing == "group" and not self.images.packs
        model = self.call.model
        return Sampling(
            self.args,
            self.args.packing,
            batch_size=self.args.per_device_train_batch_size,
            ranks=(ranks, 0),
            hidden_size=None if model is None else hidden_size_of(model, self.args),
            draws_groups=lambda training: groups,
            image_loads=self.images.loads,
        )

    def with_settings(self, **changes: object) -> "PreviewedRun":
        """Return the run with some of its settings changed."""
        args = copy.copy(self.args)
        for name, value in changes.items():
            setattr(args, name, value)
        return replace(self, args=args, preparation=replace(self.preparation, args=args))

    def with_row_numbers(self) -> "PreviewedRun":
        """Return the run on rows that carry their numbers in the column `ROW`."""
        ends = np.cumsum([0, *map(len, self.sets.values())])
        sets = {
            name: rows.add_column(ROW, np.arange(end, end + len(rows)))
            for end, (name, rows) in zip(ends, self.sets.items(), strict=False)
        }
        dataset = sets if isinstance(self.dataset, dict) else sets["train"]
        return replace(self, dataset=dataset).with_settings(source_column=ROW)

    def documents(self) -> tuple[Dataset, PreparationCounts | None]:
        """Return the documents of the whole data set, and the counts of what was kept and lost.

        Raises:
            ValueError: preparation refuses the data, or training their weights.
        """
        if isinstance(self.dataset, dict):
            documents, counts = prepare_sources(self.dataset, self._prepare, self.args)
        else:
            documents, counts = self._prepare(self.dataset, "train")
        options = PackingOptions.of(self.args)
        check_weights_and_sources(documents, [], options, self.call.compute_loss_func)
        return documents, counts

    def whole_documents(self) -> WholeDocuments | None:
        """Return the documents before the overflow policy; None of several data sets."""
        rows = self.dataset
        if self._skips_preparation or isinstance(rows, dict) or records_of(rows):
            return None
        rows = self.images.tokenize(rows, self.preparation, self.chat_template, "train")
        formatting = self.call.formatting_func
        whole = whole_documents(rows, self.preparation, formatting_func=formatting)
        return None if is_packed(whole.documents) else whole

    def documents_of_row(self, row: int) -> tuple[list[Mapping[str, Any]], str, list[str]]:
        """Return the documents of one row, or none and the reason, and what else happened to it.

        The first row is prepared with it, because it decides the format of all rows.
        """
        for rows in self.sets.values():
            if row < len(rows):
                break
            row -= len(rows)
        first, reason, before = self._documents_of(rows, [0], 0)
        if row == 0:
            return first, reason, list(before)
        found, reason, handled = self._documents_of(rows, [row] if reason else [0, row], row)
        if found[len(first) :] or reason:
            notes = [why for why, number in handled.items() if number > before.get(why, 0)]
            return found[len(first) :], reason, notes
        reason = self._documents_of(rows, [row], row)[1]
        return [], reason or "preparation leaves nothing of it", []

    def _documents_of(
        self, dataset: Dataset, rows: list[int], row: int
    ) -> tuple[list[Mapping[str, Any]], str, dict[str, int]]:
        """Return the documents of some rows, or the reason, on `row`, why there are none.

        The third value says how many documents preparation has changed, by what it has done.
        """
        run = self.with_settings(shuffle_dataset=False, dataset_num_proc=None)
        if IMAGE_ROW not in dataset.column_names:  # read the headers of these rows alone
            run = replace(run, images=self.images.without_files())
        shows_progress = not are_progress_bars_disabled()
        disable_progress_bars()
        name = SomeRows("inspected")
        # A row may be several documents; the first row was prepared before without an error.
        name.numbers = defaultdict(lambda: row, {0: rows[0]})
        try:
            documents, counts = run._prepare(dataset.select(rows), name)
        except (ValueError, RuntimeError) as error:
            return [], str(error).removeprefix(f"{row_name(len(rows) - 1, name)}: "), {}
        finally:
            if shows_progress:
                enable_progress_bars()
        stages = () if counts is None else counts.stages
        shown = [run._with_image_sizes(document) for document in documents]
        return shown, "", {stage.why: stage.affected for stage in stages}

    def _with_image_sizes(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a document with the sizes of the images of its row in place of its number."""
        if IMAGE_ROW not in document:
            return document
        others = {name: value for name, value in document.items() if name != IMAGE_ROW}
        return {**others, IMAGE_SIZES: self.images.store.sizes(document[IMAGE_ROW]).tolist()}

    @property
    def _skips_preparation(self) -> bool:
        return (self.args.dataset_kwargs or {}).get("skip_prepare_dataset", False)

    def _prepare(self, rows: Dataset, name: str) -> tuple[Dataset, PreparationCounts | None]:
        """Return the documents of a data set, whose columns decide whether prompts are trained."""
        if self._skips_preparation:
            if "input_ids" not in rows.column_names:
                raise ValueError("skip_prepare_dataset=True, but the rows have no input_ids")
            return rows, None
        only = trains_completions(rows, self.args.completion_only_loss)
        row_format = replace(self.preparation.row_format, completion_only=only)
        rules = replace(self.preparation, row_format=row_format)
        rows = self.images.tokenize(rows, rules, self.chat_template, name)
        return prepare(rows, rules, formatting_func=self.call.formatting_func, name=name)


def _first_rows(stream: IterableDataset, number: int) -> Dataset:
    """Return the first rows of a stream, with columns that the first of them lacks."""
    rows = list(stream.take(number))
    missing = dict.fromkeys(name for row in rows for name in row)
    return Dataset.from_list([missing | row for row in rows], features=stream.features)


def _training_template(args: Any, tokenizer: Any, rows: Dataset) -> str | None:
    """Return the chat template that TRL's trainer takes instead of the tokenizer's, or None."""
    if not args.assistant_only_loss:
        return None
    # Images need not be readable.
    texts = rows.remove_columns([name for name in IMAGE_COLUMNS if name in rows.column_names])
    first = texts[0] if texts.column_names else {}
    if not is_conversational(first):
        raise ValueError(
            "assistant_only_loss=True needs conversations in a column 'messages', as TRL reads "
            "them; set train_on='assistant' instead"
        )
    return training_template(tokenizer)


def _refuse(dataset: Any, formatting_func: Any, name: str) -> Any:
    raise ValueError("a preview runs no code of TRL")


class TracedDocuments(NamedTuple):
    """The documents of a run, what was lost, and where documents come from.

    Attributes:
        rows: the row of the user's data set that each document comes from, ``(documents,)`` int64.
        uncut: its tokens before it was cut to fit, ``(documents,)`` int64.
    """

    dataset: Dataset
    counts: PreparationCounts | None
    rows: np.ndarray
    uncut: np.ndarray


def trace_documents(run: PreviewedRun) -> TracedDocuments:
    """Return the documents of the whole data set with the rows that they come from.

    A row may be several documents, and these several pieces, so they are numbered once more.
    """
    numbered = run.with_row_numbers()
    whole = numbered.whole_documents()
    if whole is None:
        dataset, counts = numbered.documents()
        lengths = ArrowDocuments(dataset, ["input_ids"]).lengths()
        return TracedDocuments(dataset.remove_columns(ROW), counts, numbers_of(dataset), lengths)
    documents: Any = whole.documents
    rows = numbers_of(documents)
    uncut = ArrowDocuments(documents, ["input_ids"]).lengths()
    documents = documents.remove_columns(ROW).add_column(ROW, np.arange(len(rows)))
    fitted, counts = fit_documents(whole._replace(documents=documents), numbered.preparation)
    numbers = numbers_of(fitted)
    return TracedDocuments(fitted.remove_columns(ROW), counts, rows[numbers], uncut[numbers])


def numbers_of(documents: Any) -> np.ndarray:
    """Return the values of the column `ROW`, ``(documents,)`` int64."""
    return np.asarray(documents.with_format("numpy")[ROW][:], np.int64)


@dataclass(frozen=True)
class RowPreview:
    """One row of a data set as text: its documents, or the reason why none of it is trained.

    `notes` say what preparation has changed, as predicates: "longer than max_length=64: cut".
    """

    row: int
    documents: tuple[str, ...]
    tokens: tuple[Mapping[str, Any], ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts to print: one for each document, or the reason, and the notes."""
        documents = self.documents or (f"row {self.row} · not trained: {self.reason}",)
        return documents + tuple(f"row {self.row} · {note}" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: the columns of its documents, and their text."""
        documents = [
            {"text": text, **{k: np.asarray(x).tolist() for k, x in tokens.items()}}
            for text, tokens in zip(self.documents, self.tokens, strict=True)
        ]
        return {
            "row": self.row,
            "documents": documents,
            "reason": self.reason,
            "notes": list(self.notes),
        }


def preview_rows(
    run: PreviewedRun, rows: Sequence[int] | None = None, *, color: bool = False
) -> Iterator[RowPreview]:
    """Yield each of `rows` as the run would train it; None: of the first three.

    Raises:
        ValueError: a row does not exist. No row is yielded then.
    """
    number, tokenizer = run.num_rows, run.preparation.eos.tokenizer
    unit = "document" if run.preparation.row_format.makes_turns else "piece"
    rows = range(min(3, number)) if rows is None else rows
    for row in rows:
        if not 0 <= row < number:
            raise ValueError(f"row {row} is not among the {number:,} rows of the data set")
    for row in rows:
        documents, reason, notes = run.documents_of_row(row)
        texts = []
        for i, document in enumerate(documents):
            piece = f", {unit} {i + 1} of {len(documents)}" if len(documents) > 1 else ""
            texts.append(show_document(document, tokenizer, color=color, name=f"row {row}{piece}"))
        shown = escape_hidden(reason)
        yield RowPreview(row, tuple(texts), tuple(documents), shown, tuple(notes))


def preview_losses(run: PreviewedRun) -> str:
    """Return a sentence for each thing that preparing the whole data set loses."""
    _, counts = run.documents()
    counts = counts or PreparationCounts()
    lost = str(counts) or "Nothing is lost."
    return "\n".join(filter(None, [f"{run.num_rows:,} rows", counts.turns_in_words(), lost]))
