"""`PackedSFTTrainer`: TRL's `SFTTrainer` on documents packed at sampling time.

SFTTrainer                     here
_prepare_dataset               super() renders and tokenizes; then documents are fitted, not packed
get_train_dataloader, ...      micro-batches from lengths, by rank, or of a stream    (loaders)
data_collator                  one flat row, boundaries, no mask, no cache      (collator)
attention of the model         kept within documents, the rest of it unchanged  (attention)
fused LM head                  trained positions only, also on CPU              (head)
compute_loss, evaluation_loop  one weighted mean a step, and an evaluation set  (loss)
log                            tokens a second and their like, too          (measured)
train, evaluate, predict       stop before the first step if documents leak     (isolation)
"""

import copy
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR, rotate_checkpoints
from trl import SFTConfig
from trl.trainer.utils import global_then_local_main_first

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.implementation import restore_implementation
from trl_packing.attention.install import use_attention
from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.eos import EosRule
from trl_packing.data.preparation import prepare
from trl_packing.data.rules import Preparation
from trl_packing.data.stream import columns_kept
from trl_packing.documents.labels import WEIGHT_COLUMNS
from trl_packing.documents.weight_columns import check_some_weight
from trl_packing.documents.weights import in_words
from trl_packing.formatting.completion_only_collator import DataCollatorForCompletionOnlyLM
from trl_packing.formatting.row_format import RowFormat
from trl_packing.isolation.guard import IsolationGuard, Precision
from trl_packing.loss.evaluation import check_source_column
from trl_packing.loss.lm_head import add_trained_positions_head
from trl_packing.loss.step_loss import check_weights_can_be_used
from trl_packing.models.neftune import scale_noise_by_document
from trl_packing.models.sharding import (
    check_deepspeed_can_train,
    gather_full_state_dict,
    keep_outputs_precise,
)
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.recognition.current_row import restore_current_row, set_current_row
from trl_packing.training.arguments import (
    check_arguments,
    check_loss_options,
    generation_config_of,
    packing_hidden,
    packs_by_default,
    reason_for_trl_path,
    refuse_options,
)
from trl_packing.training.checkpoints import (
    check_optimizer,
    check_readable,
    checkpoint_to_resume,
    marked_while_written,
)
from trl_packing.training.epoch_report import (
    PackingReport,
    micro_batch_of_stream,
    plan_report,
    report_of_any_sampler,
    settings_in_steps,
    without_plan,
)
from trl_packing.training.loaders import PackedLoaderTrainer, columns_of
from trl_packing.training.malloc import pages_kept
from trl_packing.training.metrics import ThroughputOnBar
from trl_packing.versions import warn_of_untested_versions

logger = get_logger(__name__)

warn_of_untested_versions()


