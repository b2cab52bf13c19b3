"""From documents to the micro-batches that a rank is given: samplers, streams, dataloaders.

training      a plan an epoch, from lengths, by rank (sampler); a stream, as it is read
              (stream_batches)
evaluation    packed as well, in data-set order; a padded row a document where logits are asked
resuming      the same micro-batches again; the position in a stream is saved beside the model
"""

import os
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader

from trl_packing.attention.backends import PADDED
from trl_packing.config import PackingOptions
from trl_packing.data.stream import columns_kept
from trl_packing.data.unpack import unpack_rows
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    SEQ_LENGTHS,
    SOURCE_IDS,
    TOKEN_COLUMNS,
    TOKEN_WEIGHTS,
    WEIGHT_COLUMNS,
)
from trl_packing.documents.weight_columns import (
    check_some_weight,
    check_token_weights,
    document_weights_from_rows,
)
from trl_packing.formatting.completion_only_collator import DataCollatorForCompletionOnlyLM
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.loss.evaluation import Sources
from trl_packing.loss.step_loss import check_weights_can_be_used
from trl_packing.models.introspection import layer_values, text_config
from trl_packing.packing.batch_weights import WeightedPaddedCollator
from trl_packing.packing.bins import find_strategy
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.document_order import packing_seed
from trl_packing.packing.sampler import PackedBatchSampler, attention_cost
from trl_packing.packing.static_shapes import StaticShapes
from trl_packing.recognition.current_row import (
    AnnouncedBatches,
    AnnouncedLoader,
    restore_current_row,
    set_current_row,
)
from trl_packing.streaming.loader import StreamBatches
from trl_packing.streaming.reader import StreamSettings
from trl_packing.training.arguments import check_loss_options, reason_for_trl_path
from trl_packing.training.epoch_report import plan_settings, training_sampler
from trl_packing.training.resuming import ResumingTrainer
from trl_packing.training.set_afterwards import GivenLists, calls

logger = get_logger(__name__)


_ROW_COLUMNS = (*TOKEN_COLUMNS, TOKEN_WEIGHTS, SEQ_LENGTHS)
_EVALUATIONS = ("Evaluation", "test")  # how transformers calls them


