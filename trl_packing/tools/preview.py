"""A run before it starts: its settings, its rows as text, its data prepared as by the trainer.

    a row          →  documents, by the trainer's code
    all rows       →  documents and counts                              →  what preparation loses
    all documents  →  the trainer's sampler                             →  bins and optimizer steps

The rows of a `train_dataset` that is a dictionary are numbered as one.
"""

from collections import defaultdict
from collections.abc import Iterator, Sequence
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
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.printable import escape_hidden
from trl_packing.data.stages import fit_documents
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import (
    IMAGE_COLUMNS,
    IMAGE_ROW,
    IMAGE_SIZES,
    Document,
    SomeRows,
    row_name,
)
from trl_packing.pages.show import show_document
from trl_packing.run.arguments import training_template
from trl_packing.run.run import Run, TrainerCall
from trl_packing.run.sources import trains_completions
from trl_packing.tools.training_command import (
    config_from_settings,
    configure_tokenizer,
    processing_class_of,
)
from trl_packing.vision.support import has_images

# Preparation carries one column along for every document, the `source_column` of evaluation sets:
# this one, which holds the number of its row.
ROW = "trl_packing_row"


def run_of_settings(
    dataset: Dataset, tokenizer: Any, settings: Sequence[str] = (), model: str | None = None
) -> Run:
    """Return the run of rows that `settings` describe: ``["--train_on", "assistant"]``.

    The tokenizer, or processor, is copied. The generation config of `model`, a name, lists the
    tokens that end a generation. Raises ValueError as `run_of_call`.
    """
    return run_of_call(TrainerCall(model, config_from_settings(settings), dataset, tokenizer))


def run_of_call(call: TrainerCall, *, stream_rows: int = 1000) -> Run:
    """Return the run of a trainer with these arguments, which reads `stream_rows` of a stream.

    Raises:
        ValueError: the arguments cannot be used, or TRL's code would prepare the data.
    """
    args, given = call.args, call.train_dataset
    sets_of_rows = (dict, Dataset, IterableDataset)
    if not isinstance(args, SFTConfig) or not isinstance(given, sets_of_rows):
        raise ValueError("only a run with args and a train_dataset of datasets can be shown")
    if call.model is None and has_images(given):
        raise ValueError("the data set has images, which some models pack; name the model")
    run = Run.of(call)
    if run.trl_path:
        raise ValueError(f"{run.trl_path}: TRL's own code prepares it; it cannot be shown here")
    check_is_backend(run.options.attention)
    loaded = {}
    for name, rows in run.sets.items():
        loaded[name] = rows
        if not isinstance(rows, Dataset):  # a stream may have columns that its first row lacks
            taken = list(rows.take(stream_rows))
            missing = dict.fromkeys(column for row in taken for column in row)
            full = [missing | row for row in taken]
            loaded[name] = Dataset.from_list(full, features=rows.features)
    first = next(iter(loaded.values()))
    is_stream = first is not next(iter(run.sets.values()))
    tokenizer = run.processing_class or processing_class_of(call.model, args)
    tokenizer = configure_tokenizer(tokenizer, args)
    run = replace(run, dataset=loaded if run.has_sources else first, is_stream=is_stream)
    return run.with_rules(
        tokenizer,
        chat_template=_training_template(args, tokenizer, first),
        completion_only=trains_completions(first, args.completion_only_loss),
        by_trl=_refuse,
        formatting_func=call.formatting_func,
    )


def with_row_numbers(run: Run) -> Run:
    """Return `run` on rows that carry their numbers in the column `ROW`."""
    ends = np.cumsum([0, *map(len, run.sets.values())])
    sets = {
        name: rows.add_column(ROW, np.arange(end, end + len(rows)))
        for end, (name, rows) in zip(ends, run.sets.items(), strict=False)
    }
    dataset = sets if run.has_sources else sets["train"]
    return replace(run, dataset=dataset).with_settings(source_column=ROW)


def documents_of_row(run: Run, row: int) -> tuple[list[Document], str, list[str]]:
    """Return the documents of one row, or none and the reason, and what else happened to it.

    The first row is prepared with it, because it decides the format of all rows.
    """
    for rows in run.sets.values():
        if row < len(rows):
            break
        row -= len(rows)
    run = run.of_source(rows).with_settings(shuffle_dataset=False, dataset_num_proc=None)
    first, reason, before = _documents_of_rows(run, rows, [0], 0)
    if row == 0:
        return first, reason, list(before)
    found, reason, handled = _documents_of_rows(run, rows, [row] if reason else [0, row], row)
    if found[len(first) :] or reason:
        notes = [why for why, number in handled.items() if number > before.get(why, 0)]
        return found[len(first) :], reason, notes
    reason = _documents_of_rows(run, rows, [row], row)[1]
    return [], reason or "preparation leaves nothing of it", []


