"""`PackedSFTTrainer`: TRL's `SFTTrainer` on documents packed at sampling time.

SFTTrainer                     here
_prepare_dataset               super() renders and tokenizes; then documents are fitted, not packed
_get_train_sampler             a plan an epoch, from lengths, by rank           (sampler)
get_train_dataloader           of a stream: packed as it is read         (stream_batches)
data_collator                  one flat row, boundaries, no mask, no cache      (collator)
attention of the model         kept within documents, the rest of it unchanged  (attention)
fused LM head                  trained positions only, also on CPU              (head)
compute_loss, evaluation_loop  one weighted mean a step, and an evaluation set  (loss)
log                            tokens a second and their like, too          (measured)
train, evaluate, predict       stop before the first step if documents leak     (isolation)
"""

import copy
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.data_loader import DataLoaderShard
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from torch.utils.data import DataLoader
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names
from trl.trainer.utils import global_then_local_main_first

from trl_packing.allocator import pages_kept
from trl_packing.arguments import (
    check_arguments,
    check_loss_options,
    generation_config_of,
    packing_hidden,
    reason_for_trl_path,
    refuse_options,
)
from trl_packing.arrow_documents import ArrowDocuments, check_loss_weights
from trl_packing.attention import PADDED, AttentionChoice
from trl_packing.checkpoints import checkpoint_to_resume, marked_while_written
from trl_packing.collator import PackedCollator, WeightedPaddedCollator
from trl_packing.config import PackedSFTConfig, PackingOptions
from trl_packing.dataset_checks import check_token_ids
from trl_packing.document_columns import (
    Sources,
    check_source_column,
    weights_of_documents,
)
from trl_packing.engines import keep_outputs_precise, whole_model_saved
from trl_packing.gate import IsolationGate
from trl_packing.head import add_trained_positions_head
from trl_packing.labels import DOCUMENT_WEIGHT_COLUMN, SOURCE_IDS, WEIGHT_COLUMN
from trl_packing.legacy_collator import DataCollatorForCompletionOnlyLM
from trl_packing.loss import check_weights_can_be_used
from trl_packing.measured import MeasuredTrainer, ThroughputOnBar
from trl_packing.plan import (
    attention_cost,
    micro_batch_of_stream,
    plan_report,
    training_sampler,
    without_plan,
)
from trl_packing.prepare import Preparation
from trl_packing.report import PackingReport, PreparationCounts
from trl_packing.sampler import PackedBatchSampler
from trl_packing.static_shapes import StaticShapes
from trl_packing.stream_batches import StreamBatches
from trl_packing.streaming import StreamSettings
from trl_packing.token_columns import TOKEN_COLUMNS
from trl_packing.unpacking import unpack_rows
from trl_packing.weighting import in_words

logger = get_logger(__name__)

_ROW_COLUMNS = (*TOKEN_COLUMNS, WEIGHT_COLUMN, "seq_lengths")
_WEIGHT_COLUMNS = (WEIGHT_COLUMN, DOCUMENT_WEIGHT_COLUMN)
_EVALUATIONS = ("Evaluation", "test")  # how transformers calls them


