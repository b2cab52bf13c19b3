"""Data loaders of a run: packed micro-batches, each rank its own, of documents that stay apart.

The model is checked before anything is computed on packed rows:

    before an epoch of groups is planned    the model, not wrapped yet
    before the first step                   the model as it will run
    before an evaluation                    the same, on the documents of that set
    in a loop of the user's own             the model, when it is first called on a packed row
"""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any
from weakref import WeakKeyDictionary

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch import nn
from torch.utils.data import DataLoader
from trl import SFTTrainer

from trl_packing.attention.calls import allows_other_rows, settle_first
from trl_packing.attention.install import use_attention
from trl_packing.attention.model_facts import restore_implementation
from trl_packing.documents.labels import SEQ_LENGTHS, SOURCE
from trl_packing.isolation.frozen_layers import check_frozen_layers
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.loss.lm_head import add_trained_positions_head
from trl_packing.loss.sums import Sources
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.draw import packing_seed
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.columns import columns_of, documents_of, training_columns, weight_columns
from trl_packing.run.sources import training_sources
from trl_packing.run.stream import StreamBatches, StreamSettings
from trl_packing.training.collators import RunCollators
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_data import RunData
from trl_packing.training.run_report import RunReport

logger = get_logger(__name__)

# TRL's data loader, of documents, the method that makes their sampler, and a collator.
ByTrl = Callable[[Any, Any, Any], DataLoader]

# Settings that our sampler follows, and a user's does not.
_OF_BINS = ("static_shapes", "documents_per_step", "curriculum", "mixture")


def make_model_ready(guard: IsolationGuard, args: Any) -> None:
    """Install the backend and the head of packed rows on the model of `guard`.

    Raises:
        ValueError: the requested backend is unknown, or cannot be exact on this model.
    """
    dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
    guard.select_backend((args.device.type, dtype))
    add_trained_positions_head(guard.base_model)
    restore_implementation(guard.base_model)


@dataclass(eq=False)
class RunIsolation:
    """Checks the documents of a run by its guard, and decides whether they share prefixes."""

    trainer: SFTTrainer
    collators: RunCollators
    report: RunReport
    sharing: PrefixSharing

    def __post_init__(self) -> None:
        self.guard = self.collators.guard
        self._trains_groups = False
        settle_first(self.guard.model, self.settle)

    def ensure(self, model: Any, dataset: Any, *, training: bool, planned: bool = True) -> None:
        """Stop, or switch to a slower attention, before anything is computed on leaking documents.

        Args:
            model: wrapped as it will run.
            dataset: the documents to check it on.
            training: the mode of the model.
            planned: whether the epoch is planned already, maybe in groups.
        """
        guard = self.guard
        guard.check_head(model)
        is_first = training and planned and guard.checks and not guard.passed
        if is_first and self.trainer.is_world_process_zero():  # the progress bar stands still
            print("\nchecking that no document of a packed row affects another ...", flush=True)
        if is_first and self._is_whole():
            check_frozen_layers(guard.base_model)
        documents = guard.sample(dataset, self.trainer.args.max_length)
        collator = self.collators.for_probes()
        guard.ensure(documents, training=training, wrapped=model, collator=collator)
        self.collators.drop_shapes_of_padded_rows()
        prefixes = self.report.prefixes
        pays = prefixes is None or prefixes.pays or not training
        self.sharing.decide(model, documents, training=training, pays=pays)
        # Bins of groups would hold more tokens than was planned.
        must_share = training and planned and self._trains_groups
        if must_share and not self.collators.packed.shares_prefixes:
            raise RuntimeError(
                "prefix_sharing='group' has planned bins, but the model cannot share as it runs "
                f"now: {self.sharing.reason()}; set prefix_sharing='bin' or 'off'"
            )

    def settle(self, called: nn.Module) -> None:
        """Check the model, `called` in a loop of the user's own; RuntimeError if it fails."""
        trainer, guard, args = self.trainer, self.guard, self.trainer.args
        # The check itself calls it, too.
        if allows_other_rows() or not guard.checks or trainer.is_in_train:
            return
        if called.training in {in_training for _, in_training, *_ in guard.passed}:
            return
        if args.world_size > 1 or args.torch_compile or not self._is_whole():
            raise RuntimeError(
                f"{type(called).__name__} was called on packed documents outside of train() and "
                "evaluate(); for a loop of your own, call enable_packing(model) first"
            )
        documents = guard.sample(trainer.train_dataset, args.max_length)
        with use_attention(trainer.model, guard.attention), trainer.accelerator.autocast():
            guard.check_head(trainer.model)
            guard.ensure(documents, training=called.training, collator=self.collators.for_probes())

    def _is_whole(self) -> bool:
        return not (self.trainer.is_fsdp_enabled or self.trainer.is_deepspeed_enabled)

    def decide_on_groups(self) -> None:
        """Decide before an epoch is planned: bins of groups hold the tokens of shared rows."""
        trainer, sampling = self.trainer, self.collators.sampling
        if self.sharing.mode == "group" and not self.report.samples_bins:
            raise ValueError(
                f"prefix_sharing='group', but _get_train_sampler of {type(trainer).__name__} draws "
                "documents, not groups; set prefix_sharing='bin'"
            )
        # A sharded model cannot run yet. It is checked before the first step, as any other.
        if sampling.draws_groups(True) and self._is_whole():
            model = trainer.model
            with use_attention(model, self.guard.attention), trainer.accelerator.autocast():
                self.ensure(model, trainer.train_dataset, training=True, planned=False)
            self.guard.forget_checks()  # the model will be wrapped before the first step
            self.sharing.check_again()
        self._trains_groups = sampling.draws_groups(True)
        plans_groups = getattr(self.report.prefixes, "per_step", None) is not None
        is_other = plans_groups != self._trains_groups
        if is_other and isinstance(trainer.train_dataset, Dataset):
            self.report.plan()


