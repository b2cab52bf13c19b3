"""`PackedSFTTrainer`: TRL's `SFTTrainer` on documents that are packed when they are sampled.

Each method of Hugging Face is overridden once, in a few lines that call one of these objects:

    _run_path      ours, or TRL's unchanged path                          training/path.py
    _run_data      the data sets, prepared when TRL asks for it           training/run_data.py
    _guard         the fastest attention that keeps documents apart       isolation/guard.py
    _sampling      the documents of each micro-batch                      training/sampling.py
    _collators     rows: packed, or padded where logits are requested     training/collators.py
    _isolation     the check before the first step and evaluations        training/run_isolation.py
    _loaders       data loaders of training, evaluation and streams       training/loaders.py
    _step_loss     one weighted mean of a step, and of an evaluation set  loss/step_loss.py
    _user_loss     whether a user's method computes the loss              training/user_loss.py
    _meter         tokens per second, utilization, MFU                    training/metrics.py
    _epochs        the place at which a resumed run continues             training/resuming.py
    _run_report    the summary that is printed when training starts       training/run_report.py
    _recorder      the run's page, run.html, and its record, run.json     training/run_recorder.py

`tests/seams.py` lists the overridden methods with their parameters.
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTConfig, SFTTrainer

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.calls import (
    AnnouncedBatches,
    AnnouncedLoader,
    replace_current_row,
    restore_current_row,
    set_current_row,
    use_current_row,
)
from trl_packing.attention.install import use_attention
from trl_packing.attention.neftune import announce_documents, scale_noise_by_document
from trl_packing.attention.sharding import (
    check_deepspeed_can_train,
    forget_evaluation_wrapper,
    gather_full_state_dict,
    keep_outputs_precise,
)
from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.host_row import PackedBatch, for_counting, host_row
from trl_packing.documents.labels import WEIGHT_COLUMNS
from trl_packing.formatting.responses import DataCollatorForCompletionOnlyLM
from trl_packing.loss.step_loss import StepLoss, without_weights
from trl_packing.packing.collator import PackedCollator
from trl_packing.training.arguments import (
    check_arguments,
    check_loss_options,
    check_some_weights,
    generation_config_of,
    hide_packing,
    is_sharding_sequences,
    reason_for_trl_path,
    unpack_without_capacity,
)
from trl_packing.training.checkpoints import checkpoint_to_resume, write_whole
from trl_packing.training.collators import RunCollators
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.loaders import PackedLoaders
from trl_packing.training.malloc import keep_freed_pages
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.model_card import describe_packing, with_tag
from trl_packing.training.path import RunPath, check_set_afterwards, leave_packing
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.progress_bar import ThroughputOnBar
from trl_packing.training.renamed_weights import load_renamed
from trl_packing.training.report_callback import ReportCallback
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_data import RunData, source_sets
from trl_packing.training.run_isolation import RunIsolation, make_model_ready
from trl_packing.training.run_recorder import RunRecorder
from trl_packing.training.run_report import RunReport
from trl_packing.training.sampling import Sampling
from trl_packing.training.user_loss import UserLoss
from trl_packing.versions import warn_of_untested_versions
from trl_packing.vision.choice import has_images
from trl_packing.vision.run_images import RunImages

if TYPE_CHECKING:
    from peft import PeftConfig, PeftModel
    from transformers import BitsAndBytesConfig, PreTrainedModel

logger = get_logger(__name__)

warn_of_untested_versions()

Method = TypeVar("Method", bound=Callable[..., Any])


def packed_runs_only(method: Method) -> Method:
    """Run TRL's method of the same name instead, while the run takes TRL's path."""

    @wraps(method)
    def choose(self: "PackedSFTTrainer", *args: Any, **kwargs: Any) -> Any:
        if self._run_path.reason is None:
            return method(self, *args, **kwargs)
        return getattr(super(PackedSFTTrainer, self), method.__name__)(*args, **kwargs)

    return choose  # type: ignore[return-value]


class PackedSFTTrainer(SFTTrainer):
    """Supervised fine-tuning that never computes on padding and keeps documents apart.

    With ``packing=True`` a micro-batch is `per_device_train_batch_size` bins of `max_length`
    tokens. With ``packing=False`` an optimizer step holds the documents of the padded run. Either
    way a micro-batch is one flat row of isolated documents.

    A user's data collator, a data set with `with_transform`, and images of a model type that is not
    in docs/images.md take TRL's path unchanged, with a warning. A
    `DataCollatorForCompletionOnlyLM` labels the documents, which are then packed as usual.

    Documents may have `loss_weights`, a number for each token, and `loss_weight`, one for the whole
    document; `loss_weighting` says how the length of a document enters. The loss of a step is the
    weighted mean over its trained tokens, of all micro-batches and ranks, and so is `eval_loss`. In
    `mean_token_accuracy` and `entropy` each trained token has weight 1.

    Args:
        model: a name, or a model of transformers, with or without PEFT.
        args: a `PackedSFTConfig`, a plain `SFTConfig` or `TrainingArguments`. None takes the
            defaults of TRL's `SFTConfig`, padding-free.
        data_collator: a `PackedCollator` or `DataCollatorForCompletionOnlyLM`; others as above.
        train_dataset: rows in any form of docs/data.md, tokenized or not, packed by TRL or not; or
            a stream; or a dictionary of several, each a source (`mixture`).
        eval_dataset: the same, or a dictionary of data sets.
        processing_class: the tokenizer; by default the model's.
        compute_loss_func: a loss of the model's outputs, without weights (docs/loss.md).
        compute_metrics: gets one padded row for each document.
        callbacks: as in TRL, and so are all that follow.
        optimizers: an optimizer and its schedule.
        optimizer_cls_and_kwargs: a class of optimizers and its arguments.
        preprocess_logits_for_metrics: of `compute_metrics`.
        quantization_config: of a model that is named.
        peft_config: of an adapter.
        formatting_func: from a row to its text.
        **newer: parameters of a newer TRL.

    Raises:
        ValueError: settings, columns or data cannot be trained as they are; raised before training.
        RuntimeError: documents leak into each other; raised by `train` and `evaluate`.
    """

    _collators: RunCollators | None = None  # until the packed run is built
    model_accepts_loss_kwargs: bool
    train_dataset: Any
    _signature_columns: list[str]

    def __init__(
        self,
        model: "str | PreTrainedModel | PeftModel",
        args: TrainingArguments | None = None,
        data_collator: Callable[[list[Any]], Any] | None = None,
        train_dataset: Dataset | IterableDataset | dict[str, Any] | None = None,
        eval_dataset: Dataset | IterableDataset | dict[str, Any] | None = None,
        processing_class: PreTrainedTokenizerBase | ProcessorMixin | None = None,
        compute_loss_func: Callable[..., Any] | None = None,
        compute_metrics: Callable[[EvalPrediction], dict[str, Any]] | None = None,
        callbacks: list[TrainerCallback] | None = None,
        optimizers: tuple[Any, Any] = (None, None),
        optimizer_cls_and_kwargs: tuple[type[Any], dict[str, Any]] | None = None,
        preprocess_logits_for_metrics: Callable[..., Any] | None = None,
        quantization_config: "BitsAndBytesConfig | None" = None,
        peft_config: "PeftConfig | None" = None,
        formatting_func: Callable[[dict[str, Any]], Any] | None = None,
        **newer: Any,
    ):
        rest = newer | {
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "formatting_func": formatting_func,
        }
        sets, rows = source_sets(train_dataset, args, data_collator), train_dataset
        train_dataset = next(iter(sets.values())) if sets else rows  # `_run_data` prepares all
        reason = reason_for_trl_path(train_dataset, data_collator, packs_images=True)
        self._images = RunImages()
        if reason is None and has_images(rows):
            reason = self._images.why_not_packed(model, rows, eval_dataset, args, processing_class)
        self._run_path = RunPath(reason)
        self._options = options = PackingOptions.of(args)
        check_loss_options(options, compute_loss_func, reason)
        self._step_loss, self._user_loss = StepLoss(self), UserLoss(self, PackedSFTTrainer)
        self._meter = ThroughputMeter(self, self._step_loss.trained)
        self._sampling = Sampling(args, image_loads=self._images.loads)
        self._epochs = ResumedEpochs(self, self._sampling)
        self._run_data = RunData(self, options, self._sampling, sets, self._images.tokenize)
        self._recorder = RunRecorder(
            self, self._meter, lambda: self._run_path.in_words(packs=self._sampling.packing)
        )
        rest["callbacks"] = [*(callbacks or ()), self._recorder]
        if reason:
            leave_packing(args, reason, train_dataset=train_dataset)
            super().__init__(
                model, args, data_collator, train_dataset, eval_dataset, processing_class, **rest
            )
            return
        unpack_without_capacity(args)
        check_arguments(args, train_dataset)
        if isinstance(data_collator, DataCollatorForCompletionOnlyLM):
            self._run_data.completion_only, data_collator = data_collator, None
            processing_class = processing_class or self._run_data.completion_only.tokenizer
        rows, eval_dataset = self._images.take_all(rows, eval_dataset)
        if sets:
            self._run_data.sets = rows
        train_dataset = next(iter(rows.values())) if sets else rows
        # Data sets are prepared before `self.model` is set.
        self._run_data.generation_config = generation_config_of(model, args)
        with hide_packing(args) as (self._sampling.packing, self._sampling.eval_packing):
            super().__init__(
                model, args, None, train_dataset, eval_dataset, processing_class, **rest
            )
        self._images.is_built = True
        if self._images.contradiction is not None:
            self._take_trl_path(self._images.contradiction)
            return
        keep_outputs_precise(self.accelerator)
        shards_sequences = is_sharding_sequences(self.accelerator)
        self._run_data.check(shards_sequences=shards_sequences)
        self._images.check_options(self._options)
        # TRL divides by the tokens of one micro-batch for model classes that do not accept
        # `num_items_in_batch`, although its own loss takes the count: gemma3, Qwen-VL, ...
        self._takes_count: bool = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = True
        if shards_sequences:
            self._run_path.reason = "context or sequence parallelism drops document boundaries"
            logger.warning(f"{self._run_path.reason}: rows are padded, as in TRL")
            return
        self.padding_free = True
        self._build_packed_run(data_collator)

    def _build_packed_run(self, collator: Any) -> None:
        """Make the objects of a packed run, which need the model and the prepared data sets."""
        options, data, epochs, meter = self._options, self._run_data, self._epochs, self._meter
        self._sampling.follow(self)
        self._guard = guard = self._images.guard(
            self.model,
            attention=options.attention,
            isolation_check=options.isolation_check,
            packing_requested=data.packing_requested(),
        )
        make_model_ready(guard, self.args)
        rows = data.pad_to_multiple_of()
        ours = PackedCollator(self._tokenizer.pad_token_id, pad_to_multiple_of=rows)
        collator = self._images.add_to(ours if collator is None else collator, self)
        collators = RunCollators(self, guard, self._sampling, options, collator, rows)
        self._collators = collators
        samples_bins = type(self)._get_train_sampler is PackedSFTTrainer._get_train_sampler
        sharing = PrefixSharing(self, collators, loss_is_ours=self._user_loss.step_is_ours)
        report = RunReport(self, collators, data.counts, sharing, samples_bins=samples_bins)
        report.plan()
        self._run_report = report
        self._planned = self.train_dataset  # the one of the report
        self._isolation = RunIsolation(self, collators, report, sharing)
        self._loaders = PackedLoaders(self, collators, epochs, self._isolation, meter.sources)
        data.check_limits(guard.limits)
        self.add_callback(ReportCallback(report, epochs, self._before_first_step, meter.so_far))
        self.add_callback(ThroughputOnBar(self))

    @property
    def attention(self) -> AttentionChoice | None:
        """The backend that keeps documents of a row apart, and why; None on TRL's path."""
        return None if self._run_path.reason else self._guard.attention

    @property
    def packing_report(self) -> PackingReport:
        """Documents, bins and steps of an epoch; None on TRL's path."""
        return self._run_report.current if self._collators else None  # type: ignore[return-value]

    def _settle_images(self, *, training: bool) -> None:
        """Take TRL's path if no backend is exact with images, while the run still can."""
        packs = self._images.packs and self._run_path.reason is None
        if packs and (reason := self._isolation.why_not_exact(training=training)):
            self._take_trl_path(reason)
            self.model_accepts_loss_kwargs = self._takes_count
            self._epochs.forget()
            self._run_report.forget()

    def _take_trl_path(self, reason: str) -> None:
        """Train rows with images as TRL does, although they were prepared for packing."""
        leave_packing(self.args, reason, compute_loss_func=self.compute_loss_func)
        self._images.give_back(self, reason)
        self._run_path.reason = reason

    def _attention_in_use(self) -> Any:
        """Restore the model's `attn_implementation` at the end of the block."""
        if self._run_path.reason:
            return nullcontext()
        return use_attention(self.model, self._guard.attention)

    def _follow_user(self) -> None:
        """Prepare and plan a training set that was set on the built trainer."""
        collators, dataset = self._collators, self.train_dataset
        if self._run_path.reason or collators is None:
            return
        self._sampling.follow(self)
        ours, packs_images = collators.packed, collators.packed.images is not None
        check_set_afterwards(self.data_collator, ours, dataset, packs_images=packs_images)
        if dataset is not self._planned and dataset is not None:
            self.train_dataset = self._planned = self._run_data.prepare_again(dataset)
            collators.hold_shapes()
            self._run_report.plan()

    # --- data sets ----------------------------------------------------------------------------

    @packed_runs_only
    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: SFTConfig,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        by_trl, prepare = super()._prepare_dataset, self._run_data.prepare
        return prepare(by_trl, dataset, processing_class, args, formatting_func, dataset_name)

    @packed_runs_only
    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Refuse skip_prepare_dataset where TRL would, although it knows only its own collator."""
        if self._skip_prepare_dataset:
            self._run_data.check_nothing_is_skipped(datasets.values())
        if self._collators is not None:
            data_collator = self._collators.padded
        super()._reject_skip_prepare_without_labels(datasets, data_collator)

    @packed_runs_only
    def _remove_unused_columns(self, dataset: Any, description: str | None = None) -> Any:
        """Read documents from Arrow, instead of removing columns and making lists."""
        return self._loaders.documents(dataset, description)

    @packed_runs_only
    def _set_signature_columns_if_needed(self) -> None:
        """Keep the weights of a stream that is evaluated padded, which TRL would remove."""
        super()._set_signature_columns_if_needed()
        self._signature_columns = [*dict.fromkeys([*self._signature_columns, *WEIGHT_COLUMNS])]

    # --- data loaders -------------------------------------------------------------------------

    @packed_runs_only
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if isinstance(train_dataset, ArrowDocuments):
            return self._sampling.for_training(train_dataset)
        return super()._get_train_sampler(train_dataset)

    @packed_runs_only
    def _get_eval_sampler(self, eval_dataset: Any) -> Any:
        if isinstance(eval_dataset, ArrowDocuments) and not self._loaders.evaluates_padded:
            return self._sampling.for_evaluation(eval_dataset)
        return super()._get_eval_sampler(eval_dataset)

    @packed_runs_only
    def get_train_dataloader(self) -> Any:
        self._follow_user()
        return self._loaders.train(super().get_train_dataloader)

    @packed_runs_only
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        self._follow_user()
        return self._loaders.evaluate(super().get_eval_dataloader, eval_dataset)

    @packed_runs_only
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        self._follow_user()
        return self._loaders.predict(super().get_test_dataloader, test_dataset)

    # --- training -----------------------------------------------------------------------------

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, on all ranks together also after an evaluation; resume from a whole checkpoint."""
        self._follow_user()
        self._settle_images(training=True)
        with self._training(resume_from_checkpoint) as checkpoint:
            return super().train(checkpoint, *args, **kwargs)

    @contextmanager
    def _training(self, resume_from_checkpoint: Any) -> Iterator[Any]:
        """Yield the checkpoint to resume from. Raise ValueError for what would stop the run."""
        check_deepspeed_can_train(self)
        if self._run_path.reason is None:
            check_some_weights(self._run_data.all(), self.compute_loss_func)
        forget_evaluation_wrapper(self)
        self._sampling.agree_on_seed(self)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self)
        with (
            self._attention_in_use(),
            use_current_row(None),
            keep_freed_pages(self.args.device.type == "cpu"),
            self._epochs.resuming(checkpoint),
            self._recorder.following(checkpoint),
        ):
            yield checkpoint

    def _before_first_step(self) -> None:
        """Check isolation, when the model is wrapped and nothing is trained yet."""
        scale_noise_by_document(self._guard.base_model)
        with self._images.explaining(self):
            self._isolation.ensure(self.model_wrapped, self.train_dataset, training=True)

    @packed_runs_only
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count the epochs and steps that are left from where a resumed epoch continues."""
        return self._epochs.schedule(super().set_initial_training_values(args, dataloader))

    def _init_training_state(
        self,
        max_steps: int,
        num_update_steps_per_epoch: int,
        num_train_epochs: int,
        resume_from_checkpoint: str | None,
        trial: Any,
    ) -> tuple[int, int]:
        """Continue where the record in the checkpoint says, or where a stream was."""
        epoch, skipped = super()._init_training_state(
            max_steps, num_update_steps_per_epoch, num_train_epochs, resume_from_checkpoint, trial
        )
        self._meter.start_run(self._total_train_tokens)
        return self._epochs.resume(epoch, skipped, resume_from_checkpoint)

    @packed_runs_only
    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """Run an epoch, and measure each of its steps before it is trained."""
        skipped = kwargs["steps_trained_in_current_epoch"]
        self._epochs.begin_epoch(epoch, epochs_trained=kwargs["epochs_trained"], skipped=skipped)
        with self._measuring_steps():
            super()._run_epoch(epoch=epoch, **kwargs)

    @contextmanager
    def _measuring_steps(self) -> Iterator[None]:
        """Measure each step as `get_batch_samples` returns it, which may be a user's."""
        of_user = vars(self).get("get_batch_samples")
        self.get_batch_samples: Any = partial(self._measured, self.get_batch_samples)
        try:
            yield
        finally:
            del self.get_batch_samples
            if of_user is not None:
                self.get_batch_samples = of_user
            self._step_loss.forget()

    def _measured(
        self, read: Callable[..., Any], epoch_iterator: Any, num_batches: int, device: Any
    ) -> Any:
        """Measure a step before its first micro-batch, and announce each row to the model."""
        batches, num_items = read(epoch_iterator, num_batches, device)
        if num_items is None:
            num_items = self._get_num_items_in_batch(batches, device)
        weighted = self._loaders.trains_weighted
        self._images.measure(batches)
        self._step_loss.measure(batches, num_items, device, weighted=weighted)
        self._meter.count(batches, self._loaders.room)
        return AnnouncedBatches(batches), num_items

    @packed_runs_only
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Announce the row, to NEFTune too: `compute_loss` and the caller may be a user's."""
        hides = self._user_loss.hides_count(self._takes_count)
        with (
            use_current_row(inputs),
            self._user_loss.watch_other_models(),
            self._step_loss.hide_num_items(num_items_in_batch, hide=hides) as count,
            announce_documents(boundaries=inputs.get("cu_seq_lens_q")),
        ):
            return super().training_step(model, inputs, count)

    @packed_runs_only
    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a row to the device, its CPU copy and its float32 weights with it."""
        prepared, row = super()._prepare_inputs(inputs), host_row(inputs)
        prepared = prepared if row is None else PackedBatch(prepared, row)
        # With a cache, another model would not read the positions.
        prepared.update({} if prepared.get("cu_seq_lens_q") is None else {"use_cache": False})
        self._step_loss.keep_weights(inputs, prepared)
        replace_current_row(prepared)
        return prepared

    @packed_runs_only
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weight each token; TRL weights all tokens the same, and all MoE micro-batches too."""
        if self._user_loss.is_between():
            inputs = without_weights(inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        padded = self._loaders.evaluates_padded
        return self._step_loss.compute(
            model, inputs, return_outputs, num_items_in_batch, padded=padded
        )

    @packed_runs_only
    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Forget the row, which is trained by now, and count the tokens of its documents."""
        set_current_row(None)
        super()._track_num_input_tokens(for_counting(inputs))

    # --- logging ------------------------------------------------------------------------------

    @packed_runs_only
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        self._meter.share_before_log()
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @packed_runs_only
    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """Log the totals too, and count documents as transformers' samples, not bins."""
        num_train_samples = self._meter.finish_run(num_train_samples)
        return super()._finalize_training(trial, num_train_samples, start_time)

    @packed_runs_only
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what a person reads; all that was measured is in `state.log_history`."""
        # Not by TRL's `_metrics`: the totals would be lost where the last step was evaluated, for
        # TRL adds those of training only to a model in training mode.
        shown, measured = self._meter.take_logs()
        logs.update(shown)
        super().log(logs, start_time)
        self.state.log_history[-1].update(measured)

    # --- checkpoints --------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the place in the epoch too, and delete older checkpoints when this one is whole."""
        with self._meter.pause(), write_whole(self, trial) as checkpoint:
            self._epochs.save(checkpoint)
            self._recorder.save(checkpoint)
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights also where files have other names than the model."""
        if not load_renamed(self, resume_from_checkpoint, model):
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load weights also where files have other names than the model."""
        if not load_renamed(self, self.state.best_model_checkpoint):
            super()._load_best_model()

    def create_model_card(
        self, model_name: str | None = None, dataset_name: str | None = None, tags: Any = None
    ) -> None:
        """Say in the model card what was packed, lost and checked; not on TRL's path."""
        report = self.packing_report
        super().create_model_card(model_name, dataset_name, with_tag(tags) if report else tags)
        if report and self.is_world_process_zero():
            describe_packing(self.args.output_dir, report)

    def _save_rng_state(self, output_dir: str) -> None:
        """Save the position in a stream too, of which each rank has another."""
        super()._save_rng_state(output_dir)
        self._epochs.save_stream(output_dir)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model on any engine; parts of checkpoints are saved as configured."""
        with nullcontext() if _internal_call else gather_full_state_dict(self.accelerator):
            super().save_model(output_dir, _internal_call)

    # --- evaluation ---------------------------------------------------------------------------

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        if self.compute_metrics is None:
            self._settle_images(training=False)
        with self._evaluating(padded=self.compute_metrics is not None):
            return super().evaluate(*args, **kwargs)

    def predict(self, test_dataset: Any, *args: Any, **kwargs: Any) -> Any:
        """Predict as TRL does, but also from a data set that is not tokenized yet."""
        if not (self._run_path.reason or self._skip_prepare_dataset):
            test_dataset = self._run_data.prepare_later(test_dataset, "test")
        with self._evaluating(padded=not self.args.prediction_loss_only):
            return super().predict(test_dataset, *args, **kwargs)

    @contextmanager
    def _evaluating(self, *, padded: bool) -> Iterator[None]:
        """Evaluate padded where logits are requested (callers expect a row for each document)."""
        is_trls = self._run_path.reason is not None
        rows = nullcontext() if is_trls else self._loaders.evaluating(padded=padded)
        with rows, self._attention_in_use(), use_current_row(None), self._meter.pause():
            yield

    @packed_runs_only
    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Report the mean over all trained tokens, not the mean of micro-batch means."""
        with restore_current_row():
            with self._step_loss.evaluating(self._loaders.sources) as sums:
                output = super().evaluation_loop(AnnouncedLoader(dataloader), *args, **kwargs)
            prefix = kwargs.get("metric_key_prefix", "eval")
            self._step_loss.write_metrics(sums, self._loaders.sources, output.metrics, prefix)
        return output

    @packed_runs_only
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce the row, and forget that of a step outside of `evaluate`."""
        with use_current_row(inputs):
            return super().prediction_step(model, inputs, *args, **kwargs)