class PackedLoaderTrainer(ResumingTrainer):
    """`ResumingTrainer` whose dataloaders give packed micro-batches, each rank its own."""

    train_dataset: Any
    data_collator: Any  # what makes batches; a user may set another one
    _packed_collator: PackedCollator
    _planned_dataset: Any = None  # the training set that the report is about
    _stands_on_trl_path = False  # whatever is set afterwards
    _accepts_loss_kwargs: bool  # as TRL has it
    _told: set[str]  # what has been said
    _options: PackingOptions
    _packing: bool
    _eval_packing: bool
    _padded_collator: Any
    _completion_only: DataCollatorForCompletionOnlyLM | None = None
    _gate: IsolationGuard
    _pass_gate: Callable[..., None]
    _signature_columns: Any
    _train_stream: StreamBatches | None = None
    _torch_seed: int | None = None  # of torch's global generator, when training starts
    _evaluated_streams: list[StreamBatches]

    # --- documents ----------------------------------------------------------------------------

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> Any:
        """Read documents straight out of Arrow, instead of removing columns and keeping lists."""
        if self._trl_path:
            return super()._remove_unused_columns(dataset, description)
        present = [name for name in _ROW_COLUMNS if name in dataset.column_names]
        check_weights_can_be_used(self.compute_loss_func, dataset.column_names)
        scalars = {}
        if DOCUMENT_WEIGHT in dataset.column_names:
            which = "the prepared data set"
            scalars[DOCUMENT_WEIGHT] = document_weights_from_rows(dataset, which)
        if self._sources is not None and description in _EVALUATIONS:
            scalars[SOURCE_IDS] = self._sources.ids
        documents = ArrowDocuments(dataset, present, scalars)
        if TOKEN_WEIGHTS in present:
            check_token_weights(documents)
        if description == "Evaluation":  # a prediction needs no loss
            check_some_weight(documents)
        return documents

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the weights of a stream that is evaluated padded: TRL's columns lack them."""
        super()._set_signature_columns_if_needed()
        if not self._trl_path:
            missing = [c for c in WEIGHT_COLUMNS if c not in self._signature_columns]
            self._signature_columns = [*self._signature_columns, *missing]

    # --- what a user has set since the trainer was built --------------------------------------

    def _heed_what_was_set(self) -> None:
        """Take `data_collator` and `train_dataset` as they are now for what they mean."""
        if self._stands_on_trl_path:
            return
        self._leave_trl_path()
        ours, now = self._packed_collator, self.data_collator
        if isinstance(now, PackedCollator):
            if now is not ours:
                self.data_collator = self._packed_collator = self._collator(now)
                self._hold_shapes()
        elif calls(now, ours):
            self._check_wrapped(now)
            ours.host_row = False  # the host would not know what is changed in a batch
        else:
            self._take_trl_path(f"data_collator is your own ({type(now).__name__})")
            return
        self._heed_dataset()

    def _heed_dataset(self) -> None:
        dataset = self.train_dataset
        if dataset is self._planned_dataset or dataset is None:
            return
        reason = reason_for_trl_path(dataset, None)
        if not isinstance(dataset, (Dataset, IterableDataset)):
            reason = f"train_dataset is a {type(dataset).__name__}"
        if reason:
            self._take_trl_path(reason)
            return
        # Tokens without packing are trained as they are, as in TRL; bins have a capacity.
        if self._packing or "input_ids" not in columns_of(dataset):
            dataset = self._prepare_dataset(
                dataset,
                self.processing_class,
                self.args,
                self._packing,
                self._formatting_func,
                "train",
            )
        self.train_dataset = self._planned_dataset = dataset
        self._hold_shapes()
        self.packing_report = self._report()

    def _take_trl_path(self, reason: str) -> None:
        """Train padded rows, as TRL does, from now on.

        Raises ValueError for settings that would do nothing there.
        """
        check_loss_options(self._options, None, reason)
        for name in ("documents_per_step", "static_shapes"):
            if value := getattr(self._options, name):
                raise ValueError(
                    f"{name}={value!r}, but {reason}, which takes TRL's path, where it does "
                    f"nothing; leave {name} out"
                )
        self._trl_path, self.padding_free = reason, False
        self.model_accepts_loss_kwargs = self._accepts_loss_kwargs
        if self.data_collator is self._packed_collator:
            self.data_collator = self._padded_collator
        self.packing_report = None
        if reason not in self._told:
            self._told.add(reason)
            logger.warning(
                f"{reason}: taking TRL's path unchanged, on padded rows; to train packed "
                "documents, leave data_collator as it was (labels of a data set are kept), and "
                "pass data sets of `datasets`"
            )

    def _leave_trl_path(self) -> None:
        if self._trl_path is None:
            return
        self._trl_path, self.padding_free = None, True
        self.model_accepts_loss_kwargs = True
        self._planned_dataset = None
        if self.data_collator is self._padded_collator:
            self.data_collator = self._packed_collator

    def _check_wrapped(self, collator: Any) -> None:
        if self._options.static_shapes:
            raise ValueError(
                f"static_shapes=True holds the shape of data_collator's rows, but it is now a "
                f"{type(collator).__name__} around it, which may change them; leave static_shapes "
                "out"
            )

    def _collate_function(self) -> Any:
        """Return what the data loader calls: arrays are for our collators alone."""
        is_ours = self._trl_path or isinstance(self.data_collator, PackedCollator)
        return self.data_collator if is_ours else GivenLists(self.data_collator)

    # --- sampling -----------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self._trl_path or not isinstance(train_dataset, ArrowDocuments):
            return super()._get_train_sampler(train_dataset)
        return self._training_sampler(train_dataset)

    def _samples_its_own_way(self) -> bool:
        """Whether a subclass says which documents come next."""
        return type(self)._get_train_sampler is not PackedLoaderTrainer._get_train_sampler

    def _training_sampler(
        self, documents: ArrowDocuments, subset: np.ndarray | None = None
    ) -> PackedBatchSampler:
        ranks, rank = self._data_ranks()
        return training_sampler(
            documents,
            self.args,
            packing=self._packing,
            batch_size=self._train_batch_size,
            ranks=ranks,
            rank=rank,
            hidden_size=self._hidden_size,
            torch_seed=self._torch_seed,
            subset=subset,
        )

    def _plan_settings(self) -> dict[str, Any]:
        return plan_settings(
            self.args,
            packing=self._packing,
            batch_size=self._train_batch_size,
            ranks=self._data_ranks()[0],
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if self._trl_path or not isinstance(eval_dataset, ArrowDocuments) or self._evaluates_padded:
            return super()._get_eval_sampler(eval_dataset)
        (ranks, rank), size = self._data_ranks(), self.args.eval_batch_size
        rows = is_packed(eval_dataset)
        return PackedBatchSampler(
            eval_dataset.lengths(),
            self.args.max_length,
            bins_per_batch=size,
            documents_per_step=None if self._eval_packing or rows else size * ranks,
            rows=rows,
            num_ranks=ranks,
            rank=rank,
            strategy=self.args.packing_strategy,
            shuffle=False,
            attention_cost=attention_cost(self._hidden_size),
            allow_idle_ranks=True,
        )

    @property
    def _hidden_size(self) -> int | None:
        return max(layer_values(text_config(self.model), "hidden_size"), default=None)

    def _data_ranks(self) -> tuple[int, int]:
        """Return how many data-parallel ranks there are and this one."""
        # Tensor-parallel ranks must see the same batch.
        shared = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        return self.args.world_size // shared, self.args.process_index // shared

    def get_train_dataloader(self) -> DataLoader:
        self._heed_what_was_set()
        if (called := self._collate_function()) is self.data_collator:
            return self._train_dataloader(super().get_train_dataloader)
        given, self.data_collator = self.data_collator, called
        try:
            return self._train_dataloader(super().get_train_dataloader)
        finally:
            self.data_collator = given

    def _train_dataloader(self, parent: Callable[[], Any]) -> DataLoader:
        weighs = self._options.loss_weighting != "token" or _has_weights(self.train_dataset)
        self._trains_weighted = not self._trl_path and weighs
        if not self._trl_path and self._tokens_per_micro_batch is not None:
            held = self._with_shapes(self._train_batch_size).static_shapes
            if held is not None and held.num_tokens != self._tokens_per_micro_batch:
                self._hold_shapes()  # auto_find_batch_size has changed it
        self._follow_epochs(None, None)
        if not self._trl_path and isinstance(self.train_dataset, IterableDataset):
            capacity = self.args.max_length if self._packing else None
            self._room = capacity and capacity * self._train_batch_size
            return self._stream(
                self.train_dataset, self._packing, self._train_batch_size, training=True
            )
        dataloader = parent()
        sampler = getattr(dataloader.batch_sampler, "batch_sampler", None)
        planned = sampler or dataloader.batch_sampler  # a single rank has no wrapper
        self._room = planned.tokens_per_batch if isinstance(planned, PackedBatchSampler) else None
        self._follow_epochs(planned, dataloader.dataset)
        if isinstance(sampler, PackedBatchSampler):
            # A resumed epoch wraps the sampler once more, and `set_epoch` then reaches only this
            # wrapper: without it two ranks replay epoch 0 (transformers 5.23, accelerate 1.15).
            dataloader.batch_sampler.set_epoch = sampler.set_epoch
        if not self._trl_path and self._samples_its_own_way():
            self._check_sampler(planned)
            self.packing_report = self._report(planned, len(dataloader))
        return dataloader

    def _check_sampler(self, planned: Any) -> None:
        """Say what becomes of bins where a subclass has a sampler of its own."""
        if isinstance(planned, PackedBatchSampler) or not self._packing:
            return
        own = f"_get_train_sampler of {type(self).__name__} draws documents, not bins"
        for name in ("static_shapes", "documents_per_step"):
            if value := getattr(self._options, name):
                raise ValueError(f"{name}={value!r}, but {own}; leave {name} out")
        if own not in self._told:
            self._told.add(own)
            logger.warning(
                f"{own}: its order is kept, and a micro-batch is {self._train_batch_size} "
                "documents without padding; leave the method out, or return super()'s, to pack them"
            )

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self._evaluation_dataloader(
            super().get_eval_dataloader, eval_dataset, self._options.source_column
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        column = self._options.source_column
        if column not in columns_of(test_dataset):  # `predict` may be asked of anything
            column = None
        return self._evaluation_dataloader(super().get_test_dataloader, test_dataset, column)

    def _evaluation_dataloader(
        self, parent: Any, dataset: Any, source_column: str | None
    ) -> DataLoader:
        self._heed_what_was_set()
        if self._trl_path:
            return parent(dataset)
        chosen = self.eval_dataset if dataset is None else dataset
        chosen = self.eval_dataset[dataset] if isinstance(dataset, str) else chosen
        self._gate.limits.check(chosen, dataset if isinstance(dataset, str) else "evaluation")
        self._pass_gate(self.model, chosen, training=False)
        if self._evaluates_padded and isinstance(chosen, IterableDataset):
            limits = self._gate.limits  # read packed, a stream is checked by its reader
            dataset = chosen = chosen.map(limits.checked, with_indices=True)
        if self._evaluates_padded and SEQ_LENGTHS in columns_of(chosen):
            dataset = chosen = unpack_rows(chosen)
        self._sources = None if source_column is None else Sources.of(chosen, source_column)
        packed, size = self.data_collator, self.args.eval_batch_size
        self.data_collator = self._evaluation_collator()
        try:
            if isinstance(chosen, IterableDataset) and not self._evaluates_padded:
                return self._stream(chosen, self._eval_packing, size, training=False)
            return parent(dataset)
        finally:
            self.data_collator = packed

    def _evaluation_collator(self) -> Any:
        if self._evaluates_padded:
            # Whoever asks for logits expects a row per document, in data-set order.
            return WeightedPaddedCollator(self._padded_collator, self._options.loss_weighting)
        if self._packed_collator.static_shapes is None:
            return self._collate_function()
        if self._eval_packing:
            return self._with_shapes(self.args.eval_batch_size)
        return replace(self._packed_collator, static_shapes=None)

    def _stream(
        self, dataset: IterableDataset, packing: bool, batch_size: int, *, training: bool
    ) -> DataLoader:
        args, (ranks, rank) = self.args, self._data_ranks()
        shuffles = training and packing and args.train_sampling_strategy != "sequential"
        stream = StreamBatches(
            dataset.select_columns(_stream_columns(dataset)),
            StreamSettings(
                args.max_length if packing else None,
                bins_per_batch=batch_size,
                num_ranks=ranks,
                strategy=find_strategy(args.packing_strategy).packs_as,
                seed=packing_seed(args) if shuffles else None,
            ),
            self.data_collator,
            rank=rank,
            accumulation=args.gradient_accumulation_steps if training else 1,
            num_workers=args.dataloader_num_workers,
            global_step=lambda: self.state.global_step if training else 0,
            loading={
                "pin_memory": args.dataloader_pin_memory,
                "prefetch_factor": args.dataloader_prefetch_factor,
            },
            limits=self._gate.limits,
        )
        if training:
            self._train_stream = stream
        else:
            self._evaluated_streams.append(stream)
        # Not `accelerator.prepare`: its dispatcher and its shard wrapper cannot take micro-batches
        # of unequal size, and repeat documents at the end.
        return DataLoaderShard(
            stream,
            device=self.accelerator.device if self.accelerator.device_placement else None,
            _non_blocking=self.accelerator.non_blocking,
            batch_size=None,
            collate_fn=_as_it_is,
        )

    # --- the row at hand ----------------------------------------------------------------------

    def get_batch_samples(self, *args: Any, **kwargs: Any) -> Any:
        """Tell the model which row is trained: a loss of the user's may not pass all of it on."""
        batches, num_items = super().get_batch_samples(*args, **kwargs)
        return (batches if self._trl_path else AnnouncedBatches(batches)), num_items

    def _prepare_inputs(self, inputs: Any) -> Any:
        prepared = super()._prepare_inputs(inputs)
        if not self._trl_path:
            set_current_row(prepared)
        return prepared

    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Forget the row: it is trained by now, and what callbacks run are other rows."""
        set_current_row(None)
        super()._track_num_input_tokens(inputs)

    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        if not self._trl_path:
            dataloader = AnnouncedLoader(dataloader)
        with restore_current_row():
            return super().evaluation_loop(dataloader, *args, **kwargs)

    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the row of a step that somebody calls outside of `train`."""
        with restore_current_row():
            return super().training_step(*args, **kwargs)

    def prediction_step(self, *args: Any, **kwargs: Any) -> Any:
        """Forget the row of a step that somebody calls outside of `evaluate`."""
        with restore_current_row():
            return super().prediction_step(*args, **kwargs)

    # --- static shapes ------------------------------------------------------------------------

    def _hold_shapes(self) -> None:
        """Let every training micro-batch have one shape, if the config asks for it."""
        if not self._options.static_shapes:
            return
        most, dataset = None, self.train_dataset
        if isinstance(dataset, Dataset) and not is_packed(dataset):
            sampler = self._training_sampler(self._remove_unused_columns(dataset))
            most = sampler.most_documents()
        self.data_collator = self._packed_collator = self._with_shapes(self._train_batch_size, most)
        self._drop_shapes_of_padded_rows()

    def _with_shapes(self, bins: int, most_documents: int | None = None) -> PackedCollator:
        """Return the collator of micro-batches of `bins` bins, all of one shape."""
        shapes = StaticShapes.for_model(
            self._gate.base_model,
            capacity=self.args.max_length,
            bins=bins,
            most_documents=most_documents,
            pad_to_multiple_of=self._pad_to_multiple_of,
        )
        return replace(self._packed_collator, static_shapes=shapes)

    def _drop_shapes_of_padded_rows(self) -> None:
        if (
            self._packed_collator.static_shapes is None
            or self._gate.attention.backend not in PADDED
        ):
            return
        logger.warning(
            f"static_shapes=True does nothing here: {type(self._gate.base_model).__name__} runs by "
            f"{self._gate.attention}, whose shapes follow the documents"
        )
        # In place: the dataloader has it already.
        self._packed_collator.static_shapes = None

    @property
    def _tokens_per_micro_batch(self) -> int | None:
        """Tokens of every micro-batch, its padding too; None if they differ."""
        shapes = self._packed_collator.static_shapes
        return None if shapes is None else shapes.num_tokens

    @property
    def _pad_to_multiple_of(self) -> int | None:
        return self.args.pad_to_multiple_of or getattr(
            self._completion_only, "pad_to_multiple_of", None
        )

    # --- resuming a stream --------------------------------------------------------------------

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the position in a stream too: what every rank saves for itself, it saves here."""
        super()._save_rng_state(output_dir)
        if self._train_stream is not None:
            self._train_stream.save(self._stream_file(output_dir))

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Go on where a stream was: it has no length by which `Trainer` could tell its epochs."""
        epoch, skipped = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        if self._train_stream is None or resume_from_checkpoint is None or not skipped:
            return epoch, skipped
        epoch, steps = self._train_stream.load(self._stream_file(resume_from_checkpoint))
        return epoch, steps * self.args.gradient_accumulation_steps

    def _stream_file(self, folder: str) -> str:
        return os.path.join(folder, f"stream_{self.args.process_index}.json")


def columns_of(dataset: Any) -> list[str]:
    """Return the names of its columns; none where it is not a data set of `datasets`."""
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return []
    names = dataset.column_names or columns_kept(dataset)
    return names or list(next(iter(dataset), {}))  # a stream may know them only by being read


def _has_weights(dataset: Any) -> bool:
    return any(column in columns_of(dataset) for column in WEIGHT_COLUMNS)


def _stream_columns(dataset: IterableDataset) -> list[str]:
    present = columns_of(dataset)
    return [name for name in (*_ROW_COLUMNS, DOCUMENT_WEIGHT) if name in present]


def _as_it_is(batch: Any) -> Any:
    return batch