@dataclass(eq=False)
class PackedLoaders:
    """Makes the data loaders of a run.

    Attributes:
        trainer: its `data_collator` is replaced while one of its loaders is made.
        isolation: checks documents before an evaluation, and groups before they are planned.
        epochs: is told the sampler or stream of each training.
        data: prepares a set that is trained or predicted later.
        meter: is told the sources of the training set.
        sources: of evaluation sets whose losses are told apart, by their loaders.
        room: tokens that fit into a micro-batch of bins; None where nothing is packed.
    """

    trainer: SFTTrainer
    isolation: RunIsolation
    epochs: ResumedEpochs
    data: RunData
    meter: ThroughputMeter

    def __post_init__(self) -> None:
        self.collators = self.isolation.collators
        self.sampling, self.options = self.collators.sampling, self.collators.options
        self.sources: WeakKeyDictionary[Any, Sources | None] = WeakKeyDictionary()
        self.room: int | None = None
        self._has_weights = False
        self._planned = self.trainer.train_dataset  # the one of the report
        if self.trainer.args.world_size == 1:  # accelerate would cut boundaries as if rows
            loading = self.trainer.accelerator.dataloader_config
            loading.split_batches = loading.dispatch_batches = False

    @property
    def trains_weighted(self) -> bool:
        """Whether micro-batches have weights: of the training set, or sums over documents."""
        return self._has_weights or self.collators.packed.shares_prefixes

    def train(self, by_trl: ByTrl, dataset: Any, sampler_of: Any) -> DataLoader:
        """Return the training data loader; arguments as for `evaluate`."""
        trainer, options, sampling = self.trainer, self.options, self.sampling
        dataset = self._planned_for(dataset)
        self._has_weights = options.loss_weighting != "token" or bool(weight_columns(dataset))
        self.epochs.set_stream(None)
        sources = training_sources(dataset, options)
        self.room = None
        self.meter.set_sources(() if sources is None else sources.names)
        self.isolation.decide_on_groups()
        if isinstance(dataset, IterableDataset):
            if sampling.packing:
                self.room = trainer.args.max_length * sampling.batch_size
            dataloader = self._stream(dataset, sources, self.collators.packed, training=True)
            self.epochs.set_stream(dataloader.dataset)
            return dataloader
        documents = documents_of(dataset, trainer.compute_loss_func, sources)
        dataloader = by_trl(documents, sampler_of, self.collators.packed)
        drawn: Any = dataloader.batch_sampler
        planned = getattr(drawn, "batch_sampler", drawn)  # a single rank has no wrapper
        if isinstance(planned, PackedBatchSampler):
            self.room = planned.tokens_per_batch
            self.epochs.start(planned, documents)
            if planned is not drawn:
                # A resumed epoch wraps the sampler again, and `set_epoch` reaches only the wrapper:
                # without it two ranks replay epoch 0 (transformers 5.23, accelerate 1.15).
                drawn.set_epoch = planned.set_epoch
        else:
            self._check_user_sampler()
        if not self.isolation.report.samples_bins:
            self.isolation.report.plan(planned)
        return dataloader

    def _planned_for(self, dataset: Any) -> Any:
        """Return the documents of the training set; plan another set or batch size anew."""
        report = self.isolation.report
        is_new = dataset is not self._planned
        if is_new:
            self.trainer.train_dataset = self._planned = self.data.prepare_again(dataset)
        # `auto_find_batch_size` changes the size of micro-batches.
        if is_new or report.batch_size != self.sampling.batch_size:
            self.collators.hold_shapes()
            report.plan()
        return self._planned

    def _check_user_sampler(self) -> None:
        """Refuse settings of bins beside a user's sampler of documents, and say how it is used."""
        drawn = f"_get_train_sampler of {type(self.trainer).__name__} draws documents, not bins"
        for name in _OF_BINS:
            if value := getattr(self.options, name):
                raise ValueError(f"{name}={value!r}, but {drawn}; leave {name} out")
        if self.sampling.packing:
            logger.warning_once(
                f"{drawn}: a micro-batch is {self.sampling.batch_size} documents without padding; "
                "leave the method out, or return super()'s, to pack them"
            )

    def evaluate(self, by_trl: ByTrl, dataset: Any, sampler_of: Any, key: str | None) -> DataLoader:
        """Return the data loader of an evaluation set, or of a set to predict.

        Args:
            by_trl: makes TRL's loader.
            dataset: the documents; rows to predict may not be prepared yet.
            sampler_of: TRL's or a user's method.
            key: name of an evaluation set; None for a set to predict.
        """
        trainer = self.trainer
        guard = self.isolation.guard
        is_test = key is None
        name = key or "test"
        if trainer._skip_prepare_dataset:  # TRL knows only its own collator
            self.data.check_nothing_is_skipped([dataset])
            trainer._reject_skip_prepare_without_labels({name: dataset}, self.collators.padded)
        elif is_test:
            dataset = self.data.prepare_later(dataset, name)
        # Callers that ask for logits expect a row for each document, of which none can leak.
        asks = not trainer.args.prediction_loss_only if is_test else trainer.compute_metrics
        padded = bool(asks)
        guard.limits.check(dataset, name)
        with use_attention(trainer.model, guard.attention):
            if padded:
                guard.check_head(trainer.model)
            else:
                self.isolation.ensure(trainer.model, dataset, training=False)
        is_stream = isinstance(dataset, IterableDataset)
        column = self.options.source_column
        if padded and SEQ_LENGTHS in columns_of(dataset):
            raise ValueError(
                f"rows of the {name} dataset were packed (they have {SEQ_LENGTHS}), but "
                "compute_metrics and predict need a row for each document; pass the documents"
            )
        is_known = not is_test or (not is_stream and column in columns_of(dataset))
        sources = Sources.of(dataset, column) if column is not None and is_known else None
        collator = self.collators.for_evaluation(padded=padded)
        if is_stream and not padded:
            dataloader = self._stream(dataset, None, collator, training=False)
        else:
            if is_stream:  # the reader of packed streams checks the limits itself
                checked = dataset.map(guard.limits.checked, with_indices=True)
                rows = checked.select_columns(training_columns(dataset))
            else:
                rows = documents_of(dataset, trainer.compute_loss_func, sources)
            if not padded and type(trainer)._get_eval_sampler is SFTTrainer._get_eval_sampler:
                sampler_of = self.sampling.for_evaluation
            dataloader = by_trl(rows, sampler_of, collator)
        self.sources[dataloader] = sources
        return dataloader

    def report_losses(self, dataloader: Any) -> None:
        """Say what an evaluation stream has lost when it was read."""
        stream = getattr(dataloader, "dataset", None)
        if isinstance(stream, StreamBatches) and (words := str(stream.counts_of_all_ranks())):
            logger.warning_once(f"evaluation stream: {words}")

    def _stream(
        self, dataset: IterableDataset, sources: Sources | None, collator: Any, *, training: bool
    ) -> Any:
        """Return the data loader of a stream; its `dataset` is the `StreamBatches`."""
        args, sampling, (ranks, rank) = self.trainer.args, self.sampling, self.sampling.ranks
        packing = sampling.packing if training else sampling.eval_packing
        shuffles = training and packing and args.train_sampling_strategy != "sequential"
        groups = packing and sampling.draws_groups(training)
        columns = training_columns(dataset, *([] if sources is None else [SOURCE]))
        stream = StreamBatches(
            dataset.select_columns(columns),
            StreamSettings(
                args.max_length if packing else None,
                bins_per_batch=sampling.batch_size if training else args.eval_batch_size,
                num_ranks=ranks,
                strategy=find_strategy(args.packing_strategy).packs_as,
                seed=packing_seed(args) if shuffles else None,
                prefix_group_size=self.options.prefix_group_size if groups else None,
                mixture=str(self.options.mixture) if training and self.options.mixture else None,
            ),
            collator,
            rank=rank,
            accumulation=args.gradient_accumulation_steps if training else 1,
            num_workers=args.dataloader_num_workers,
            global_step=lambda: self.trainer.state.global_step if training else 0,
            loading={
                "pin_memory": args.dataloader_pin_memory,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
            limits=self.isolation.guard.limits,
            sources=None if sources is None else sources.names,
        )
        # Not `accelerator.prepare`: its dispatcher and its shard wrapper cannot take micro-batches
        # of unequal size, and repeat documents at the end.
        accelerator = self.trainer.accelerator
        return DataLoaderShard(
            stream,
            device=accelerator.device if accelerator.device_placement else None,
            _non_blocking=accelerator.non_blocking,
            batch_size=None,
            collate_fn=lambda batch: batch,
        )
