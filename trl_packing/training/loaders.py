"""Data loaders of a run: packed micro-batches, each rank its own.

training      planned from lengths by `Sampling`, or packed from a stream as it is read
evaluation    packed as well; where logits are requested, a padded row for each document
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from trl import SFTTrainer

from trl_packing.attention.state import temporarily
from trl_packing.data.unpack import unpack_rows
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import SEQ_LENGTHS, SOURCE
from trl_packing.documents.weights import check_some_weight
from trl_packing.loss.sources import Sources
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.draw import packing_seed
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.streaming.loader import StreamBatches
from trl_packing.streaming.reader import StreamSettings
from trl_packing.training.collators import RunCollators
from trl_packing.training.columns import columns_of, documents_of, has_weights, training_columns
from trl_packing.training.mixed_stream import mixture_in_words
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_isolation import RunIsolation
from trl_packing.training.source_metrics import SourceMeter, stream_sources, training_sources

logger = get_logger(__name__)

# Settings that our sampler follows, and a user's does not.
_DRAWN_BY_OURS = (
    "static_shapes",
    "documents_per_step",
    "curriculum",
    "mixture",
    "mixture_temperature",
)


class PackedLoaders:
    """Makes the data loaders of a run.

    Args:
        trainer: its data sets, accelerator and arguments are read, and its `data_collator` is
            replaced while one of its loaders is made.
        collators: make the rows, of the documents that their `sampling` draws.
        epochs: is told the sampler or stream of each training.
        isolation: checks documents before an evaluation, and groups before they are planned.
        source_meter: is told the sources of the training set.

    Attributes:
        evaluates_padded: logits are requested, of one row for each document.
        sources: of the set that is evaluated, where its losses are told apart.
        trained_sources: of the training set, likewise.
        room: tokens that fit into a micro-batch of bins; None where nothing is packed.
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        collators: RunCollators,
        epochs: ResumedEpochs,
        isolation: RunIsolation,
        source_meter: SourceMeter,
    ):
        self.trainer = trainer
        self.guard = collators.guard
        self.collators = collators
        self.sampling = collators.sampling
        self.epochs = epochs
        self.isolation = isolation
        self.report = isolation.report  # made again where a user's sampler draws documents
        self.source_meter = source_meter
        self.options = collators.options
        self.evaluates_padded = False
        self.sources: Sources | None = None
        self.trained_sources: Sources | None = None
        self._has_weights = False
        self.room: int | None = None
        self._evaluated_streams: list[StreamBatches] = []
        self._has_warned = False
        if trainer.args.world_size == 1:  # accelerate would cut boundaries as if they were rows
            loading = trainer.accelerator.dataloader_config
            loading.split_batches = loading.dispatch_batches = False

    def documents(self, dataset: Dataset, description: str | None) -> ArrowDocuments:
        """Return the documents of a data loader.

        Args:
            dataset: prepared rows.
            description: transformers' name of the set.
        """
        sources = self.sources if description in ("Evaluation", "test") else None
        if description == "Training":
            sources = self.trained_sources
        ids = None if sources is None else sources.ids
        documents = documents_of(dataset, self.trainer.compute_loss_func, ids)
        if description == "Evaluation":  # a prediction needs no loss
            check_some_weight(documents)
        return documents

    # --- training -----------------------------------------------------------------------------

    def train(self, parent: Callable[[], Any]) -> DataLoader:
        """Return the training data loader; `parent` is TRL's method for it."""
        self.collators.follow_batch_size()
        self.report.follow_batch_size()
        dataset = self.trainer.train_dataset
        self._has_weights = self.options.loss_weighting != "token" or has_weights(dataset)
        self.epochs.forget()
        self._follow_sources(dataset)
        self.isolation.decide_on_groups()
        if isinstance(dataset, IterableDataset):
            capacity = self.trainer.args.max_length if self.sampling.packing else None
            self.room = capacity and capacity * self.sampling.batch_size
            stream = self._stream(
                dataset, self.sampling.packing, self.sampling.batch_size, training=True
            )
            self.epochs.follow_stream(stream)
            return self._loader_of(stream)
        dataloader = parent()
        sampler = getattr(dataloader.batch_sampler, "batch_sampler", None)
        planned = sampler or dataloader.batch_sampler  # a single rank has no wrapper
        is_packed = isinstance(planned, PackedBatchSampler)
        self.room = planned.tokens_per_batch if is_packed else None
        if is_packed:
            self.epochs.follow(planned, dataloader.dataset)
        if isinstance(sampler, PackedBatchSampler):
            # A resumed epoch wraps the sampler once more, and `set_epoch` then reaches only this
            # wrapper: without it two ranks replay epoch 0 (transformers 5.23, accelerate 1.15).
            dataloader.batch_sampler.set_epoch = sampler.set_epoch
        if not self.report.samples_bins:
            self._check_user_sampler(is_packed)
            self.report.plan(planned, len(dataloader))
        return dataloader

    def _follow_sources(self, dataset: Any) -> None:
        """Count the sources of the training set in every step from now on."""
        column = self.options.source_column
        self.trained_sources = training_sources(dataset, column)
        names = () if self.trained_sources is None else self.trained_sources.names
        if isinstance(dataset, IterableDataset):
            names = stream_sources(dataset, self.options)
        self.source_meter.follow(names)

    def _check_user_sampler(self, is_packed: bool) -> None:
        """Refuse settings of bins beside a user's sampler of documents, and say how it is used."""
        if is_packed:
            return
        drawn = f"_get_train_sampler of {type(self.trainer).__name__} draws documents, not bins"
        for name in _DRAWN_BY_OURS:
            if value := getattr(self.options, name):
                raise ValueError(f"{name}={value!r}, but {drawn}; leave {name} out")
        if not self.sampling.packing:
            return
        if not self._has_warned:
            self._has_warned = True
            logger.warning(
                f"{drawn}: its order is kept, and a micro-batch is {self.sampling.batch_size} "
                "documents without padding; leave the method out, or return super()'s, to pack them"
            )

    # --- evaluation ---------------------------------------------------------------------------

    @contextmanager
    def evaluating(self, *, padded: bool) -> Iterator[None]:
        """Evaluate inside the block; `padded` where logits are requested, packed otherwise."""
        self._evaluated_streams = []
        with temporarily(self, evaluates_padded=padded):
            yield
        for stream in self._evaluated_streams:
            if words := str(stream.counts_of_all_ranks()):
                logger.warning_once(f"evaluation stream: {words}")

    def evaluate(self, parent: Callable[[Any], Any], dataset: Any) -> DataLoader:
        """Return the data loader of an evaluation set.

        Args:
            parent: TRL's method for it.
            dataset: as `parent` takes it: a data set, the name of one, or None.
        """
        given = self.trainer.eval_dataset
        name = dataset if isinstance(dataset, str) else "evaluation"
        chosen = given[dataset] if isinstance(dataset, str) else dataset
        chosen = given if dataset is None else chosen
        return self._evaluate(parent, dataset, chosen, name, self.options.source_column)

    def predict(self, parent: Callable[[Any], Any], dataset: Any) -> DataLoader:
        """Return the data loader of a set to predict, which may lack the column of sources."""
        column = self.options.source_column
        if isinstance(dataset, IterableDataset) or column not in columns_of(dataset):
            column = None
        return self._evaluate(parent, dataset, dataset, "evaluation", column)

    def _evaluate(
        self,
        parent: Callable[[Any], Any],
        dataset: Any,
        chosen: Any,
        name: str,
        source_column: str | None,
    ) -> DataLoader:
        self.guard.limits.check(chosen, name)
        model, padded = self.trainer.model, self.evaluates_padded
        self.isolation.ensure(model, chosen, training=False, padded=padded)
        is_stream = isinstance(chosen, IterableDataset)
        if self.evaluates_padded and is_stream:
            limits = self.guard.limits  # the reader of packed streams checks them itself
            dataset = chosen = chosen.map(limits.checked, with_indices=True)
        if self.evaluates_padded and SEQ_LENGTHS in columns_of(chosen):
            dataset = chosen = unpack_rows(chosen)
        self.sources = None if source_column is None else Sources.of(chosen, source_column)
        collator = self.collators.for_evaluation(padded=self.evaluates_padded)
        with temporarily(self.trainer, data_collator=collator):
            if self.evaluates_padded or not is_stream:
                return parent(dataset)
            size = self.trainer.args.eval_batch_size
            stream = self._stream(chosen, self.sampling.eval_packing, size, training=False)
            self._evaluated_streams.append(stream)
            return self._loader_of(stream)

    @property
    def trains_weighted(self) -> bool:
        """Whether micro-batches have weights: of the training set, or sums over documents."""
        return self._has_weights or self.collators.packed.shares_prefixes

    # --- streams ------------------------------------------------------------------------------

    def _stream(
        self, dataset: IterableDataset, packing: bool, batch_size: int, *, training: bool
    ) -> StreamBatches:
        args, (ranks, rank) = self.trainer.args, self.sampling.ranks
        shuffles = training and packing and args.train_sampling_strategy != "sequential"
        groups = self.sampling.draws_groups(training)
        sources = (stream_sources(dataset, self.options) or None) if training else None
        named = [] if sources is None else [SOURCE]
        if args.dataloader_num_workers > 1:
            logger.warning_once(
                f"dataloader_num_workers={args.dataloader_num_workers}, but one worker of a rank "
                "reads a stream, so that a run can be resumed within it"
            )
        return StreamBatches(
            dataset.select_columns(training_columns(dataset, *named)),
            StreamSettings(
                args.max_length if packing else None,
                bins_per_batch=batch_size,
                num_ranks=ranks,
                strategy=find_strategy(args.packing_strategy).packs_as,
                seed=packing_seed(args) if shuffles else None,
                prefix_group_size=self.options.prefix_group_size if groups else None,
                mixture=mixture_in_words(self.options) if training else None,
            ),
            self.trainer.data_collator,
            rank=rank,
            accumulation=self.sampling.accumulation if training else 1,
            num_workers=args.dataloader_num_workers,
            global_step=lambda: self.trainer.state.global_step if training else 0,
            loading={
                "pin_memory": args.dataloader_pin_memory,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
            limits=self.guard.limits,
            sources=sources,
        )

    def _loader_of(self, stream: StreamBatches) -> DataLoader:
        # Not `accelerator.prepare`: its dispatcher and its shard wrapper cannot take micro-batches
        # of unequal size, and repeat documents at the end.
        accelerator = self.trainer.accelerator
        return DataLoaderShard(
            stream,
            device=accelerator.device if accelerator.device_placement else None,
            _non_blocking=accelerator.non_blocking,
            batch_size=None,
            collate_fn=_unchanged,
        )


def _unchanged(batch: Any) -> Any:
    return batch
