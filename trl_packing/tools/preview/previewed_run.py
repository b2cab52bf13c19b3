"""A run before it starts: its settings, and its data prepared exactly as the trainer does it."""

import copy
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from typing import Any

from datasets import (
    Dataset,
    IterableDataset,
    are_progress_bars_disabled,
    disable_progress_bars,
    enable_progress_bars,
)
from trl import SFTConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import is_conversational

from trl_packing.attention.backends import check_is_backend
from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.preparation import Unfitted, prepare, unfitted
from trl_packing.data.prepared import records_of
from trl_packing.data.rules import Preparation
from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW, IMAGE_SIZES
from trl_packing.formatting.responses import DataCollatorForCompletionOnlyLM
from trl_packing.tools.preview.source_rows import SourceRows
from trl_packing.tools.training_command import (
    TrainerCall,
    config_from_settings,
    config_value,
    configure_tokenizer,
    processing_class_of,
)
from trl_packing.training.arguments import (
    check_arguments,
    check_loss_options,
    check_weights_and_sources,
    generation_config_of,
    reason_for_trl_path,
)
from trl_packing.training.run_data import prepare_sources, source_sets, trains_completions
from trl_packing.vision.choice import has_images
from trl_packing.vision.run_images import RunImages

# The name of a selection of rows, in messages that `_renumber` turns into those on the data set.
_NAME = "inspected"

_BY_TRL = "TRL's own code prepares it; it cannot be shown here"


# Rows of a stream that are read, unless the user names another number.
STREAM_ROWS = 1000


