"""`Run`: the arguments of a trainer, and what they decide without its model.

TrainerCall          the arguments of a trainer
    │  Run.of        the path (ours, or TRL's), the sources, what is refused
    │  with_rules    the tokenizer as TRL has set it up  →  rules
    │  prepare       rows  →  documents, and what was lost
    ▼  sampling      settings and ranks  →  bins and optimizer steps
report_of            the first epoch in words
"""

import copy
import math
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any

from datasets import Dataset
from trl.chat_template_utils import supports_tool_calling

from trl_packing.config import PackedSFTConfig, PackingOptions
from trl_packing.data.chat_template import ChatTemplate, tokenizer_in
from trl_packing.data.files import records_of
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM, ResponseTemplate
from trl_packing.data.row_format import PromptTemplate, RowFormat
from trl_packing.data.rules import Rules
from trl_packing.data.stages import Prepared, WholeDocuments, prepare, whole_documents
from trl_packing.data.stop_tokens import EosRule, generation_stop_ids, stop_token_ids
from trl_packing.documents.arrow import is_packed
from trl_packing.loss.sums import Sources, check_weights_can_be_used
from trl_packing.packing.collator import PackedCollator
from trl_packing.run.arguments import (
    check_arguments,
    generation_config_of,
    reason_for_trl_path,
    source_sets,
    take_parallelism,
)
from trl_packing.run.sources import columns_of, documents_of, prepare_sources, trains_completions
from trl_packing.vision.run_images import RunImages
from trl_packing.vision.support import has_images


@dataclass(frozen=True)
class TrainerCall:
    """The arguments of `PackedSFTTrainer` that decide how data are prepared and packed."""

    model: Any
    args: Any
    train_dataset: Any
    processing_class: Any = None
    data_collator: Any = None
    formatting_func: Any = None
    eval_dataset: Any = None
    compute_loss_func: Any = None
    compute_metrics: Any = None
    peft_config: Any = None
    quantization_config: Any = None


