"""A user's data set → documents that fit, the whole way; what was lost is counted.

dataset        rows of any form, or tokenized, or packed
    │  tokens, labels      ours, or TRL's for a processor          (documents_from_rows)
    │  response template   found in rows that were tokenized before    (label_responses)
    │  stop tokens         appended if asked for, else counted             (stop_tokens)
    │  overflow            cut, split or dropped, every loss counted          (overflow)
    ▼
documents      each ≤ max_length, each with something to train
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Any, TypeAlias

import numpy as np
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts, fit_and_count
from trl_packing.data.dataset import (
    check_columns,
    check_eos,
    check_not_empty,
    check_rows,
    empty_completions,
)
from trl_packing.data.eos import append_eos, documents_without_eos, eos_appender, stop_token_ids
from trl_packing.data.overflow import Overflow
from trl_packing.data.stream import fit_stream
from trl_packing.data.unpadding import cut_padding
from trl_packing.documents.arrow import TOKEN_COLUMNS, ArrowDocuments, is_packed, token_columns_of
from trl_packing.documents.labels import DOCUMENT_WEIGHT, MASK_COLUMNS, document_columns_of
from trl_packing.documents.weight_columns import document_weights_from_rows
from trl_packing.formatting.label_responses import ResponseLabeler, label_documents
from trl_packing.formatting.response_template import ResponseTemplate
from trl_packing.formatting.row_format import (
    RowFormat,
    format_per_example,
    has_flags,
    says_what_is_trained,
)
from trl_packing.formatting.tokenize_rows import can_prepare, documents_from_rows, label_tokenized

logger = get_logger(__name__)

AnyDataset: TypeAlias = Dataset | IterableDataset


@dataclass(frozen=True)
class Preparation:
    """How the data sets of one run become documents.

    args: TRL's config, or ours.
    processing_class, tokenizer: the same, unless it is a processor.
    chat_template, completion_only: what TRL has made of `args` and the training set.
    by_trl: TRL's own preparation, of (dataset, formatting_func, name), nothing cut or packed.
    labeler: finds the trained tokens by the template of a completion-only collator.
    """

    args: SFTConfig
    processing_class: Any
    tokenizer: Any
    packing: bool
    chat_template: str | None
    completion_only: bool
    generation_config: Any
    by_trl: Callable[[AnyDataset, Any, str], AnyDataset]
    labeler: ResponseLabeler | None = None

    def documents(
        self, dataset: AnyDataset, formatting_func: Any, name: str
    ) -> tuple[AnyDataset, PreparationCounts | None]:
        """Return the documents of `dataset`, and what became of its tokens.

        None for a stream, which is counted as it is read (`stream_overflow.take_counts`).

        Raises ValueError, in one sentence, for what cannot be prepared.
        """
        check_not_empty(dataset, name)
        self._check_columns(dataset, formatting_func, name)
        empty = self._empty_completions(dataset, formatting_func, name)
        dataset, padding = self._unpadded(dataset, name)
        documents, not_found = self._tokenized(dataset, formatting_func, name), None
        labeler = self.labeler or self._template_of_tokens(dataset, name)
        if labeler is not None:
            documents, not_found = label_documents(
                documents, labeler, num_proc=self.args.dataset_num_proc, name=name
            )
        elif self.options.response_template is not None:
            not_found = self._not_found(documents, name)
        is_text = formatting_func is None and self._is_running_text(dataset)
        fitted, counts = self._fitted(documents, name, running_text=is_text)
        for note in filter(None, (empty, padding, not_found)):
            logger.warning(note)
            counts = counts and counts.with_note(note)
        return fitted, counts

    @property
    def options(self) -> PackingOptions:
        return PackingOptions.of(self.args)

    # --- tokens and labels ------------------------------------------------------------------------

    def _check_columns(self, dataset: AnyDataset, formatting_func: Any, name: str) -> None:
        if formatting_func is None and self.options.prompt_template is None:
            check_columns(dataset, name, self.args.dataset_text_field)
        if isinstance(dataset, Dataset) and DOCUMENT_WEIGHT in dataset.column_names:
            document_weights_from_rows(dataset, f"the {name} dataset")  # names the user's row

    def _unpadded(self, dataset: AnyDataset, name: str) -> tuple[AnyDataset, str | None]:
        if "input_ids" not in get_dataset_column_names(dataset):
            return dataset, None
        return cut_padding(dataset, num_proc=self.args.dataset_num_proc, name=name)

    def _empty_completions(
        self, dataset: AnyDataset, formatting_func: Any, name: str
    ) -> str | None:
        if formatting_func is not None or "input_ids" in get_dataset_column_names(dataset):
            return None
        has_template = self.options.prompt_template is not None
        column = self.options.response_field if has_template else "completion"
        return empty_completions(dataset, column, name)

    def _tokenized(self, dataset: AnyDataset, formatting_func: Any, name: str) -> AnyDataset:
        """Return documents with `input_ids` and `labels`, of any length."""
        args = self.args
        formatting_func = format_per_example(formatting_func, dataset)
        if "input_ids" in get_dataset_column_names(dataset):
            if formatting_func is not None:
                logger.warning(f"the {name} dataset has input_ids: formatting_func is ignored")
            documents = label_tokenized(
                dataset,
                completion_only=self.completion_only,
                num_proc=args.dataset_num_proc,
                name=name,
            )
        elif not can_prepare(self.processing_class):
            self._check_options_of_trl(name)
            check_eos(dataset, self.tokenizer, name)
            return self.by_trl(dataset, formatting_func, name)
        else:
            first = next(iter(dataset))  # once: a stream would be asked again each time
            row_format = RowFormat.from_args(
                args,
                self.processing_class,
                first,
                chat_template=self.chat_template,
                completion_only=self.completion_only,
                formatting_func=formatting_func,
                flagged=has_flags(dataset, first),
            )
            self._warn_of_tools(first, row_format, name)
            if row_format.train_on != self.options.train_on and not says_what_is_trained(first):
                logger.warning(
                    f"messages of the {name} dataset have 'train' or 'weight', null in its first "
                    "row: the assistant's turns are trained, and others as they say; set train_on "
                    "to train something else"
                )
            documents = documents_from_rows(
                dataset,
                row_format,
                keeps_columns=not self.packing,
                document_columns=self._document_columns(dataset),
                num_proc=args.dataset_num_proc,
                name=name,
            )
        if args.shuffle_dataset and not self._shuffles_what_fits(documents):
            return documents.shuffle(seed=args.seed)
        return documents

    def _shuffles_what_fits(self, documents: AnyDataset) -> bool:
        """Return whether documents are shuffled after those that are dropped, as TRL does."""
        packed = is_packed(documents)
        # Without a capacity TRL drops nothing, so the function that fits a stream has no like
        # there; and `datasets` shuffles what a function returns in another order than tables.
        if isinstance(documents, IterableDataset) and self.args.max_length is None:
            return False
        return not self.packing and not packed

    def _shuffled(self, fitted: AnyDataset) -> AnyDataset:
        """Return what fits, shuffled if the config asks for it and that is when TRL does it."""
        if not self.args.shuffle_dataset or not self._shuffles_what_fits(fitted):
            return fitted
        return fitted.shuffle(seed=self.args.seed)

    def _document_columns(self, dataset: AnyDataset) -> list[str]:
        columns = get_dataset_column_names(dataset)
        return document_columns_of(columns, self.options.source_column)

    def _warn_of_tools(self, first: Mapping[str, Any], row_format: RowFormat, name: str) -> None:
        if first.get("tools") and row_format.chat.exists and not row_format.calls_tools:
            logger.warning(
                f"the {name} dataset has tools, but the chat template renders no tool calls: the "
                "model will not read which tools there are (calls in ShareGPT's form are trained "
                "as the text that they are); use a chat template with tools"
            )

    def _check_options_of_trl(self, name: str) -> None:
        """Raise ValueError for settings that TRL's preparation does not have."""
        for setting in ("train_on", "response_template", "prompt_template"):
            value = getattr(self.options, setting)
            if value is not None:
                raise ValueError(
                    f"{setting}={value!r} cannot be used on the {name} dataset: "
                    f"{type(self.processing_class).__name__} renders or tokenizes in a way of its "
                    "own, so TRL's code prepares it; leave it out, or pass a plain tokenizer"
                )

    def _not_found(self, documents: AnyDataset, name: str) -> str | None:
        """Return a sentence on documents without the response template, if there are any.

        Raises ValueError if none has it.
        """
        if isinstance(documents, IterableDataset):
            return None
        trained = ArrowDocuments(documents, TOKEN_COLUMNS).num_trained()
        not_found = np.flatnonzero(trained == 0)
        if not len(not_found):
            return None
        options = self.options
        templates = ResponseTemplate.from_settings(
            self.tokenizer, options.response_template, options.instruction_template
        )
        ids = np.asarray(documents[int(not_found[0])]["input_ids"])
        words = templates.not_found(len(not_found), len(trained), ids)
        if len(not_found) == len(trained):
            raise ValueError(f"no document of the {name} dataset has a trained token left: {words}")
        return f"{name} dataset: {words}"

    def _template_of_tokens(self, dataset: AnyDataset, name: str) -> ResponseLabeler | None:
        """Return what labels a data set that was tokenized before by the response template."""
        options, columns = self.options, get_dataset_column_names(dataset)
        if options.response_template is None or "input_ids" not in columns:
            return None
        for column in ("labels", *MASK_COLUMNS):
            if column in columns:
                raise ValueError(
                    f"the {name} dataset has {column!r} and response_template="
                    f"{options.response_template!r} is set: both say what is trained; remove one"
                )
        return ResponseLabeler(
            ResponseTemplate.from_settings(
                self.tokenizer, options.response_template, options.instruction_template
            )
        )

    # --- what fits --------------------------------------------------------------------------------

    def _is_running_text(self, dataset: AnyDataset) -> bool:
        columns = set(get_dataset_column_names(dataset))
        has_template = self.options.prompt_template or self.options.response_template
        return not has_template and not columns & {"prompt", "messages", "conversations"}

    def _fitted(
        self, documents: AnyDataset, name: str, *, running_text: bool
    ) -> tuple[AnyDataset, PreparationCounts | None]:
        args, appends = self.args, self.options.append_eos
        overflow = replace(Overflow.from_args(args, self.packing), running_text=running_text)
        stops = self._stop_ids()
        if is_packed(documents):
            check_rows(documents, args.max_length, name, append_eos=appends)
            return documents, None
        if isinstance(documents, IterableDataset):
            before = eos_appender(self.tokenizer, stops) if appends else None
            note = partial(_note_of_ends, tokenizer=self.tokenizer, stops=stops, appends=appends)
            fitted = fit_stream(documents, overflow, before=before, stop_ids=stops, note=note)
            return self._shuffled(fitted), None
        if self.packing:
            tokens = token_columns_of(documents.column_names)
            documents = documents.select_columns([*tokens, *self._document_columns(documents)])
        num_proc = args.dataset_num_proc
        if appends:
            documents = append_eos(documents, self.tokenizer, stops, num_proc=num_proc, name=name)
        fitted, counts = fit_and_count(
            documents, overflow, stop_ids=stops, num_proc=num_proc, name=name
        )
        fitted = self._shuffled(fitted)
        without_stop = documents_without_eos(documents, self.tokenizer, stops)
        if without_stop is not None:
            logger.warning(f"{name} dataset: {without_stop.warning(appends)}")
            counts = counts.with_note(without_stop.note(appends))
        return fitted, counts

    def _stop_ids(self) -> frozenset[int]:
        own = self.processing_class is self.tokenizer  # a processor has a template of its own
        template = None if own else getattr(self.processing_class, "chat_template", None)
        return stop_token_ids(self.tokenizer, self.generation_config, template)


def _note_of_ends(
    documents: Dataset, tokenizer: Any, stops: frozenset[int], appends: bool
) -> str | None:
    without_stop = documents_without_eos(documents, tokenizer, stops)
    if without_stop is None:
        return None
    return f"of the documents read first, {without_stop.note(appends)}"