@dataclass(frozen=True)
class PreviewedRun:
    """The settings of a run, and its data as the trainer would prepare them.

    Attributes:
        args: a `PackedSFTConfig`, or a plain `SFTConfig`.
        dataset: the rows; of a stream, the first ones; of a dictionary, those of all data sets.
        preparation: the rules by which rows become documents.
        model: a name or a model, if it is known.
        formatting_func: the user's function from a row to its text.
        is_stream: whether `dataset` is only the beginning of a stream.
        collator: the user's data collator; None for that of the trainer.
        chat_template: replaces that of the tokenizer, as in the trainer; None leaves it.
        images: prepares rows with images; does nothing where there are none.
        compute_loss_func: the user's loss; None for that of the trainer.
    """

    args: Any
    dataset: Any
    preparation: Preparation
    model: Any = None
    formatting_func: Any = None
    is_stream: bool = False
    collator: Any = None
    chat_template: str | None = None
    images: RunImages = field(default_factory=RunImages)
    compute_loss_func: Any = None

    @classmethod
    def from_settings(
        cls,
        dataset: Dataset,
        tokenizer: Any,
        settings: Sequence[str] = (),
        model: str | None = None,
    ) -> "PreviewedRun":
        """Return the run that `settings` describe.

        Args:
            dataset: rows in any form that the trainer takes.
            tokenizer: or a processor; it is copied.
            settings: options of `PackedSFTConfig` as on a command line,
                ``["--train_on", "assistant"]``.
            model: a name or a folder; its generation config lists the tokens that end a generation.

        Raises:
            ValueError: an option cannot be used, or TRL's code would prepare the data.
        """
        return cls.from_call(TrainerCall(model, config_from_settings(settings), dataset, tokenizer))

    @classmethod
    def from_call(cls, call: TrainerCall, *, stream_rows: int = STREAM_ROWS) -> "PreviewedRun":
        """Return the run of a trainer with these arguments.

        Args:
            call: the arguments. The tokenizer is copied.
            stream_rows: rows to read, if the data set is a stream.

        Raises:
            ValueError: the arguments cannot be used, or TRL's code would prepare the data.
        """
        args, dataset, collator = call.args, call.train_dataset, call.data_collator
        if not isinstance(args, SFTConfig):
            raise ValueError(f"args is {type(args).__name__}; only a PackedSFTConfig can be shown")
        if not isinstance(dataset, (dict, Dataset, IterableDataset)):
            raise ValueError(f"train_dataset is {type(dataset).__name__}, which cannot be shown")
        sets = source_sets(dataset, args, collator)
        first = next(iter(sets.values())) if sets else dataset
        is_stream = isinstance(first, IterableDataset)
        check_arguments(args, first)
        check_is_backend(PackingOptions.of(args).attention)
        check_loss_options(PackingOptions.of(args), call.compute_loss_func, None)
        images = RunImages()
        trl_path = reason_for_trl_path(first, collator, packs_images=True)
        if not trl_path and has_images(dataset):
            if call.model is None:
                raise ValueError("the data set has images, which some models pack; name the model")
            trl_path = images.why_not_packed(call.model, dataset, None, args, call.processing_class)
        if trl_path:
            raise ValueError(f"{trl_path}: {_BY_TRL}")
        images.check_options(PackingOptions.of(args))
        processing_class, labeler = call.processing_class, None
        if isinstance(collator, DataCollatorForCompletionOnlyLM):
            processing_class, labeler = processing_class or collator.tokenizer, collator.labeler
        if processing_class is None:
            processing_class = processing_class_of(call.model, args)
        generation_config = None if call.model is None else generation_config_of(call.model, args)
        if sets:
            sets = {name: _loaded(rows, stream_rows) for name, rows in sets.items()}
            rows: Any = SourceRows(sets)
            first = next(iter(sets.values()))
        else:
            rows = first = _loaded(dataset, stream_rows)
        tokenizer = configure_tokenizer(processing_class, args)
        first = _first_row(first)
        template = _training_template(args, tokenizer, first)
        completion_only = args.completion_only_loss
        if completion_only is None:
            completion_only = "prompt" in first and "completion" in first
        rules = Preparation.of_run(
            args,
            tokenizer,
            getattr(tokenizer, "tokenizer", tokenizer),
            packing=args.packing,
            chat_template=template,
            completion_only=completion_only,
            generation_config=generation_config,
            by_trl=_refuse,
            labeler=labeler,
        )
        return cls(
            args,
            rows,
            rules,
            call.model,
            call.formatting_func,
            is_stream,
            collator,
            template,
            images,
            call.compute_loss_func,
        )

    @property
    def hidden_size(self) -> int | None:
        """Hidden size of the model, which the balance of ranks depends on; None if unknown."""
        return None if self.model is None else config_value(self.model, self.args, "hidden_size")

    @property
    def max_positions(self) -> int | None:
        """Positions of a document that the model's config names; None if unknown."""
        if self.model is None:
            return None
        return config_value(self.model, self.args, "max_position_embeddings")

    def with_all_images(self) -> "PreviewedRun":
        """Return the run after the headers of all of its images are read, once for many calls.

        Raises:
            ValueError: an image cannot be read, naming the row.
        """
        rows = self.dataset
        if isinstance(rows, SourceRows):
            return replace(self, dataset=SourceRows(self.images.take(rows.datasets, "train")))
        return replace(self, dataset=self.images.take(rows, "train"))

    def documents(self) -> tuple[Dataset, PreparationCounts | None]:
        """Return the documents of the whole data set, and the counts of what was kept and lost.

        Raises:
            ValueError: preparation refuses the data, or training their weights.
        """
        documents, counts = self._prepare(self.dataset, self.preparation, "train")
        options = PackingOptions.of(self.args)
        check_weights_and_sources(documents, [], options, self.compute_loss_func)
        return documents, counts

    def unfitted(self) -> Unfitted | None:
        """Return the documents before the overflow policy.

        None if the rows stay as they are, and for several data sets, which are prepared one by one.
        """
        if self._skips_preparation or isinstance(self.dataset, SourceRows):
            return None
        if records_of(self.dataset):
            return None
        rows = self._with_tokens_of_images(self.dataset, self.preparation, "train")
        whole = unfitted(rows, self.preparation, formatting_func=self.formatting_func)
        return None if whole.rows.are_packed else whole

    def documents_of_row(self, row: int) -> tuple[list[Mapping[str, Any]], str]:
        """Return the documents of one row and "", or no documents and the reason.

        The first row is prepared together with it, because the first row decides the format of all
        rows, and whether the flags of messages decide what is trained.
        """
        if isinstance(self.dataset, SourceRows):
            source, number = self.dataset.locate(row)
            return self.of_source(source).documents_of_row(number)
        first, reason = self._documents_of_row_alone(0)
        if row == 0:
            return first, reason
        if reason:
            return self._documents_of_row_alone(row)
        try:
            documents = self._documents_of_rows([0, row])[len(first) :]
        except (ValueError, RuntimeError) as error:
            return [], _renumber(str(error), [0, row], row)
        if documents:
            return documents, ""
        return [], self._documents_of_row_alone(row)[1] or "preparation leaves nothing of it"

    def _documents_of_row_alone(self, row: int) -> tuple[list[Mapping[str, Any]], str]:
        try:
            return self._documents_of_rows([row]), ""
        except (ValueError, RuntimeError) as error:
            return [], _renumber(str(error), [row], row)

    def _documents_of_rows(self, rows: list[int]) -> list[Mapping[str, Any]]:
        in_order = copy.copy(self.args)
        in_order.shuffle_dataset = False
        in_order.dataset_num_proc = None
        preparation = replace(self.preparation, args=in_order)
        run = self
        if IMAGE_ROW not in self.dataset.column_names:  # read the headers of these rows alone
            run = replace(self, images=self.images.without_files())
        with _without_progress_bars():
            documents, _ = run._prepare(run.dataset.select(rows), preparation, _NAME)
        return [run._with_image_sizes(document) for document in documents]

    def _with_image_sizes(self, document: Mapping[str, Any]) -> Mapping[str, Any]:
        """Return a document with the sizes of the images of its row in place of its number."""
        if IMAGE_ROW not in document:
            return document
        others = {name: value for name, value in document.items() if name != IMAGE_ROW}
        return {**others, IMAGE_SIZES: self.images.store.sizes(document[IMAGE_ROW]).tolist()}

    @property
    def _skips_preparation(self) -> bool:
        return (self.args.dataset_kwargs or {}).get("skip_prepare_dataset", False)

    def of_source(self, source: str) -> "PreviewedRun":
        """Return the run of one of several data sets, which is prepared as among the others."""
        dataset = self.dataset.datasets[source]
        return replace(self, dataset=dataset, preparation=self._rules(dataset, self.preparation))

    def _rules(self, dataset: Dataset, rules: Preparation) -> Preparation:
        only = trains_completions(dataset, self.args.completion_only_loss)
        return replace(rules, row_format=replace(rules.row_format, completion_only=only))

    def _prepare(
        self, dataset: Any, preparation: Preparation, name: str
    ) -> tuple[Dataset, PreparationCounts | None]:
        if isinstance(dataset, SourceRows):
            return prepare_sources(
                dataset.datasets,
                lambda rows, name: self._prepare(rows, self._rules(rows, preparation), name),
                self.args,
            )
        if not self._skips_preparation:
            rows = self._with_tokens_of_images(dataset, preparation, name)
            return prepare(rows, preparation, formatting_func=self.formatting_func, name=name)
        if "input_ids" not in dataset.column_names:
            raise ValueError(
                "skip_prepare_dataset=True takes rows as they are, and these have no input_ids: "
                f"they have {dataset.column_names}; leave it out"
            )
        return dataset, None

    def _with_tokens_of_images(self, dataset: Dataset, preparation: Preparation, name: str) -> Any:
        """Return the documents of rows with images; other rows as they are."""
        documents = self.images.tokenize(dataset, preparation, self.chat_template, name)
        if self.images.contradiction is not None:
            raise ValueError(f"{self.images.contradiction}: {_BY_TRL}")
        return documents


