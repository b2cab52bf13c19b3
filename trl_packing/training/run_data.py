"""The data sets of a run: prepared when TRL asks for it, and checked together.

TRL's constructor     trainer._prepare_dataset    prepare          rows → documents, counts
a data set set later  train, predict              prepare_later    the same
"""

import copy
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any

from datasets import IterableDataset
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from trl_packing.attention.state import temporarily
from trl_packing.config import PackingOptions
from trl_packing.data.checks import check_is_dataset
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.model_limits import ModelLimits
from trl_packing.data.preparation import prepare
from trl_packing.data.prepared import records_of
from trl_packing.data.rules import Preparation
from trl_packing.formatting.completion_only_collator import DataCollatorForCompletionOnlyLM
from trl_packing.training.arguments import (
    check_nothing_is_skipped,
    check_nothing_is_weighted,
    check_parallelism,
    check_weights_and_sources,
)
from trl_packing.training.columns import columns_of
from trl_packing.training.sampling import Sampling
from trl_packing.training.source_sets import SourceSets, prepare_sources, trains_completions


class RunData:
    """Prepares the data sets of a run.

    Args:
        trainer: its data sets, tokenizer, template and settings are read.
        options: settings of packing.
        sampling: knows whether documents are packed.
        sets: of a training set that is a dictionary; None for one data set.
        tokenize_images: returns the documents of rows with images, and any other rows as they are;
            as `vision.run_images.RunImages.tokenize`.

    Attributes:
        counts: what was kept and lost of each data set, by its name.
        completion_only: a user's collator, which labels the documents; None without one.
        generation_config: of the model, whose end-of-sequence tokens are read.
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        options: PackingOptions,
        sampling: Sampling,
        sets: SourceSets | None,
        tokenize_images: Callable[[Any, Preparation, str | None, str], Any],
    ):
        self.trainer = trainer
        self.options = options
        self.sampling = sampling
        self.sets = sets
        self.tokenize_images = tokenize_images
        self.counts: dict[str, PreparationCounts] = {}
        self.completion_only: DataCollatorForCompletionOnlyLM | None = None
        self.generation_config: Any = None
        self._is_later = False
        self._has_training_set = False  # TRL's constructor prepares it before evaluation sets

    # --- the data sets of the trainer ---------------------------------------------------------

    def evaluated(self) -> dict[str, Any]:
        """Return the evaluation sets by their names."""
        given = self.trainer.eval_dataset
        return given if isinstance(given, dict) else {"eval": given}

    def all(self) -> list[Any]:
        """Return the training set, then the evaluation sets."""
        return [self.trainer.train_dataset, *self.evaluated().values()]

    def check_nothing_is_skipped(self, datasets: Iterable[Any]) -> None:
        """Raise ValueError for changes and checks that ``skip_prepare_dataset=True`` skips."""
        check_nothing_is_skipped(self.options, self.completion_only, datasets)

    def check_limits(self, limits: ModelLimits) -> None:
        """Raise ValueError for evaluation sets with ids or lengths that the model cannot read."""
        for name, dataset in self.evaluated().items():
            limits.check(dataset, name)
            if isinstance(dataset, IterableDataset):
                limits.check_first(dataset, name)

    def packing_requested(self) -> bool:
        """Return whether packed or padding-free rows were requested."""
        packs = self.sampling.packing or self.sampling.eval_packing
        return packs or self.trainer.args.padding_free

    def pad_to_multiple_of(self) -> int | None:
        """Return the multiple to which rows are padded, also if a user's collator names it."""
        of_collator = getattr(self.completion_only, "pad_to_multiple_of", None)
        return self.trainer.args.pad_to_multiple_of or of_collator

    def check(self, *, shards_sequences: bool) -> None:
        """Raise ValueError for settings and data that cannot be trained as they are.

        Args:
            shards_sequences: whether context or sequence parallelism cuts rows.
        """
        trainer, options = self.trainer, self.options
        check_parallelism(
            trainer.args,
            options,
            packs=self.packing_requested(),
            shards_sequences=shards_sequences,
            balances_experts=trainer.aux_loss_enabled,
            pad_to_multiple_of=self.pad_to_multiple_of(),
        )
        if shards_sequences:
            check_nothing_is_weighted(self.all(), options)
        check_weights_and_sources(
            trainer.train_dataset, [*self.evaluated().values()], options, trainer.compute_loss_func
        )

    # --- preparation --------------------------------------------------------------------------

    def prepare(
        self,
        by_trl: Callable[..., Any],
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        formatting_func: Any,
        name: str,
    ) -> Any:
        """Return the documents of a data set, or of all sources, and keep the counts.

        Args:
            by_trl: TRL's `_prepare_dataset`, whose arguments the others are.
            dataset: the user's rows; the first source stands for all of them.
            processing_class: tokenizer or processor.
            args: settings of the run.
            formatting_func: the user's function from a row to its text.
            name: of the data set.
        """
        name = self._name_of_set(name)
        check_is_dataset(dataset, name)
        prepare_rows = partial(self._prepare_rows, by_trl, processing_class, args, formatting_func)
        sets = self.sets if name == "train" and not self._is_later else None
        documents, counts = prepare_sources(sets, prepare_rows, args, dataset, name)
        if counts is not None:
            self.counts[name] = counts
        return documents

    def prepare_later(self, dataset: Any, name: str = "train") -> Any:
        """Return the documents of rows that were not passed to the constructor."""
        trainer = self.trainer
        packing = self.sampling.packing if name == "train" else self.sampling.eval_packing
        tokenizer, formatting_func = trainer.processing_class, trainer._formatting_func
        with temporarily(self, _has_training_set=name != "train", _is_later=True):
            return trainer._prepare_dataset(
                dataset, tokenizer, trainer.args, packing, formatting_func, name
            )

    def prepare_again(self, dataset: Any) -> Any:
        """Return the documents of a training set that was set on the built trainer."""
        # Tokens without packing are trained as they are, as in TRL; bins have a capacity.
        is_tokenized = "input_ids" in columns_of(dataset) and not records_of(dataset)
        if is_tokenized and not self.sampling.packing:
            return dataset
        return self.prepare_later(dataset)

    def _name_of_set(self, name: str) -> str:
        """Return another name for an evaluation set that a user has called "train"."""
        if name == "train" and self._has_training_set:
            return "evaluated train"
        self._has_training_set = True
        return name

    def _prepare_rows(
        self,
        by_trl: Callable[..., Any],
        processing_class: Any,
        args: SFTConfig,
        formatting_func: Any,
        dataset: Any,
        name: str,
    ) -> tuple[Any, PreparationCounts | None]:
        """Return the documents of a data set, and counts of what was kept and lost."""
        trainer = self.trainer
        if name == "train" and records_of(dataset):  # TRL does not see the rows, which decide it
            trainer.completion_only_loss = trains_completions(dataset, args.completion_only_loss)
        completion_only = trainer.completion_only_loss
        if self.sets is not None:  # TRL decides once, by the first row of the first of them
            completion_only = trains_completions(dataset, args.completion_only_loss)
        rules = Preparation.of_run(
            args,
            processing_class,
            trainer._tokenizer,
            packing=self.sampling.packing,
            chat_template=trainer.chat_template,
            completion_only=completion_only,
            generation_config=self.generation_config,
            by_trl=partial(_tokenized_by_trl, by_trl, processing_class, args),
            labeler=self.completion_only and self.completion_only.labeler,
        )
        with (
            global_then_local_main_first(),  # one rank writes the cache, the others read it
            temporarily(trainer, completion_only_loss=completion_only),  # TRL's code reads it
        ):
            rows = self.tokenize_images(dataset, rules, trainer.chat_template, name)
            return prepare(rows, rules, formatting_func=formatting_func, name=name)


def _tokenized_by_trl(
    by_trl: Callable[..., Any],
    processing_class: Any,
    args: SFTConfig,
    dataset: Any,
    formatting_func: Any,
    name: str,
) -> Any:
    # TRL would cut at max_length without counting, and pack in windows of 1,000 rows.
    unlimited = copy.copy(args)
    unlimited.max_length = None
    return by_trl(dataset, processing_class, unlimited, False, formatting_func, name)
