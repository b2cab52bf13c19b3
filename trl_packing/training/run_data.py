"""The data sets of a run: prepared when TRL asks for it, and checked together.

A training set may be a dictionary of several, each a source that is prepared by its own form:

    {"math": rows with prompt, completion          →  documents  ┐
     "chat": rows with messages}                   →  documents  ┴→  one data set, column SOURCE

Rows of different forms have no common columns, but their documents have. Nothing is copied.
"""

import copy
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from itertools import islice
from typing import Any

import numpy as np
from datasets import (
    ClassLabel,
    Dataset,
    DatasetDict,
    Features,
    IterableDataset,
    IterableDatasetDict,
    List,
    Value,
    concatenate_datasets,
)
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from trl_packing.config import PackingOptions
from trl_packing.data.bad_rows import check_is_dataset, check_is_one_set
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.files import records_of
from trl_packing.data.limits import ModelLimits
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
from trl_packing.data.rules import Rules
from trl_packing.data.stages import prepare
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IMAGE_IDS,
    IMAGE_ROW,
    SEQ_LENGTHS,
    SOURCE,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
)
from trl_packing.packing.draw import packing_seed
from trl_packing.temporarily import temporarily
from trl_packing.training.arguments import check_weights_and_sources, reason_for_trl_path
from trl_packing.training.columns import columns_of
from trl_packing.training.mixture import join_streams
from trl_packing.training.sampling import Sampling

# Columns of the documents of all sources, and the types in which no value of them changes.
_TYPES = {
    **dict.fromkeys(TOKEN_COLUMNS, List(Value("int64"))),
    TOKEN_WEIGHTS: List(Value("float64")),
    DOCUMENT_WEIGHT: Value("float64"),
    IMAGE_IDS: List(Value("int32")),
    IMAGE_ROW: Value("int64"),
    SEQ_LENGTHS: List(Value("int64")),
}
_NO_ROW = -1  # of the images of documents that have none


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

        def rows_by_trl(dataset: Any, formatting_func: Any, name: str) -> Any:
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


def source_sets(
    train_dataset: Any, args: Any = None, collator: Any = None
) -> dict[str, Any] | None:
    """Return the data sets of a training set that is a dictionary; None for one data set.

    Raises:
        TypeError: it is empty, or holds something else than named data sets of one kind.
        ValueError: they cannot be trained together, or sources of one stream are to be mixed.
    """
    if not isinstance(train_dataset, dict):
        if isinstance(train_dataset, IterableDataset) and PackingOptions.of(args).mixture:
            raise ValueError(
                "a mixture draws sources, which a stream tells only by being read; pass a "
                "dictionary of streams"
            )
        return None
    sets = [*train_dataset.values()]
    is_named = all(isinstance(name, str) for name in train_dataset)
    is_one_kind = any(all(isinstance(d, kind) for d in sets) for kind in (Dataset, IterableDataset))
    are_splits = isinstance(train_dataset, (DatasetDict, IterableDatasetDict))
    if are_splits or not (sets and is_named and is_one_kind):
        raise TypeError(
            "`train_dataset` must be a `Dataset` or `IterableDataset`, or a dictionary of one kind "
            "by the names of sources; of splits, pass one"
        )
    for dataset in sets:
        if reason := reason_for_trl_path(dataset, collator):
            check_is_one_set(train_dataset, reason)
    return dict(train_dataset)


def trains_completions(dataset: Any, completion_only: bool | None) -> bool:
    """Return whether only completions of rows, or of documents, are trained, as TRL decides."""
    if completion_only is not None:
        return completion_only
    if records := records_of(dataset):
        return any(record.settings["completion_only_loss"] for record in records)
    return {"prompt", "completion"} <= set(dataset.column_names or next(iter(dataset), {}))


def prepare_sources(
    sets: Mapping[str, Any],
    prepare_rows: Callable[[Any, str], tuple[Any, PreparationCounts | None]],
    args: Any,
) -> tuple[Any, PreparationCounts | None]:
    """Return the documents of all sources, and counts of what was kept and lost.

    `prepare_rows` does the same for a data set and its name.
    """
    # Messages write "the 'web' dataset": the name of a source may be any word.
    prepared = {name: prepare_rows(dataset, repr(name)) for name, dataset in sets.items()}
    documents = {name: found for name, (found, _) in prepared.items()}
    options = PackingOptions.of(args)
    if any(isinstance(dataset, IterableDataset) for dataset in sets.values()):
        return join_streams(documents, options, packing_seed(args)), None
    joined = _join_documents(documents, options.named_columns())
    known = {name: counts for name, (_, counts) in prepared.items() if counts is not None}
    notes = tuple(f"{name}: {note}" for name, found in known.items() for note in found.notes)
    counts = replace(sum(known.values(), PreparationCounts()), notes=notes)
    return joined, counts if known else None


def _join_documents(documents: Mapping[str, Dataset], named: Sequence[str]) -> Dataset:
    """Return the documents of all sources, with the column SOURCE, and `named` if all have them."""
    held = [{*dataset.column_names} for dataset in documents.values()]
    if SEQ_LENGTHS in set.union(*held) - set.intersection(*held):
        raise ValueError(
            "rows of some sources of train_dataset were packed before (they have seq_lengths), and "
            "others were not; pass documents everywhere"
        )
    columns = [column for column in _TYPES if column in set.union(*held)]
    columns += [column for column in named if column in set.intersection(*held)]
    parts = [_with_columns(dataset, columns) for dataset in documents.values()]
    if any(part.features != parts[0].features for part in parts):
        common = Features({c: _TYPES.get(c, parts[0].features[c]) for c in columns})
        parts = [part.cast(common) for part in parts]
    ids = np.repeat(np.arange(len(parts)), [*map(len, parts)])
    names = ClassLabel(names=[*documents])
    return concatenate_datasets(parts).add_column(SOURCE, ids, feature=names)


def _with_columns(dataset: Dataset, columns: list[str]) -> Dataset:
    """Return `dataset` with these columns alone; missing weights are 1, missing images none."""
    number = len(dataset)
    missing = {*columns} - {*dataset.column_names}
    if DOCUMENT_WEIGHT in missing:
        dataset = dataset.add_column(DOCUMENT_WEIGHT, np.ones(number))
    if TOKEN_WEIGHTS in missing:
        dataset = dataset.map(lambda row: {TOKEN_WEIGHTS: [1.0] * len(row["input_ids"])})
    if IMAGE_IDS in missing:
        dataset = dataset.add_column(IMAGE_IDS, [()] * number, feature=_TYPES[IMAGE_IDS])
        dataset = dataset.add_column(IMAGE_ROW, np.full(number, _NO_ROW))
    return dataset.select_columns(columns).with_format(None)