def _loaded(dataset: Dataset | IterableDataset, stream_rows: int) -> Dataset:
    """Return a data set as it is, and the first rows of a stream."""
    if isinstance(dataset, Dataset):
        return dataset
    return Dataset.from_list(list(dataset.take(stream_rows)), features=dataset.features)


def _first_row(rows: Dataset) -> dict[str, Any]:
    """Return the first row without its images, which need not be readable."""
    images = [column for column in IMAGE_COLUMNS if column in rows.column_names]
    texts = rows.remove_columns(images)
    return texts[0] if texts.column_names else {}


def _training_template(args: Any, tokenizer: Any, first: dict[str, Any]) -> str | None:
    """Return the chat template that TRL's trainer takes instead of the tokenizer's, or None."""
    if not args.assistant_only_loss:
        return None
    if not is_conversational(first):
        raise ValueError(
            "assistant_only_loss=True needs conversations in a column 'messages', as TRL reads "
            f"them, but the columns are {sorted(first)}; set train_on='assistant' instead"
        )
    if has_generation_markers(tokenizer.chat_template):
        return None
    return get_training_chat_template(tokenizer)


def _refuse(dataset: Any, formatting_func: Any, name: str) -> Any:
    raise ValueError("TRL's own code prepares data for this tokenizer; it cannot be shown here")


@contextmanager
def _without_progress_bars() -> Iterator[None]:
    """Show no progress inside the block, which prepares a row or two."""
    shows = not are_progress_bars_disabled()
    disable_progress_bars()
    try:
        yield
    finally:
        if shows:
            enable_progress_bars()


def _renumber(message: str, rows: Sequence[int], row: int) -> str:
    """Return a message about the selection `rows` as one about `row` of the data set."""
    message = re.sub(
        rf"\b(row|document) (\d+) of the {_NAME} dataset",
        lambda found: f"{found[1]} {rows[int(found[2])]} of the data set",
        message,
    ).replace(f"the {_NAME} dataset", "the data set")
    return message.removeprefix(f"row {row} of the data set: ")
