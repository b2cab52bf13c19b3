"""The data sets of a run: prepared when TRL asks for it, and checked together."""

import copy
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

from datasets import (
    IterableDataset,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from trl_packing.attention.state import temporarily
from trl_packing.config import PackingOptions
from trl_packing.data.bad_rows import check_is_dataset
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.files import records_of
from trl_packing.data.limits import ModelLimits
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
from trl_packing.data.rules import Rules
from trl_packing.data.stages import prepare
from trl_packing.run.arguments import check_weights_and_sources
from trl_packing.run.columns import columns_of
from trl_packing.run.sampling import Sampling
from trl_packing.run.sources import prepare_sources, trains_completions


@dataclass(eq=False)
class RunData:
    """Prepares the data sets of a run.

    Attributes:
        sets: of a training set that is a dictionary; None for one data set.
        tokenize_images: as `vision.run_images.RunImages.tokenize`.
        counts: what was kept and lost of each data set, by its name.
        completion_only: a user's collator, which labels the documents; None without one.
        generation_config: of the model, whose end-of-sequence tokens are read.
    """

    trainer: SFTTrainer
    options: PackingOptions
    sampling: Sampling
    sets: dict[str, Any] | None
    tokenize_images: Callable[[Any, Rules, str | None, str], Any]
    counts: dict[str, PreparationCounts] = field(default_factory=dict)
    completion_only: DataCollatorForCompletionOnlyLM | None = None
    generation_config: Any = None
    _is_later: bool = False
    _has_training_set: bool = False  # TRL's constructor prepares it before evaluation sets

    def evaluated(self) -> dict[str, Any]:
        """Return the evaluation sets by their names."""
        given = self.trainer.eval_dataset
        return given if isinstance(given, dict) else {"eval": given}

    def check_nothing_is_skipped(self, datasets: Iterable[Any]) -> None:
        """Raise ValueError for changes and checks that ``skip_prepare_dataset=True`` skips."""
        changes = self.completion_only or self.options.append_eos or self.sets
        if self.trainer._skip_prepare_dataset and (changes or any(map(records_of, datasets))):
            raise ValueError(
                "skip_prepare_dataset=True skips append_eos, DataCollatorForCompletionOnlyLM, a "
                "dictionary of data sets, and the check of prepared data; leave it out"
            )

    def pad_to_multiple_of(self) -> int | None:
        """Return the multiple to which rows are padded, also if a user's collator names it."""
        of_collator = getattr(self.completion_only, "pad_to_multiple_of", None)
        return self.trainer.args.pad_to_multiple_of or of_collator

    def check(self) -> None:
        """Raise ValueError for settings and data that cannot be trained as they are."""
        trainer = self.trainer
        train = trainer.train_dataset
        evaluated = [*self.evaluated().values()]
        self.check_nothing_is_skipped([train, *evaluated])
        pads = self.pad_to_multiple_of() or self.options.static_shapes
        if trainer.aux_loss_enabled and pads:
            raise ValueError(
                "static_shapes=True or pad_to_multiple_of would let padding take part in the "
                "balance of experts; leave them out, or set router_aux_loss_coef=0.0"
            )
        if trainer.args.world_size > 1 and not trainer.args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False weights a token by the rank that it falls on; "
                "leave it True"
            )
        check_weights_and_sources(train, evaluated, self.options, trainer.compute_loss_func)

    def check_limits(self, limits: ModelLimits) -> None:
        """Raise ValueError for evaluation sets with ids or lengths that the model cannot read."""
        for name, dataset in self.evaluated().items():
            limits.check(dataset, name)
            first = islice(dataset, 100) if isinstance(dataset, IterableDataset) else ()
            for number, document in enumerate(first):
                if "input_ids" in document:
                    limits.check_document(document, f"document {number} of the {name} dataset")

    def prepare(
        self,
        by_trl: Callable[..., Any],
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """Return the documents of a data set, or of all sources, and keep the counts.

        Arguments but the first are those of `by_trl`, TRL's `_prepare_dataset`. Of several sources,
        the first stands for all.
        """
        name = dataset_name
        if name == "train" and self._has_training_set:
            name = "evaluated train"  # an evaluation set that a user has called "train"
        self._has_training_set = True
        evaluates = name != "train"
        check_is_dataset(dataset, name)
        # TRL would cut at max_length without counting, and pack in windows of 1,000 rows.
        unlimited = copy.copy(args)
        unlimited.max_length = None
        trainer = self.trainer

        def rows_by_trl(dataset: Any, formatting_func: Any, name: str, only: bool) -> Any:
            return by_trl(dataset, processing_class, unlimited, False, formatting_func, name)

        def prepare_rows(dataset: Any, name: str) -> tuple[Any, PreparationCounts | None]:
            if name == "train" and records_of(dataset):  # TRL does not see the rows, which decide
                trainer.completion_only_loss = trains_completions(
                    dataset, args.completion_only_loss
                )
            only = trainer.completion_only_loss
            if self.sets is not None:  # TRL decides once, by the first row of the first of them
                only = trains_completions(dataset, args.completion_only_loss)
            rules = Rules.of_run(
                args,
                processing_class,
                trainer._tokenizer,
                packing=self.sampling.packing,
                chat_template=trainer.chat_template,
                completion_only=only,
                generation_config=self.generation_config,
                by_trl=rows_by_trl,
                labeler=self.completion_only,
            )
            if evaluates:  # a callback may read the prompts
                rules = replace(rules, keeps_columns=True)
            with (
                global_then_local_main_first(),  # one rank writes the cache, the others read it
                temporarily(trainer, completion_only_loss=only),  # TRL's code reads it
            ):
                rows = self.tokenize_images(dataset, rules, trainer.chat_template, name)
                return prepare(rows, rules, formatting_func=formatting_func, name=name)

        if self.sets is None or self._is_later or name != "train":
            documents, counts = prepare_rows(dataset, name)
        else:
            documents, counts = prepare_sources(self.sets, prepare_rows, args)
        if counts is not None:
            self.counts[name] = counts
        return documents

    def prepare_later(self, dataset: Any, name: str = "train") -> Any:
        """Return the documents of rows that were not passed to the constructor."""
        trainer, packing = self.trainer, self.sampling.packing
        tokenizer, formatting_func = trainer.processing_class, trainer._formatting_func
        with temporarily(self, _has_training_set=name != "train", _is_later=True):
            return trainer._prepare_dataset(
                dataset, tokenizer, trainer.args, packing, formatting_func, name
            )

    def prepare_again(self, dataset: Any) -> Any:
        """Return the documents of a training set that was set on the built trainer."""
        # Tokens without packing are trained as they are, as in TRL; bins have a capacity.
        is_tokenized = "input_ids" in columns_of(dataset) and not records_of(dataset)
        stays = is_tokenized and not self.sampling.packing
        return dataset if stays else self.prepare_later(dataset)