class PackedSFTTrainer(PackedLoaderTrainer):
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
    so is `eval_loss`; in `mean_token_accuracy` and `entropy` all trained tokens count alike.

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
        self._stands_on_trl_path = self._trl_path is not None
        if self._trl_path:
            refuse_options(self._options, self._trl_path)
            logger.warning(f"{self._trl_path}: taking TRL's path unchanged, without packing by us")
            if packs_by_default(args):
                args.packing = False
            super().__init__(
                model, args, data_collator, train_dataset, eval_dataset, processing_class, **kwargs
            )
            return
        if packs_by_default(args) and args.max_length is None:
            args.packing = False
            logger.warning(
                "max_length=None: bins have no capacity, so documents are not packed; batches are "
                "those of packing=False"
            )
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
        if self.args.world_size == 1:  # accelerate would cut boundaries as if they were rows
            loading = self.accelerator.dataloader_config
            loading.split_batches = loading.dispatch_batches = False
        self._check_parallelism()
        self._check_losses_can_be_told_apart()
        # TRL divides by the tokens of one micro-batch for model classes that do not accept
        # `num_items_in_batch`, although its own loss takes the count: gemma3, Qwen-VL, ...
        self._accepts_loss_kwargs = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = True
        self._padded_collator: Any = self.data_collator
        if self._shards_sequences():
            self._trl_path = "context or sequence parallelism drops document boundaries"
            self._stands_on_trl_path = True
            logger.warning(f"{self._trl_path}: rows are padded, as in TRL")
            return
        self._gate = IsolationGuard(
            self.model,
            attention=self._options.attention,
            isolation_check=self._options.isolation_check,
            packing_requested=self._packing or self._eval_packing or self.args.padding_free,
        )
        dtype = torch.bfloat16 if self.args.bf16 else torch.float16 if self.args.fp16 else None
        self._gate.select_backend(Precision(self.args.device.type, dtype))
        self.padding_free = True
        self.data_collator = self._packed_collator = self._collator(data_collator)
        self._planned_dataset, self._told = self.train_dataset, set()
        self._hold_shapes()
        add_trained_positions_head(self._gate.base_model)
        restore_implementation(self._gate.base_model)
        self.packing_report = self._report()
        self._check_evaluation_sets()
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
        for column in WEIGHT_COLUMNS:
            if any(column in columns_of(dataset) for dataset in self._all_datasets()):
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
                check_weights_can_be_used(self.compute_loss_func, columns_of(dataset))
        if self._options.source_column is not None:
            for dataset in self._all_datasets()[1:]:
                if dataset is not None:
                    check_source_column(dataset, self._options.source_column)
        for dataset in self._all_datasets()[1:]:
            if isinstance(dataset, Dataset):
                self._remove_unused_columns(dataset)  # refuses weights that cannot be

    def _check_something_counts(self) -> None:
        """Raise ValueError for a set whose weights are all 0: it would train or report nothing."""
        for dataset in [] if self._trl_path else self._all_datasets():
            if isinstance(dataset, Dataset):
                check_some_weight(self._remove_unused_columns(dataset))

    def _collator(self, own: PackedCollator | None) -> PackedCollator:
        """Return the collator of packed rows, which weighs documents as the config says."""
        weighting = self._options.loss_weighting
        if own is None:
            return PackedCollator(
                pad_token_id=self._tokenizer.pad_token_id,
                pad_to_multiple_of=self._pad_to_multiple_of,
                loss_weighting=weighting,
                tensors_only=True,
            )
        if own.loss_weighting not in ("token", weighting):
            raise ValueError(
                f"the data_collator has loss_weighting={own.loss_weighting!r}, but the config has "
                f"{weighting!r}; set it in the config, which evaluation reads too"
            )
        own = copy.copy(own)
        own.loss_weighting = weighting
        own.tensors_only = True
        return own

    def _all_datasets(self) -> list[Any]:
        evaluated = self.eval_dataset
        return [
            self.train_dataset,
            *(evaluated.values() if isinstance(evaluated, dict) else [evaluated]),
        ]

    def _check_evaluation_sets(self) -> None:
        evaluated = self.eval_dataset
        named = evaluated if isinstance(evaluated, dict) else {"eval": evaluated}
        for name, dataset in named.items():
            self._gate.limits.check(dataset, name)

    def _shards_sequences(self) -> bool:
        parallelism = self.accelerator.parallelism_config
        return parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)

    # --- isolation ----------------------------------------------------------------------------

    @property
    def attention(self) -> AttentionChoice:
        """What keeps the documents of a packed row apart, and why."""
        return self._gate.attention

    def _attention_in_use(self) -> Any:
        """Give the model its `attn_implementation` back in the end."""
        if self._trl_path:
            return nullcontext()
        return use_attention(self.model, self.attention)

    def _pass_gate(self, model: Any, dataset: Any, *, training: bool) -> None:
        """Stop, or take a slower way, before anything is computed on documents that leak."""
        self._gate.check_head(model)
        if self._evaluates_padded and not training:
            return
        shapes = self._packed_collator.static_shapes
        self._gate.ensure(
            self._gate.sample(dataset, self.args.max_length),
            training=training,
            wrapped=model,
            # Probes fill one bin or two, not a micro-batch of many.
            collator=self._packed_collator if shapes is None else self._with_shapes(bins=1),
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
        rules = Preparation(
            args,
            processing_class,
            packing=self._packing,
            row_format=RowFormat.from_args(
                args,
                self._tokenizer,
                chat_template=self.chat_template,
                completion_only=self.completion_only_loss,
            ),
            eos=EosRule.from_args(args, self._tokenizer, processing_class, self._generation_config),
            by_trl=partial(self._tokenized_by_trl, processing_class, args),
            labeler=self._completion_only and self._completion_only.labeler,
        )
        with global_then_local_main_first():  # one rank writes the cache, the others read it
            documents, counts = prepare(
                dataset, rules, formatting_func=formatting_func, name=dataset_name
            )
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
        if not self._trl_path and hasattr(self, "_packed_collator"):
            data_collator = self._padded_collator
        super()._reject_skip_prepare_without_labels(datasets, data_collator)

    # --- training -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, on all ranks together also after an evaluation; resume from a whole checkpoint."""
        self._heed_what_was_set()
        check_deepspeed_can_train(self)
        self._check_something_counts()
        wraps = self.args.world_size > 1 and not (self.is_fsdp_enabled or self.is_deepspeed_enabled)
        if wraps and getattr(self.model, "_is_accelerate_prepared", False):
            # evaluate() marks the bare model as prepared. `train` then leaves DDP out, and every
            # rank trains by itself, without a message (transformers 5.23, accelerate 1.15).
            self.model._is_accelerate_prepared = False
            self.model_wrapped = self.model  # compiled by then, under torch_compile
            self.accelerator._models.remove(self.model)
        # accelerate draws the order of documents from this seed; ranks must agree on it.
        seed = self.args.seed if self.model_init is not None else torch.initial_seed()
        self._torch_seed = broadcast_object_list([seed])[0]
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        self._check_checkpoint(checkpoint)
        pages = pages_kept(on_cpu=self.args.device.type == "cpu")
        with self._attention_in_use(), restore_current_row(), pages:
            set_current_row(None)
            return super().train(checkpoint, *args, **kwargs)

    def _check_checkpoint(self, checkpoint: Any) -> None:
        """Raise ValueError before anything is read, if part of the checkpoint would be missing."""
        if not isinstance(checkpoint, (str, Path)):
            return
        check_readable(Path(checkpoint))
        if not self.is_deepspeed_enabled:
            check_optimizer(Path(checkpoint), save_only_model=self.args.save_only_model)

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
        with nullcontext() if _internal_call else gather_full_state_dict(self.accelerator):
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
            with self._attention_in_use(), restore_current_row():
                set_current_row(None)
                yield
        finally:
            self._evaluates_padded = before
        for stream in self._evaluated_streams:
            if words := str(stream.counts_of_all_ranks()):
                logger.warning_once(f"evaluation stream: {words}")

    # --- report -------------------------------------------------------------------------------

    def _report(self, planned: Any = None, micro_batches: int | None = None) -> PackingReport:
        """Return what the first epoch is made of.

        planned: the sampler of the data loader, of so many `micro_batches` a rank, where a subclass
            makes it: its constructor may not be done yet when ours asks.
        """
        is_stream, loss = isinstance(self.train_dataset, IterableDataset), None
        if self.compute_loss_func is None:  # which says itself what it computes
            columns = (columns_kept if is_stream else columns_of)(self.train_dataset)
            loss = in_words(self._options.loss_weighting, columns)
        if is_stream:
            return without_plan(
                self.args,
                ranks=self._data_ranks()[0],
                micro_batch=micro_batch_of_stream(self._packing, self._train_batch_size),
                attention=str(self.attention),
                loss=loss,
                tokens_per_micro_batch=self._tokens_per_micro_batch,
            )
        documents = self._remove_unused_columns(self.train_dataset)
        self._gate.limits.check(self.train_dataset, "train")
        if planned is None and not self._samples_its_own_way():
            planned = self._training_sampler(documents)
        if not isinstance(planned, PackedBatchSampler):
            return report_of_any_sampler(
                documents,
                self.args,
                micro_batches=micro_batches,
                batch_size=self._train_batch_size,
                ranks=self._data_ranks()[0],
                attention=str(self.attention),
                loss=loss,
                preparation=self._preparation.get("train", PreparationCounts()),
            )
        return plan_report(
            documents,
            planned,
            attention=str(self.attention),
            loss=loss,
            preparation=self._preparation.get("train", PreparationCounts()),
            tokens_per_micro_batch=self._tokens_per_micro_batch,
            given_in_steps=settings_in_steps(self.args),
        )


class _OnTrainBegin(TrainerCallback):
    """Print the report and check isolation when the model is wrapped and nothing is trained yet."""

    def __init__(self, trainer: PackedSFTTrainer):
        self.trainer = trainer
        self._told = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        trainer = self.trainer
        if trainer._trl_path:
            return
        scale_noise_by_document(trainer._gate.base_model)
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
