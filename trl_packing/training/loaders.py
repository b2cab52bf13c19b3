"""Data loaders of a run: packed micro-batches, each rank its own, of documents that stay apart.

The model is checked before anything is computed on them (before_training.py).
"""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any
from weakref import WeakKeyDictionary

from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from datasets import IterableDataset
from torch.utils.data import DataLoader

from trl_packing.config import PackingOptions
from trl_packing.documents.labels import SEQ_LENGTHS, SOURCE
from trl_packing.loss.sums import Sources
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.draw import packing_seed
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.sources import columns_of, documents_of, training_columns, weight_columns
from trl_packing.run.stream import StreamBatches, StreamSettings
from trl_packing.training.before_training import BeforeTraining
from trl_packing.training.collators import DividedCollator
from trl_packing.training.metrics import ThroughputMeter

logger = get_logger(__name__)

# TRL's data loader, of documents, the method that makes their sampler, and a collator.
ByTrl = Callable[[Any, Any, Any], DataLoader]

# Settings that our sampler follows, and a user's does not.
_OF_BINS = (
    "static_shapes",
    "documents_per_step",
    "curriculum",
    "mixture",
    "sequence_parallel_size",
)


@dataclass(eq=False)
class PackedLoaders:
    """Makes the data loaders of a run.

    Attributes:
        before: plans the training set, and checks documents before an evaluation.
        meter: is told the sources of the training set.
        global_step: the optimizer steps of the run so far.
        evaluates_bins: no method of a user samples evaluation sets.
        sources: of evaluation sets whose losses are told apart, by their loaders.
        room: tokens that fit into a micro-batch of bins; None where nothing is packed.
        divided: makes the rows of training and their parts; None if every row runs as a whole.
        has_weights: tokens of the training set are weighted.
    """

    before: BeforeTraining
    meter: ThroughputMeter
    global_step: Callable[[], int]
    evaluates_bins: bool
    sources: WeakKeyDictionary[Any, Sources | None] = field(default_factory=WeakKeyDictionary)
    room: int | None = None
    divided: DividedCollator | None = None
    has_weights: bool = False

    def __post_init__(self) -> None:
        self.run = self.before.run
        self.collators = self.before.collators
        self.epochs = self.before.epochs

    def train(
        self, by_trl: ByTrl, dataset: Any, sampler_of: Any, max_tokens: int | None
    ) -> DataLoader:
        """Return the training data loader, of micro-batches in parts of at most `max_tokens`.

        Other arguments are those of `evaluate`.
        """
        before, options = self.before, self.run.options
        packed: Any = self.collators.packed
        self.divided = None if max_tokens is None else DividedCollator(packed, max_tokens)
        packed = self.divided or packed
        self.has_weights = options.loss_weighting != "token" or bool(weight_columns(dataset))
        self.room = None
        self.epochs.set_stream(None)
        before.plan_again(dataset)
        self.meter.set_sources(() if before.sources is None else before.sources.names)
        if before.documents is None:
            if self.run.packing:
                self.room = self.run.args.max_length * before.sampling.batch_size
            dataloader = self._stream(dataset, before.sources, packed, training=True)
            self.epochs.set_stream(dataloader.dataset)
            return dataloader
        dataloader = by_trl(before.documents, sampler_of, packed)
        drawn: Any = dataloader.batch_sampler
        planned = getattr(drawn, "batch_sampler", drawn)  # a single rank has no wrapper
        if isinstance(planned, PackedBatchSampler):
            self.room = planned.tokens_per_batch
            self.epochs.start(planned, before.documents, before.sampling.settings(before.mixture))
            if planned is not drawn:
                # A resumed epoch wraps the sampler again, and `set_epoch` reaches only the wrapper:
                # without it two ranks replay epoch 0 (transformers 5.23, accelerate 1.15).
                drawn.set_epoch = planned.set_epoch
        else:
            self._check_user_sampler()
        if not before.samples_bins:
            before.report_on(planned)
        return dataloader

    def _check_user_sampler(self) -> None:
        """Refuse settings of bins beside a user's sampler of documents, and say how it is used."""
        drawn = f"_get_train_sampler of {self.before.trainer_name} draws documents, not bins"
        for name in _OF_BINS:
            value = getattr(self.run.options, name)
            if value != getattr(PackingOptions, name):
                raise ValueError(f"{name}={value!r}, but {drawn}; leave {name} out")
        if self.run.packing:
            logger.warning_once(
                f"{drawn}: a micro-batch is {self.before.sampling.batch_size} documents without "
                "padding; leave the method out, or return super()'s, to pack them"
            )

    def evaluate(
        self,
        by_trl: ByTrl,
        model: Any,
        dataset: Any,
        sampler_of: Any,
        key: str | None,
        *,
        padded: bool,
    ) -> DataLoader:
        """Return the data loader of an evaluation set, or of a set to predict.

        Args:
            by_trl: makes TRL's loader.
            model: as it is called.
            dataset: the documents.
            sampler_of: TRL's or a user's method.
            key: name of an evaluation set; None for a set to predict.
            padded: callers ask for logits, and expect a row for each document.
        """
        name = key or "test"
        self.before.check_evaluation(model, dataset, name, padded=padded)
        is_stream = isinstance(dataset, IterableDataset)
        column = self.run.options.source_column
        if padded and SEQ_LENGTHS in columns_of(dataset):
            raise ValueError(
                f"rows of the {name} dataset were packed (they have {SEQ_LENGTHS}), but "
                "compute_metrics and predict need a row for each document; pass the documents"
            )
        is_known = key is not None or (not is_stream and column in columns_of(dataset))
        sources = Sources.of(dataset, column) if column is not None and is_known else None
        collator = self.collators.for_evaluation(padded=padded)
        if is_stream and not padded:
            dataloader = self._stream(dataset, None, collator, training=False)
        else:
            if is_stream:  # the reader of packed streams checks the limits itself
                checked = dataset.map(self.before.guard.limits.checked, with_indices=True)
                rows = checked.select_columns(training_columns(dataset))
            else:
                rows = documents_of(dataset, self.run.call.compute_loss_func, sources)
            if not padded and self.evaluates_bins:
                sampler_of = self.before.sampling.for_evaluation
            elif not padded and collator.share[1] > 1:
                raise ValueError(
                    f"sequence_parallel_size={collator.share[1]}, but _get_eval_sampler of "
                    f"{self.before.trainer_name} gives ranks other documents; leave one of them out"
                )
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
        args = self.run.args
        sampling = self.before.sampling
        ranks, rank = sampling.ranks
        packing = self.run.packing if training else self.run.eval_packing
        shuffles = training and packing and args.train_sampling_strategy != "sequential"
        groups = packing and sampling.draws_groups(training)
        options = self.run.options
        columns = training_columns(dataset, *([] if sources is None else [SOURCE]))
        stream = StreamBatches(
            dataset.select_columns(columns),
            StreamSettings(
                args.max_length if packing else None,
                bins_per_batch=sampling.batch_size if training else args.eval_batch_size,
                num_ranks=ranks,
                strategy=find_strategy(args.packing_strategy).packs_as,
                seed=packing_seed(args) if shuffles else None,
                prefix_group_size=options.prefix_group_size if groups else None,
                mixture=str(options.mixture) if training and options.mixture else None,
            ),
            collator,
            rank=rank,
            accumulation=args.gradient_accumulation_steps if training else 1,
            num_workers=args.dataloader_num_workers,
            global_step=self.global_step if training else lambda: 0,
            loading={
                "pin_memory": args.dataloader_pin_memory,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
            limits=self.before.guard.limits,
            sources=None if sources is None else sources.names,
        )
        # Not `accelerator.prepare`: its dispatcher and its shard wrapper cannot take micro-batches
        # of unequal size, and repeat documents at the end.
        accelerator = self.before.accelerator
        return DataLoaderShard(
            stream,
            device=accelerator.device if accelerator.device_placement else None,
            _non_blocking=accelerator.non_blocking,
            batch_size=None,
            collate_fn=lambda batch: batch,
        )