@dataclass(eq=False)
class Run:
    """A run without its model.

    Attributes:
        call: the arguments of the trainer.
        args: its settings, which may be changed; packing is hidden in them from TRL's constructor.
        dataset: the training set, or a dictionary of several, each a source.
        images: those of its data sets.
        trl_path: why the run takes TRL's path; None if it is packed or padding-free.
        packing: whether training documents are packed into bins, as the settings say.
        eval_packing: whether documents of evaluations are.
        labeler: a user's collator, which labels the documents; None without one.
        generation_config: of the model, whose end-of-sequence tokens are read.
        rules: by which rows become documents; None until the tokenizer is known.
        is_stream: whether `dataset` is only the beginning of a stream.
    """

    call: TrainerCall
    args: Any
    dataset: Any
    images: RunImages
    trl_path: str | None
    packing: bool
    eval_packing: bool
    labeler: DataCollatorForCompletionOnlyLM | None
    generation_config: Any
    rules: Any = None
    is_stream: bool = False

    @classmethod
    def of(cls, call: TrainerCall) -> "Run":
        """Return the run of a trainer with these arguments.

        Raises:
            TypeError: the training set is none.
            ValueError: the arguments cannot be used together.
        """
        args = call.args
        given = call.train_dataset
        collator = call.data_collator
        sets = source_sets(given, args, collator)
        first = next(iter(sets.values())) if sets else given
        images = RunImages()
        reason = reason_for_trl_path(first, collator) or take_parallelism(args)
        if reason is None and has_images(given):
            reason = images.why_not_packed(
                call.model, given, call.eval_dataset, args, call.compute_metrics
            )
        generation_config = None
        if reason is None:
            check_arguments(args, first, call.compute_loss_func)
            size = PackingOptions.of(args).sequence_parallel_size
            if size > 1 and images.packs:
                raise ValueError(
                    f"sequence_parallel_size={size} cannot divide rows with images; leave it out"
                )
            generation_config = generation_config_of(call.model, args)
        packing = getattr(args, "packing", False)
        eval_packing = getattr(args, "eval_packing", None)
        return cls(
            call,
            args,
            given if sets is None else sets,
            images,
            trl_path=reason,
            packing=packing,
            eval_packing=packing if eval_packing is None else eval_packing,
            labeler=collator if isinstance(collator, DataCollatorForCompletionOnlyLM) else None,
            generation_config=generation_config,
        )

    @property
    def options(self) -> PackingOptions:
        """The settings of this package."""
        return PackingOptions.of(self.args)

    @property
    def has_sources(self) -> bool:
        """Whether the training set is a dictionary of several."""
        return isinstance(self.dataset, dict)

    @property
    def sets(self) -> dict[str, Any]:
        """The data sets by the names of their sources."""
        return self.dataset if self.has_sources else {"train": self.dataset}

    @property
    def num_rows(self) -> int:
        """Rows of all data sets."""
        return sum(map(len, self.sets.values()))

    @property
    def pad_to_multiple_of(self) -> int | None:
        """The multiple to which rows are padded, also if a user's collator names it."""
        given = self.args.pad_to_multiple_of or getattr(self.labeler, "pad_to_multiple_of", None)
        size = self.options.sequence_parallel_size
        return given if size == 1 else math.lcm(given or 1, size)

    def tokens_of_bins(self, number: int) -> int:
        """Return the tokens of a micro-batch of full bins, padding included."""
        multiple = self.pad_to_multiple_of or 1
        return -(-self.args.max_length * number // multiple) * multiple

    @property
    def processing_class(self) -> Any:
        """The tokenizer or processor that the user passed, maybe in a collator; None without."""
        return self.call.processing_class or (self.labeler and self.labeler.tokenizer)

    def collator(self, pad_token_id: int) -> PackedCollator:
        """Return the user's collator of packed rows, or a default one."""
        given = self.call.data_collator
        if isinstance(given, PackedCollator):
            return given
        return PackedCollator(pad_token_id, pad_to_multiple_of=self.pad_to_multiple_of)

    def with_rules(
        self,
        processing_class: Any,
        *,
        chat_template: str | None,
        completion_only: bool,
        by_trl: Callable[..., Any],
        formatting_func: Any,
    ) -> "Run":
        """Return the run with the rules of a tokenizer or processor, as TRL's trainer has it.

        Args:
            processing_class: the tokenizer or processor.
            chat_template: replaces that of the tokenizer; None leaves it.
            completion_only: whether only completions of prompts are trained.
            by_trl: TRL's own preparation, as in `Rules`.
            formatting_func: the user's.
        """
        args, options = self.args, self.options
        tokenizer = tokenizer_in(processing_class)
        chat = ChatTemplate(tokenizer, chat_template)
        chat.check_numbers()
        response = options.response_template
        answers = None
        if response is not None:
            answers = ResponseTemplate(tokenizer, response, options.instruction_template)
        prompt = options.prompt_template
        calls_tools = False
        with suppress(Exception):  # a template may raise anything; rows will show it
            calls_tools = bool(tokenizer.chat_template) and supports_tool_calling(tokenizer)
        row_format = RowFormat(
            chat,
            tokenizer.eos_token,
            text_field=args.dataset_text_field,
            completion_only=completion_only,
            assistant_only=args.assistant_only_loss,
            train_on=options.train_on,
            flags_decide=options.train_on is None and isinstance(args, PackedSFTConfig),
            answers=answers,
            prompt_template=None if prompt is None else PromptTemplate.from_setting(prompt),
            trains_prompts=args.completion_only_loss is False,
            calls_tools=calls_tools,
        )
        processor = None if processing_class is tokenizer else processing_class
        template = getattr(processor, "chat_template", None)
        stop_ids = stop_token_ids(tokenizer, self.generation_config, template)
        known = stop_ids  # without a generation config, a template is right on where answers end
        if self.generation_config is not None:
            known = generation_stop_ids(tokenizer, self.generation_config)
        return replace(
            self,
            rules=Rules(
                args,
                processing_class,
                self.packing,
                keeps_columns=not self.packing,
                row_format=row_format,
                eos=EosRule(tokenizer, stop_ids, options.append_eos, known),
                by_trl=by_trl,
                labeler=self.labeler,
                formatting_func=formatting_func,
            ),
        )

    def with_settings(self, **changes: object) -> "Run":
        """Return the run with some of its settings changed."""
        args = copy.copy(self.args)
        for name, value in changes.items():
            setattr(args, name, value)
        return replace(self, args=args, rules=replace(self.rules, args=args), packing=args.packing)

    def of_source(self, rows: Any) -> "Run":
        """Return the run with the rules of one set: the columns of each source decide."""
        if not self.has_sources:
            return self
        only = trains_completions(rows, self.args.completion_only_loss)
        row_format = replace(self.rules.row_format, completion_only=only)
        return replace(self, rules=replace(self.rules, row_format=row_format))

    def prepare(self, rows: Any, name: str = "train") -> Prepared:
        """Return the documents of a data set, or of all sources, and counts of what was lost.

        Raises:
            ValueError: preparation refuses the data.
        """
        if isinstance(rows, dict):
            return prepare_sources(
                rows, lambda source, name: self.of_source(source).prepare(source, name), self.args
            )
        return prepare(self.images.tokenize(rows, self.rules, name), self.rules, name)

    def documents(self) -> Prepared:
        """Return the documents of the training set, and the counts of what was kept and lost.

        Raises:
            ValueError: preparation refuses the data, or training their weights.
        """
        self.check_nothing_is_skipped([self.dataset])
        documents, counts = self.documents_of_rows(self.dataset)
        self.check_weights_and_sources(documents, [])
        return documents, counts

    def documents_of_rows(self, rows: Any, name: str = "train") -> Prepared:
        """Return the documents of some rows, which the user's word may make them already."""
        if not self.skips_preparation:
            return self.prepare(rows, name)
        if "input_ids" not in rows.column_names:
            raise ValueError("skip_prepare_dataset=True, but the rows have no input_ids")
        return rows, None

    def whole_documents(self) -> WholeDocuments | None:
        """Return the documents before the overflow policy; None of several data sets."""
        if self.skips_preparation or self.has_sources or records_of(self.dataset):
            return None
        rows = self.images.tokenize(self.dataset, self.rules, "train")
        whole = whole_documents(rows, self.rules)
        return None if is_packed(whole.documents) else whole

    @property
    def skips_preparation(self) -> bool:
        """Whether the rows are documents by the user's word."""
        kwargs = getattr(self.args, "dataset_kwargs", None) or {}
        return kwargs.get("skip_prepare_dataset", False)

    def check_prepared(self, train: Any, evaluated: list[Any], *, balances_experts: bool) -> None:
        """Raise ValueError for settings and prepared data that cannot be trained as they are.

        With `balances_experts`, the loss holds the balance of a mixture of experts.
        """
        args = self.args
        self.check_nothing_is_skipped([train, *evaluated])
        # The padding of a divided row takes no part in it.
        pads = (self.pad_to_multiple_of or 1) > self.options.sequence_parallel_size
        if balances_experts and (pads or self.options.static_shapes):
            raise ValueError(
                "static_shapes=True or pad_to_multiple_of would let padding take part in the "
                "balance of experts; leave them out, or set router_aux_loss_coef=0.0"
            )
        if args.world_size > 1 and not args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False weights a token by the rank that it falls on; "
                "leave it True"
            )
        self.check_weights_and_sources(train, evaluated)

    def check_weights_and_sources(self, train: Any, evaluated: list[Any]) -> None:
        """Raise ValueError for weights that no loss can use, and for sources that are not there."""
        loss = self.call.compute_loss_func
        column = self.options.source_column
        for dataset in [train, *evaluated] if loss is not None else ():
            check_weights_can_be_used(loss, columns_of(dataset))
        for dataset in evaluated:
            if column is not None and dataset is not None:
                Sources.of(dataset, column)  # refuses missing ones
            if isinstance(dataset, Dataset):
                documents_of(dataset, loss)  # refuses damaged weights

    def check_nothing_is_skipped(self, datasets: Iterable[Any]) -> None:
        """Raise ValueError for changes and checks that ``skip_prepare_dataset=True`` skips."""
        changes = self.labeler or self.options.append_eos or self.has_sources
        if self.skips_preparation and (changes or any(map(records_of, datasets))):
            raise ValueError(
                "skip_prepare_dataset=True skips append_eos, DataCollatorForCompletionOnlyLM, a "
                "dictionary of data sets, and the check of prepared data; leave it out"
            )