class PackedSFTTrainer(MeasuredTrainer):
    """Supervised fine-tuning that never computes on padding and keeps documents apart.

    Takes the arguments of `trl.SFTTrainer`; `args` may be a `PackedSFTConfig`, a plain `SFTConfig`
    or `TrainingArguments`. With ``packing=True`` a micro-batch is `per_device_train_batch_size`
    bins of `max_length` tokens; with ``packing=False`` an optimizer step is the documents of the
    padded run. Either way a micro-batch is one flat row of isolated documents.

    A data collator of your own, a data set with images, and a data set with `with_transform` take
    TRL's path unchanged (a warning says so). A `DataCollatorForCompletionOnlyLM` labels the
    documents, and then they are packed as others are.

    Documents may have `loss_weights`, a number for every token, and `loss_weight`, one for all of
    them: what their loss counts; `loss_weighting` says how the length of a document enters. The
    loss of a step is the weighted mean over its trained tokens, of all micro-batches and ranks, and
    so is `eval_loss`; `mean_token_accuracy` and `entropy` stay plain means.

    `packing_report` holds what a run is made of; it is printed when training starts. `attention`
    says what keeps documents apart.

    model: a name, or a model of transformers, PEFT's around it or not.
    args: see above; None takes the defaults of TRL's `SFTConfig`, padding-free.
    data_collator: a `PackedCollator` or `DataCollatorForCompletionOnlyLM`; others as above.
    train_dataset, eval_dataset: rows in any form of docs/data.md, tokenized or not, packed by TRL
        or not; a stream; for evaluation a dictionary of sets, too.
    processing_class: the tokenizer; by default the model's.

    Raises ValueError, before anything is trained, for settings, columns or data that cannot be
    trained as they say, and RuntimeError from `train` and `evaluate` if documents see each other.
    """

    packing_report: PackingReport = None  # type: ignore[assignment]
    data_collator: Any
    _completion_only: DataCollatorForCompletionOnlyLM | None = None
    _signature_columns: Any
    _train_stream: StreamBatches | None = None
    _evaluated_streams: list[StreamBatches]

    def __init__(
        self,
        model: Any,
        args: Any = None,
        data_collator: Any = None,
        train_dataset: Any = None,
        eval_dataset: Any = None,
        processing_class: Any = None,
        **kwargs: Any,
    ):
        self._trl_path = reason_for_trl_path(train_dataset, data_collator)
        self._options = PackingOptions.of(args)
        check_loss_options(self._options, kwargs.get("compute_loss_func"), self._trl_path)
        if self._trl_path:
            refuse_options(self._options, self._trl_path)
            logger.warning(f"{self._trl_path}: taking TRL's path unchanged, without packing by us")
            if isinstance(args, PackedSFTConfig):
                args.packing = False  # its default, where nobody asked for packing
            super().__init__(
                model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs
            )
            return
        check_arguments(args, train_dataset)
        if isinstance(data_collator, DataCollatorForCompletionOnlyLM):
            self._completion_only, data_collator = data_collator, None
            processing_class = processing_class or self._completion_only.tokenizer
        self._generation_config = generation_config_of(model, args)  # data come before self.model
        self._preparation: dict[str, PreparationCounts] = {}
        with packing_hidden(args) as (packing, eval_packing):
            self._packing, self._eval_packing = packing, eval_packing
            super().__init__(
                model, args, None, train_dataset, eval_dataset, processing_class, **kwargs
            )
        keep_outputs_precise(self.accelerator)
        self._check_parallelism()
        self._check_losses_can_be_told_apart()
        # TRL divides by the tokens of one micro-batch for model classes that do not accept
        # `num_items_in_batch`, although its own loss takes the count: gemma3, Qwen-VL, ...
        self.model_accepts_loss_kwargs = True
        self._padded_collator: Any = self.data_collator
        if self._shards_sequences():
            self._trl_path = "context or sequence parallelism drops document boundaries"
            logger.warning(f"{self._trl_path}: rows are padded, as in TRL")
            return
        self._gate = IsolationGate(
            self.model,
            self._options,
            asked=self._packing or self._eval_packing or self.args.padding_free,
            device=self.args.device,
            dtype=torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None,
        )
        self.padding_free = True
        self.data_collator = self._collator(data_collator)
        self._hold_shapes()
        add_trained_positions_head(self._gate.base_model)
        self.packing_report = self._report()
        self.add_callback(_OnTrainBegin(self))
        self.add_callback(ThroughputOnBar(self))

    # --- arguments ----------------------------------------------------------------------------

    def _check_parallelism(self) -> None:
        args = self.args
        if self._shards_sequences() and (self._packing or self._eval_packing or args.padding_free):
            raise ValueError(
                "Packing is not compatible with context parallelism (`cp_size > 1`) or sequence "
                "parallelism: sharding a row drops the boundaries between its documents. Set "
                "`packing=False` and `padding_free=False` for padded rows, or disable it."
            )
        if self._shards_sequences():
            self._check_nothing_is_weighted()
        for name, value in (
            ("pad_to_multiple_of", self._pad_to_multiple_of),
            ("static_shapes", self._options.static_shapes),
        ):
            if self.aux_loss_enabled and value:
                raise ValueError(
                    f"{name}={value} would let padding take part in the balance of experts; leave "
                    "it unset, or set router_aux_loss_coef=0.0"
                )
        if args.world_size > 1 and not args.average_tokens_across_devices:
            raise ValueError(
                "average_tokens_across_devices=False weights a token by the rank that it falls on, "
                "and packed ranks hold unequal numbers of trained tokens; leave it True"
            )

    def _check_nothing_is_weighted(self) -> None:
        for column in _WEIGHT_COLUMNS:
            if any(column in _columns(dataset) for dataset in self._all_datasets()):
                raise ValueError(
                    f"{column} are not applied under context or sequence parallelism; disable "
                    f"it, or drop the column: dataset.remove_columns({column!r})"
                )
        check_loss_options(
            self._options, None, "context or sequence parallelism drops document boundaries"
        )

    def _check_losses_can_be_told_apart(self) -> None:
        if self.compute_loss_func is not None:
            for dataset in self._all_datasets():
                check_weights_can_be_used(self.compute_loss_func, _columns(dataset))
        if self._options.source_column is not None:
            for dataset in self._all_datasets()[1:]:
                if dataset is not None:
                    check_source_column(dataset, self._options.source_column)

    def _collator(self, own: PackedCollator | None) -> PackedCollator:
        """Return the collator of packed rows, which weighs documents as the config says."""
        weighting = self._options.loss_weighting
        if own is None:
            return PackedCollator(
                pad_token_id=self._tokenizer.pad_token_id,
                pad_to_multiple_of=self._pad_to_multiple_of,
                loss_weighting=weighting,
                host_row=True,
            )
        if own.loss_weighting not in ("token", weighting):
            raise ValueError(
                f"the data_collator has loss_weighting={own.loss_weighting!r}, but the config has "
                f"{weighting!r}; set it in the config, which evaluation reads too"
            )
        own = copy.copy(own)
        own.loss_weighting, own.host_row = weighting, True
        return own

    def _hold_shapes(self) -> None:
        """Let every training micro-batch have one shape, if the config asks for it."""
        if not self._options.static_shapes:
            return
        most, dataset = None, self.train_dataset
        if isinstance(dataset, Dataset) and "seq_lengths" not in dataset.column_names:
            sampler = self._get_train_sampler(self._remove_unused_columns(dataset))
            most = sampler.most_documents()
        self.data_collator = self._with_shapes(self._train_batch_size, most)
        self._drop_shapes_of_padded_rows()

    def _with_shapes(self, bins: int, most_documents: int | None = None) -> PackedCollator:
        """Return the collator of micro-batches of `bins` bins, all of one shape."""
        shapes = StaticShapes.of(
            self._gate.base_model,
            capacity=self.args.max_length,
            bins=bins,
            most_documents=most_documents,
            pad_to_multiple_of=self._pad_to_multiple_of,
        )
        return replace(self.data_collator, static_shapes=shapes)

    def _drop_shapes_of_padded_rows(self) -> None:
        if self.data_collator.static_shapes is None or self.attention.backend not in PADDED:
            return
        logger.warning(
            f"static_shapes=True does nothing here: {type(self._gate.base_model).__name__} runs by "
            f"{self.attention}, whose shapes follow the documents"
        )
        # In place: the dataloader has it already.
        self.data_collator.static_shapes = None

    def _all_datasets(self) -> list[Any]:
        evaluated = self.eval_dataset
        return [
            self.train_dataset,
            *(evaluated.values() if isinstance(evaluated, dict) else [evaluated]),
        ]

    @property
    def _pad_to_multiple_of(self) -> int | None:
        return self.args.pad_to_multiple_of or getattr(
            self._completion_only, "pad_to_multiple_of", None
        )

    def _shards_sequences(self) -> bool:
        parallelism = self.accelerator.parallelism_config
        return parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)

    # --- isolation ----------------------------------------------------------------------------

    @property
    def attention(self) -> AttentionChoice:
        """What keeps the documents of a packed row apart, and why."""
        return self._gate.attention

    def _pass_gate(self, model: Any, dataset: Any, *, training: bool) -> None:
        """Stop, or take a slower way, before anything is computed on documents that leak."""
        self._gate.check_head(model)
        if self._evaluates_padded and not training:
            return
        shapes = self.data_collator.static_shapes
        self._gate.check(
            model,
            dataset,
            # Probes fill one bin or two, not a micro-batch of many.
            self.data_collator if shapes is None else self._with_shapes(bins=1),
            training=training,
            max_length=self.args.max_length,
        )
        self._drop_shapes_of_padded_rows()
        self.packing_report = replace(
            self.packing_report,
            attention=str(self.attention),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
        )

    # --- data ---------------------------------------------------------------------------------

    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        if self._trl_path:
            return super()._prepare_dataset(
                dataset, processing_class, args, packing, formatting_func, dataset_name
            )
        preparation = Preparation(
            args,
            processing_class,
            self._tokenizer,
            packing=self._packing,
            chat_template=self.chat_template,
            completion_only=self.completion_only_loss,
            generation_config=self._generation_config,
            by_trl=partial(self._tokenized_by_trl, processing_class, args),
            completion_only_lm=self._completion_only,
        )
        with global_then_local_main_first():  # one rank writes the cache, the others read it
            documents, counts = preparation.documents(dataset, formatting_func, dataset_name)
        if counts is not None:
            self._preparation[dataset_name] = counts
        return documents

    def _tokenized_by_trl(
        self, processing_class: Any, args: SFTConfig, dataset: Any, formatting_func: Any, name: str
    ) -> Any:
        # TRL would cut at max_length without counting, and pack in windows of 1,000 rows.
        unlimited = copy.copy(args)
        unlimited.max_length = None
        return super()._prepare_dataset(
            dataset, processing_class, unlimited, False, formatting_func, name
        )

    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Refuse what TRL refuses: its guard knows only its own collator."""
        if self._skip_prepare_dataset and self._completion_only is not None:
            raise ValueError(
                "skip_prepare_dataset=True skips the labels that DataCollatorForCompletionOnlyLM "
                "finds; leave it out (a tokenized data set is not tokenized again)"
            )
        if self._skip_prepare_dataset and self._options.append_eos:
            raise ValueError(
                "skip_prepare_dataset=True skips append_eos=True; leave one of them out (a "
                "tokenized data set is not tokenized again)"
            )
        if isinstance(data_collator, PackedCollator):
            data_collator = self._padded_collator
        super()._reject_skip_prepare_without_labels(datasets, data_collator)

    def _remove_unused_columns(self, dataset: Dataset, description: str | None = None) -> Any:
        """Read documents straight out of Arrow, instead of removing columns and keeping lists."""
        if self._trl_path:
            return super()._remove_unused_columns(dataset, description)
        present = [name for name in _ROW_COLUMNS if name in dataset.column_names]
        check_weights_can_be_used(self.compute_loss_func, dataset.column_names)
        scalars = {}
        if DOCUMENT_WEIGHT_COLUMN in dataset.column_names:
            which = "the prepared data set"
            scalars[DOCUMENT_WEIGHT_COLUMN] = weights_of_documents(dataset, which)
        if self._sources is not None and description in _EVALUATIONS:
            scalars[SOURCE_IDS] = self._sources.ids
        documents = ArrowDocuments(dataset, present, scalars)
        if WEIGHT_COLUMN in present:
            check_loss_weights(documents)
        return documents

    def _set_signature_columns_if_needed(self) -> None:
        """Keep the weights of a stream that is evaluated padded: TRL's columns lack them."""
        super()._set_signature_columns_if_needed()
        if not self._trl_path:
            missing = [c for c in _WEIGHT_COLUMNS if c not in self._signature_columns]
            self._signature_columns = [*self._signature_columns, *missing]

    # --- sampling -----------------------------------------------------------------------------

    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if self._trl_path or not isinstance(train_dataset, ArrowDocuments):
            return super()._get_train_sampler(train_dataset)
        ranks, rank = self._data_ranks()
        return training_sampler(
            train_dataset,
            self.args,
            packing=self._packing,
            batch_size=self._train_batch_size,
            ranks=ranks,
            rank=rank,
            hidden_size=self._hidden_size,
        )

    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if self._trl_path or not isinstance(eval_dataset, ArrowDocuments) or self._evaluates_padded:
            return super()._get_eval_sampler(eval_dataset)
        (ranks, rank), size = self._data_ranks(), self.args.eval_batch_size
        rows = "seq_lengths" in eval_dataset.columns
        return PackedBatchSampler(
            eval_dataset.lengths(),
            self.args.max_length,
            bins_per_batch=size,
            documents_per_step=None if self._eval_packing or rows else size * ranks,
            rows=rows,
            num_ranks=ranks,
            rank=rank,
            strategy=self.args.packing_strategy.removesuffix("_split"),
            shuffle=False,
            attention_cost=attention_cost(self._hidden_size),
            allow_idle_ranks=True,
        )

    @property
    def _hidden_size(self) -> int | None:
        return getattr(self.model.config.get_text_config(), "hidden_size", None)

    def _data_ranks(self) -> tuple[int, int]:
        """Return how many data-parallel ranks there are and this one."""
        # Tensor-parallel ranks must see the same batch.
        shared = self.get_tp_size() * self.get_cp_size() * self.get_sp_size()
        return self.args.world_size // shared, self.args.process_index // shared

    def get_train_dataloader(self) -> DataLoader:
        weighs = self._options.loss_weighting != "token" or _has_weights(self.train_dataset)
        self._trains_weighted = not self._trl_path and weighs
        if not self._trl_path and self._tokens_per_micro_batch is not None:
            held = self._with_shapes(self._train_batch_size).static_shapes
            if held is not None and held.num_tokens != self._tokens_per_micro_batch:
                self._hold_shapes()  # auto_find_batch_size has changed it
        if not self._trl_path and isinstance(self.train_dataset, IterableDataset):
            capacity = self.args.max_length if self._packing else None
            self._room = capacity and capacity * self._train_batch_size
            return self._stream(
                self.train_dataset, self._packing, self._train_batch_size, training=True
            )
        dataloader = super().get_train_dataloader()
        sampler = getattr(dataloader.batch_sampler, "batch_sampler", None)
        planned = sampler or dataloader.batch_sampler  # a single rank has no wrapper
        self._room = planned.room if isinstance(planned, PackedBatchSampler) else None
        if isinstance(sampler, PackedBatchSampler):
            # A resumed epoch wraps the sampler once more, and `set_epoch` then reaches only this
            # wrapper: without it two ranks replay epoch 0 (transformers 5.23, accelerate 1.15).
            dataloader.batch_sampler.set_epoch = sampler.set_epoch
        return dataloader

    def get_eval_dataloader(self, eval_dataset: Any = None) -> DataLoader:
        return self._evaluation_dataloader(
            super().get_eval_dataloader, eval_dataset, self._options.source_column
        )

    def get_test_dataloader(self, test_dataset: Any) -> DataLoader:
        column = self._options.source_column
        if column not in _columns(test_dataset):  # `predict` may be asked of anything
            column = None
        return self._evaluation_dataloader(super().get_test_dataloader, test_dataset, column)

    def _evaluation_dataloader(
        self, parent: Any, dataset: Any, source_column: str | None
    ) -> DataLoader:
        if self._trl_path:
            return parent(dataset)
        chosen = self.eval_dataset if dataset is None else dataset
        chosen = self.eval_dataset[dataset] if isinstance(dataset, str) else chosen
        self._pass_gate(self.model, chosen, training=False)
        if self._evaluates_padded and "seq_lengths" in _columns(chosen):
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
        if self.data_collator.static_shapes is None:
            return self.data_collator
        if self._eval_packing:
            return self._with_shapes(self.args.eval_batch_size)
        return replace(self.data_collator, static_shapes=None)

    def _stream(
        self, dataset: IterableDataset, packing: bool, batch_size: int, *, training: bool
    ) -> DataLoader:
        args, (ranks, rank) = self.args, self._data_ranks()
        shuffles = training and packing and args.train_sampling_strategy != "sequential"
        seed = args.data_seed if args.data_seed is not None else args.seed
        stream = StreamBatches(
            dataset.select_columns(_stream_columns(dataset)),
            StreamSettings(
                args.max_length if packing else None,
                bins_per_batch=batch_size,
                num_ranks=ranks,
                # The pieces of "bfd_split" are documents by the time of packing.
                strategy=args.packing_strategy.removesuffix("_split"),
                seed=seed if shuffles else None,
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

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, on all ranks together also after an evaluation; resume from a whole checkpoint."""
        wraps = self.args.world_size > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if wraps and getattr(self.model, "_is_accelerate_prepared", False):
            # evaluate() marks the bare model as prepared. `train` then leaves DDP out, and every
            # rank trains by itself, without a message (transformers 5.23, accelerate 1.15).
            self.model._is_accelerate_prepared = False
            self.model_wrapped = self.model  # compiled by then, under torch_compile
            self.accelerator._models.remove(self.model)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        with pages_kept(on_cpu=self.args.device.type == "cpu"):
            return super().train(checkpoint, *args, **kwargs)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Mark a checkpoint while it is written, and delete older ones only when it is whole."""
        run = self._get_output_dir(trial=trial)
        checkpoint = Path(run) / f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        limit, self.args.save_total_limit = self.args.save_total_limit, None
        try:
            with self._not_timed(), marked_while_written(checkpoint, self.accelerator):
                super()._save_checkpoint(model, trial)
        finally:
            self.args.save_total_limit = limit
        if self.args.should_save:
            best = self.state.best_model_checkpoint
            with self._not_timed():
                rotate_checkpoints(run, limit, best, use_mtime=True)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model on any engine; parts of checkpoints are saved as configured."""
        with nullcontext() if _internal_call else whole_model_saved(self.accelerator):
            super().save_model(output_dir, _internal_call)

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        with self._evaluation(padded=self.compute_metrics is not None):
            return super().evaluate(*args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as TRL does, but also from a data set that is not tokenized yet."""
        if not self._trl_path and not self._skip_prepare_dataset:
            test_dataset = self._prepare_dataset(
                test_dataset,
                self.processing_class,
                self.args,
                self._eval_packing,
                self._formatting_func,
                "test",
            )
        with self._evaluation(padded=not self.args.prediction_loss_only):
            return super().predict(test_dataset, *args, **kwargs)

    @contextmanager
    def _evaluation(self, *, padded: bool) -> Iterator[None]:
        """Whoever asks for logits expects a padded row per document; otherwise rows are packed."""
        before, self._evaluates_padded = self._evaluates_padded, padded
        self._evaluated_streams = []
        try:
            yield
        finally:
            self._evaluates_padded = before
        for stream in self._evaluated_streams:
            if words := str(stream.counts_of_all_ranks()):
                logger.warning_once(f"evaluation stream: {words}")

    @property
    def _tokens_per_micro_batch(self) -> int | None:
        """Tokens of every micro-batch, its padding too; None if they differ."""
        shapes = self.data_collator.static_shapes
        return None if shapes is None else shapes.num_tokens

    def _vocabulary_size(self) -> int:
        embeddings = self.model.get_input_embeddings()
        weight = getattr(embeddings, "weight", None)
        if weight is None:
            return self.model.config.get_text_config().vocab_size
        return getattr(weight, "ds_shape", weight.shape)[0]  # ZeRO-3 leaves none of it here

    # --- report -------------------------------------------------------------------------------

    def _report(self) -> PackingReport:
        loss = None  # a function of one's own says itself what it computes
        if self.compute_loss_func is None:
            loss = in_words(self._options.loss_weighting, _columns(self.train_dataset))
        if isinstance(self.train_dataset, IterableDataset):
            return without_plan(
                self.args,
                ranks=self._data_ranks()[0],
                micro_batch=micro_batch_of_stream(self._packing, self._train_batch_size),
                attention=str(self.attention),
                loss=loss,
                tokens_per_micro_batch=self._tokens_per_micro_batch,
            )
        documents = self._remove_unused_columns(self.train_dataset)
        check_token_ids(documents, self._vocabulary_size(), "train")
        return plan_report(
            documents,
            self._get_train_sampler(documents),
            attention=str(self.attention),
            loss=loss,
            preparation=self._preparation.get("train", PreparationCounts()),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
        )


class _OnTrainBegin(TrainerCallback):
    """Print the report and check isolation when the model is wrapped and nothing is trained yet."""

    def __init__(self, trainer: PackedSFTTrainer):
        self.trainer = trainer
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        trainer._pass_gate(trainer.model_wrapped, trainer.train_dataset, training=True)
        self._print_report(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Say early what a stream loses: it may be read for days."""
        stream = self.trainer._train_stream
        if stream is not None and not self._told and (words := str(stream.counts)):
            read = stream.counts.before.documents
            logger.warning(f"of the first {read:,} documents of the stream: {words}")
            self._told = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the report on a stream, which is counted as it is read."""
        trainer = self.trainer
        if trainer._train_stream is not None:
            counts = trainer._train_stream.counts_of_all_ranks()
            trainer.packing_report = replace(trainer.packing_report, preparation=counts)
            self._print_report(state)

    def _print_report(self, state: Any) -> None:
        if state.is_world_process_zero:
            print(f"\n{self.trainer.packing_report}", flush=True)  # a progress bar holds the line


def _columns(dataset: Any) -> list[str]:
    is_known = isinstance(dataset, (Dataset, IterableDataset))
    return get_dataset_column_names(dataset) if is_known else []


def _has_weights(dataset: Any) -> bool:
    return any(column in _columns(dataset) for column in _WEIGHT_COLUMNS)


def _stream_columns(dataset: IterableDataset) -> list[str]:
    present = get_dataset_column_names(dataset)
    return [name for name in (*_ROW_COLUMNS, DOCUMENT_WEIGHT_COLUMN) if name in present]


def _as_it_is(batch: Any) -> Any:
    return batch