def _documents_of_rows(
    run: Run, dataset: Dataset, rows: list[int], row: int
) -> tuple[list[Document], str, dict[str, int]]:
    """Return the documents of some rows, or the reason, on `row`, why there are none.

    The third value says how many documents preparation has changed, by what it has done.
    """
    if IMAGE_ROW not in dataset.column_names:  # read the headers of these rows alone
        run = replace(run, images=run.images.without_files())
    shows_progress = not are_progress_bars_disabled()
    disable_progress_bars()
    name = SomeRows("inspected")
    # A row may be several documents; the first row was prepared before without an error.
    name.numbers = defaultdict(lambda: row, {0: rows[0]})
    try:
        documents, counts = run.documents_of_rows(dataset.select(rows), name)
    except (ValueError, RuntimeError) as error:
        return [], str(error).removeprefix(f"{row_name(len(rows) - 1, name)}: "), {}
    finally:
        if shows_progress:
            enable_progress_bars()
    stages = () if counts is None else counts.stages
    shown = [dict(document) for document in documents]
    for document in shown:
        if IMAGE_ROW in document:
            sizes = run.images.store.sizes(document.pop(IMAGE_ROW))
            document[IMAGE_SIZES] = sizes.tolist()
    return [*shown], "", {stage.why: stage.affected for stage in stages}


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


def _refuse(*arguments: Any) -> Any:
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


def trace_documents(run: Run) -> TracedDocuments:
    """Return the documents of the whole data set with the rows that they come from.

    A row may be several documents, and these several pieces, so they are numbered once more.
    """
    numbered = with_row_numbers(run)
    whole = numbered.whole_documents()
    if whole is None:
        dataset, counts = numbered.documents()
        lengths = ArrowDocuments(dataset, ["input_ids"]).lengths()
        return TracedDocuments(dataset.remove_columns(ROW), counts, numbers_of(dataset), lengths)
    documents: Any = whole.documents
    rows = numbers_of(documents)
    uncut = ArrowDocuments(documents, ["input_ids"]).lengths()
    documents = documents.remove_columns(ROW).add_column(ROW, np.arange(len(rows)))
    fitted, counts = fit_documents(whole._replace(documents=documents), numbered.rules)
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
    tokens: tuple[Document, ...] = ()
    reason: str = ""
    notes: tuple[str, ...] = ()

    @property
    def texts(self) -> tuple[str, ...]:
        """Return the texts to print: one for each document, or the reason, and the notes."""
        documents = self.documents or (f"row {self.row} · not trained: {self.reason}",)
        return documents + tuple(f"row {self.row} · {note}" for note in self.notes)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: the columns of its documents, and their text."""
        documents = []
        for text, tokens in zip(self.documents, self.tokens, strict=True):
            values = {name: np.asarray(column).tolist() for name, column in tokens.items()}
            documents.append({"text": text} | values)
        return {
            "row": self.row,
            "documents": documents,
            "reason": self.reason,
            "notes": list(self.notes),
        }


def preview_rows(
    run: Run, rows: Sequence[int] | None = None, *, color: bool = False
) -> Iterator[RowPreview]:
    """Yield each of `rows` as the run would train it; None: of the first three.

    Raises:
        ValueError: a row does not exist. No row is yielded then.
    """
    number, tokenizer = run.num_rows, run.rules.eos.tokenizer
    unit = "document" if run.rules.row_format.makes_turns else "piece"
    rows = range(min(3, number)) if rows is None else rows
    for row in rows:
        if not 0 <= row < number:
            raise ValueError(f"row {row} is not among the {number:,} rows of the data set")
    for row in rows:
        documents, reason, notes = documents_of_row(run, row)
        texts = []
        for i, document in enumerate(documents):
            piece = f", {unit} {i + 1} of {len(documents)}" if len(documents) > 1 else ""
            texts.append(show_document(document, tokenizer, color=color, name=f"row {row}{piece}"))
        shown = escape_hidden(reason)
        yield RowPreview(row, tuple(texts), tuple(documents), shown, tuple(notes))


def preview_losses(run: Run) -> str:
    """Return a sentence for each thing that preparing the whole data set loses."""
    _, counts = run.documents()
    counts = counts or PreparationCounts()
    lost = str(counts) or "Nothing is lost."
    return "\n".join(filter(None, [f"{run.num_rows:,} rows", counts.turns_in_words(), lost]))
