"""`PackedSFTTrainer`: TRL's `SFTTrainer` on documents that are packed when they are sampled.

Each method of Hugging Face is overridden once, in a few lines that call one of these objects:

    _run_path      ours, or TRL's unchanged path                          training/path.py
    _user_changes  what a user sets on a built trainer                    training/path.py
    _guard         stops before the first step if documents leak          isolation/guard.py
    _sampling      the documents of each micro-batch                      training/sampling.py
    _collators     rows: packed, or padded where logits are requested     training/collators.py
    _loaders       data loaders of training, evaluation and streams       training/loaders.py
    _step_loss     one weighted mean of a step, and of an evaluation set  loss/step_loss.py
    _meter         tokens per second, utilization, MFU                    training/metrics.py
    _epochs        the place at which a resumed run continues             training/resuming.py
    _run_report    the summary that is printed when training starts       training/run_report.py
    _recorder      the run's page, run.html, and its record, run.json     training/run_recorder.py

`trl_packing/seams.py` lists the overridden methods with their parameters.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from functools import partial, wraps
from pathlib import Path
from typing import Any, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from transformers.trainer_utils import PREFIX_CHECKPOINT_DIR
from trl import SFTConfig, SFTTrainer
from trl.trainer.utils import global_then_local_main_first

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.implementation import restore_implementation
from trl_packing.attention.install import use_attention
from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.eos import EosRule
from trl_packing.data.preparation import prepare
from trl_packing.data.prepared import records_of
from trl_packing.data.rules import Preparation
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.host_row import PackedBatch, for_counting, host_row
from trl_packing.documents.labels import WEIGHT_COLUMNS
from trl_packing.formatting.completion_only_collator import DataCollatorForCompletionOnlyLM
from trl_packing.formatting.row_format import RowFormat
from trl_packing.isolation.guard import NotIsolated, Precision
from trl_packing.loss.lm_head import add_trained_positions_head
from trl_packing.loss.step_loss import StepLoss
from trl_packing.models.neftune import announce_documents, scale_noise_by_document
from trl_packing.models.sharding import (
    check_deepspeed_can_train,
    forget_evaluation_wrapper,
    gather_full_state_dict,
    keep_outputs_precise,
)
from trl_packing.models.state import temporarily
from trl_packing.packing.collator import PackedCollator
from trl_packing.recognition.current_row import (
    AnnouncedBatches,
    AnnouncedLoader,
    replace_current_row,
    restore_current_row,
    set_current_row,
)
from trl_packing.training.arguments import (
    check_arguments,
    check_loss_options,
    check_nothing_is_skipped,
    check_nothing_is_weighted,
    check_parallelism,
    check_some_weights,
    check_weights_and_sources,
    generation_config_of,
    hide_packing,
    packs_by_default,
    reason_for_trl_path,
    refuse_options,
    refuse_prepared,
)
from trl_packing.training.checkpoints import check_resumable, checkpoint_to_resume, write_whole
from trl_packing.training.collators import RunCollators
from trl_packing.training.epoch_report import PackingReport
from trl_packing.training.loaders import PackedLoaders
from trl_packing.training.malloc import keep_freed_pages
from trl_packing.training.metrics import ThroughputMeter, ThroughputOnBar
from trl_packing.training.mixed_stream import check_stream_is_not_mixed
from trl_packing.training.model_card import describe_packing, with_tag
from trl_packing.training.path import RunPath, UserChanges
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.renamed_weights import load_renamed, loads_by_name
from trl_packing.training.report_callback import ReportCallback
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_recorder import RunRecorder
from trl_packing.training.run_report import RunReport
from trl_packing.training.sampling import Sampling
from trl_packing.training.source_sets import SourceSets, prepare_sources, trains_completions
from trl_packing.versions import warn_of_untested_versions
from trl_packing.vision.choice import has_images
from trl_packing.vision.run_images import RunImages

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


def follows_user(method: Method) -> Method:
    """Choose the path first, from what the user has set on the trainer since."""

    @wraps(method)
    def follow(self: "PackedSFTTrainer", *args: Any, **kwargs: Any) -> Any:
        self._follow_user()
        return method(self, *args, **kwargs)

    return follow  # type: ignore[return-value]


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

    Raises:
        ValueError: settings, columns or data cannot be trained as they are; raised before training.
        RuntimeError: documents leak into each other; raised by `train` and `evaluate`.
    """

    _collators: RunCollators | None = None  # on TRL's path, and while TRL's constructor runs
    _has_training_set = False  # TRL's constructor prepares it before evaluation sets
    model_accepts_loss_kwargs: bool
    _signature_columns: list[str]

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
        self._source_sets: SourceSets | None = None
        rows = train_dataset
        if isinstance(train_dataset, dict):
            self._source_sets = SourceSets(train_dataset, args, data_collator)
            train_dataset = self._source_sets.first  # the others follow in `_prepare_dataset`
        else:
            check_stream_is_not_mixed(train_dataset, PackingOptions.of(args))
        reason = reason_for_trl_path(train_dataset, data_collator, packs_images=True)
        self._images = RunImages()
        if reason is None and has_images(rows):
            reason = self._images.why_not_packed(model, rows, eval_dataset, args, processing_class)
        self._run_path = RunPath(reason, is_fixed=reason is not None)
        self._options = PackingOptions.of(args)
        check_loss_options(self._options, kwargs.get("compute_loss_func"), reason)
        self._step_loss = StepLoss(self)
        self._meter = ThroughputMeter(
            self, self._step_loss.trained, self._step_loss.trained_sources
        )
        self._sampling = Sampling(self)
        self._sampling.image_loads = self._images.loads
        self._epochs = ResumedEpochs(self, self._sampling)
        self._completion_only: DataCollatorForCompletionOnlyLM | None = None
        self._preparation: dict[str, PreparationCounts] = {}
        self._recorder = RunRecorder(self, self._meter, self._path_in_words)
        kwargs["callbacks"] = [*(kwargs.get("callbacks") or ()), self._recorder]
        if reason:
            refuse_options(self._options, reason)
            refuse_prepared([train_dataset], reason)
            logger.warning(f"{reason}: taking TRL's path unchanged, without packing by us")
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
        rows, eval_dataset = self._images.take_all(rows, eval_dataset)
        train_dataset = rows if self._source_sets is None else self._source_sets.replace(rows)
        # Data sets are prepared before `self.model` is set.
        self._generation_config = generation_config_of(model, args)
        with hide_packing(args) as (packing, eval_packing):
            self._sampling.packing, self._sampling.eval_packing = packing, eval_packing
            super().__init__(
                model, args, None, train_dataset, eval_dataset, processing_class, **kwargs
            )
        self._images.is_built = True
        if self._images.contradiction is not None:
            self._take_trl_path(self._images.contradiction)
            return
        keep_outputs_precise(self.accelerator)
        if self.args.world_size == 1:  # accelerate would cut boundaries as if they were rows
            loading = self.accelerator.dataloader_config
            loading.split_batches = loading.dispatch_batches = False
        self._check_settings_and_data()
        # TRL divides by the tokens of one micro-batch for model classes that do not accept
        # `num_items_in_batch`, although its own loss takes the count: gemma3, Qwen-VL, ...
        takes_count: bool = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = True
        if self._shards_sequences():
            reason = "context or sequence parallelism drops document boundaries"
            self._run_path = RunPath(reason, is_fixed=True)
            logger.warning(f"{reason}: rows are padded, as in TRL")
            return
        self.padding_free = True
        self._build_packed_run(data_collator, takes_count=takes_count)

    def _check_settings_and_data(self) -> None:
        """Raise ValueError for settings and data that cannot be trained as they are."""
        shards_sequences = self._shards_sequences()
        check_parallelism(
            self.args,
            self._options,
            packs=self._packing_requested(),
            shards_sequences=shards_sequences,
            balances_experts=self.aux_loss_enabled,
            pad_to_multiple_of=self._pad_to_multiple_of(),
        )
        train, *evaluated = self._all_datasets()
        if shards_sequences:
            check_nothing_is_weighted([train, *evaluated], self._options)
        check_weights_and_sources(train, evaluated, self._options, self.compute_loss_func)
        self._images.check_options(self._options)

    def _build_packed_run(self, collator: PackedCollator | None, *, takes_count: bool) -> None:
        """Make the objects of a packed run, which need the model and the prepared data sets."""
        args, options, rows = self.args, self._options, self._pad_to_multiple_of()
        self._guard = guard = self._images.guard(
            self.model,
            attention=options.attention,
            isolation_check=options.isolation_check,
            packing_requested=self._packing_requested(),
        )
        dtype = torch.bfloat16 if args.bf16 else torch.float16 if args.fp16 else None
        guard.select_backend(Precision(args.device.type, dtype))
        if collator is None:
            collator = PackedCollator(self._tokenizer.pad_token_id, pad_to_multiple_of=rows)
        collator = self._images.add_to(collator, self)
        self._collators = collators = RunCollators(
            self, guard, self._sampling, options, collator, rows
        )
        add_trained_positions_head(guard.base_model)
        restore_implementation(guard.base_model)
        samples_bins = type(self)._get_train_sampler is PackedSFTTrainer._get_train_sampler
        sharing = PrefixSharing(
            self, guard, collators, options.prefix_sharing, loss_is_ours=self._step_loss_is_ours
        )
        self._sampling.draws_groups = sharing.draws_groups
        self._run_report = report = RunReport(
            self,
            guard,
            collators,
            self._sampling,
            self._preparation,
            sharing,
            samples_bins=samples_bins,
        )
        report.plan()
        self._loaders = PackedLoaders(
            self,
            guard,
            collators,
            self._sampling,
            self._epochs,
            report,
            sharing,
            self._meter.sources,
            options,
        )
        self._user_changes = UserChanges(
            self,
            self._run_path,
            collators,
            self._epochs,
            report,
            options,
            partial(self._prepare_later, packing=self._sampling.packing, name="train"),
            takes_count=takes_count,
        )
        for name, dataset in self._named_eval_datasets().items():
            guard.limits.check(dataset, name)
        self.add_callback(
            ReportCallback(report, self._epochs, self._before_first_step, self._meter.so_far)
        )
        self.add_callback(ThroughputOnBar(self))

    @property
    def attention(self) -> AttentionChoice:
        """The attention backend that keeps the documents of a packed row apart, and the reason."""
        return self._guard.attention

    @property
    def packing_report(self) -> PackingReport:
        """Documents, bins and steps of an epoch; None on TRL's path."""
        return self._run_report.current if self._collators else None  # type: ignore[return-value]

    def _named_eval_datasets(self) -> dict[str, Any]:
        given = self.eval_dataset
        return given if isinstance(given, dict) else {"eval": given}

    def _all_datasets(self) -> list[Any]:
        return [self.train_dataset, *self._named_eval_datasets().values()]

    def _packing_requested(self) -> bool:
        return self._sampling.packing or self._sampling.eval_packing or self.args.padding_free

    def _pad_to_multiple_of(self) -> int | None:
        of_collator = getattr(self._completion_only, "pad_to_multiple_of", None)
        return self.args.pad_to_multiple_of or of_collator

    def _shards_sequences(self) -> bool:
        parallelism = self.accelerator.parallelism_config
        return parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)

    def _follow_user(self) -> None:
        """Choose the path from the collator and the training set as they are now."""
        if not self._run_path.is_fixed:
            self._user_changes.follow()

    def _settle_images(self, *, training: bool) -> None:
        """Check isolation with images while the run can still take TRL's path."""
        is_sharded = self.is_fsdp_enabled or self.is_deepspeed_enabled  # cannot run yet
        is_late = self.is_in_train or is_sharded
        if self._run_path.reason or not self._images.packs or is_late:
            return
        try:
            with self._attention_in_use(), self.accelerator.autocast():
                self._loaders.ensure_isolated(
                    self.model, self.train_dataset, training=training, planned=False
                )
        except NotIsolated as error:
            if self._options.attention != "auto":
                raise
            found = str(error).split(". ")[0]  # without its remedies
            self._take_trl_path(f"no attention backend is exact with images ({found})")
            return
        if self.args.world_size > 1 or self.args.torch_compile:
            self._guard.forget_checks()  # the model will be wrapped before the first step

    def _take_trl_path(self, reason: str) -> None:
        """Train rows with images as TRL does from now on, although they were prepared for packing.

        Raises:
            ValueError: a setting would be ignored or refused there.
        """
        refuse_options(self._options, reason)
        check_loss_options(self._options, self.compute_loss_func, reason)
        if packs_by_default(self.args):
            self.args.packing = False
        self._images.give_back(self, reason)
        logger.warning(f"{reason}: taking TRL's path unchanged, without packing by us")
        self._run_path.reason, self._run_path.is_fixed = reason, True
        if self._collators is not None:
            self.model_accepts_loss_kwargs = self._user_changes.takes_count
            self._epochs.forget()
            self._run_report.forget()
            self._collators = None

    def _path_in_words(self) -> str:
        if self._run_path.reason:
            return f"TRL's path: {self._run_path.reason}"
        return "packed" if self._sampling.packing else "padding-free"

    def _attention_in_use(self) -> Any:
        """Restore the model's `attn_implementation` at the end of the block."""
        if self._run_path.reason:
            return nullcontext()
        return use_attention(self.model, self.attention)

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
        prepare = partial(self._prepare_rows, processing_class, args, formatting_func)
        name = self._name_of_set(dataset_name)
        sets = self._source_sets if name == "train" else None
        documents, counts = prepare_sources(sets, prepare, args, dataset, name)
        self._preparation |= {} if counts is None else {name: counts}
        return documents

    def _name_of_set(self, name: str) -> str:
        """Return another name for an evaluation set that a user has called "train"."""
        if name == "train" and self._has_training_set:
            return "evaluated train"
        self._has_training_set = True
        return name

    def _prepare_rows(
        self, processing_class: Any, args: SFTConfig, formatting_func: Any, dataset: Any, name: str
    ) -> tuple[Any, PreparationCounts | None]:
        """Return the documents of a data set, and counts of what was kept and lost."""
        if name == "train" and records_of(dataset):  # TRL does not see the rows, which decide it
            self.completion_only_loss = trains_completions(dataset, args.completion_only_loss)
        completion_only = self.completion_only_loss
        if self._source_sets is not None:  # TRL decides once, by the first row of the first of them
            completion_only = trains_completions(dataset, args.completion_only_loss)
        rules = Preparation(
            args,
            processing_class,
            packing=self._sampling.packing,
            row_format=RowFormat.from_args(
                args,
                self._tokenizer,
                chat_template=self.chat_template,
                completion_only=completion_only,
            ),
            eos=EosRule.from_args(args, self._tokenizer, processing_class, self._generation_config),
            by_trl=partial(self._tokenized_by_trl, processing_class, args),
            labeler=self._completion_only and self._completion_only.labeler,
        )
        with (
            global_then_local_main_first(),  # one rank writes the cache, the others read it
            temporarily(self, completion_only_loss=completion_only),  # TRL's code reads it
        ):
            return prepare(
                self._images.tokenize(dataset, rules, self.chat_template, name),
                rules,
                formatting_func=formatting_func,
                name=name,
            )

    def _tokenized_by_trl(
        self, processing_class: Any, args: SFTConfig, dataset: Any, formatting_func: Any, name: str
    ) -> Any:
        # TRL would cut at max_length without counting, and pack in windows of 1,000 rows.
        unlimited = copy.copy(args)
        unlimited.max_length = None
        return super()._prepare_dataset(
            dataset, processing_class, unlimited, False, formatting_func, name
        )

    def _prepare_later(self, dataset: Any, *, packing: bool, name: str) -> Any:
        """Return the documents of rows that were not passed to the constructor."""
        formatting_func = self._formatting_func
        with temporarily(self, _has_training_set=name != "train"):
            return self._prepare_dataset(
                dataset, self.processing_class, self.args, packing, formatting_func, name
            )

    @packed_runs_only
    def _reject_skip_prepare_without_labels(self, datasets: Any, data_collator: Any) -> None:
        """Refuse skip_prepare_dataset where TRL would, although it knows only its own collator."""
        if self._skip_prepare_dataset:
            check_nothing_is_skipped(self._options, self._completion_only, datasets.values())
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
        missing = [name for name in WEIGHT_COLUMNS if name not in self._signature_columns]
        self._signature_columns = [*self._signature_columns, *missing]

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

    @follows_user
    @packed_runs_only
    def get_train_dataloader(self) -> Any:
        return self._loaders.train(super().get_train_dataloader)

    @follows_user
    @packed_runs_only
    def get_eval_dataloader(self, eval_dataset: Any = None) -> Any:
        return self._loaders.evaluate(super().get_eval_dataloader, eval_dataset)

    @follows_user
    @packed_runs_only
    def get_test_dataloader(self, test_dataset: Any) -> Any:
        return self._loaders.predict(super().get_test_dataloader, test_dataset)

    # --- training -----------------------------------------------------------------------------

    @follows_user
    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, on all ranks together also after an evaluation; resume from a whole checkpoint."""
        self._settle_images(training=True)
        checkpoint = self._prepare_to_train(resume_from_checkpoint)
        with self._training(checkpoint):
            return super().train(checkpoint, *args, **kwargs)

    def _prepare_to_train(self, resume_from_checkpoint: Any) -> Any:
        """Return the checkpoint to resume from. Raise ValueError for what would stop the run."""
        check_deepspeed_can_train(self)
        if self._run_path.reason is None:
            check_some_weights(self._all_datasets(), self.compute_loss_func)
        forget_evaluation_wrapper(self)
        # accelerate draws the order of documents from this seed; ranks must agree on it.
        seed = self.args.seed if self.model_init is not None else torch.initial_seed()
        self._sampling.torch_seed = broadcast_object_list([seed])[0]
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self.args.output_dir)
        check_resumable(checkpoint, self)
        return checkpoint

    @contextmanager
    def _training(self, checkpoint: Any) -> Iterator[None]:
        with (
            self._attention_in_use(),
            restore_current_row(),
            keep_freed_pages(self.args.device.type == "cpu"),
            self._epochs.resuming(checkpoint),
            self._recorder.following(checkpoint),
        ):
            set_current_row(None)
            yield

    def _before_first_step(self) -> None:
        """Check isolation, when the model is wrapped and nothing is trained yet."""
        scale_noise_by_document(self._guard.base_model)
        with self._images.explaining(self):
            self._loaders.ensure_isolated(self.model_wrapped, self.train_dataset, training=True)

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
        """Run an epoch, or its rest, which has fewer micro-batches and steps."""
        names = ("steps_in_epoch", "num_update_steps_per_epoch")
        numbers = self._epochs.begin_epoch(
            epoch,
            {name: kwargs[name] for name in names},
            epochs_trained=kwargs["epochs_trained"],
            skipped=kwargs["steps_trained_in_current_epoch"],
        )
        super()._run_epoch(epoch=epoch, **kwargs | numbers)

    @packed_runs_only
    def get_batch_samples(self, epoch_iterator: Any, num_batches: int, device: Any) -> Any:
        """Measure a step before its first micro-batch, and announce each row to the model."""
        batches, num_items = super().get_batch_samples(epoch_iterator, num_batches, device)
        weighted = self._loaders.trains_weighted
        self._images.measure(batches)
        self._step_loss.measure(batches, num_items, device, weighted=weighted)
        self._meter.count(batches, self._loaders.room)
        return AnnouncedBatches(batches), num_items

    @packed_runs_only
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Announce the row, to NEFTune too: `compute_loss` and the caller may be a user's."""
        with (
            restore_current_row(),
            self._step_loss.hide_num_items(num_items_in_batch, hide=self._hides_count()) as count,
            announce_documents(boundaries=inputs.get("cu_seq_lens_q")),
        ):
            set_current_row(inputs)
            return super().training_step(model, inputs, count)

    def _hides_count(self) -> bool:
        """Return whether `compute_loss` is a user's, which gets no number of items from TRL."""
        takes_count = self._user_changes.takes_count or self.compute_loss_func is not None
        return not (self._loss_is_ours() or takes_count)

    def _loss_is_ours(self) -> bool:
        return getattr(self.compute_loss, "__func__", None) is PackedSFTTrainer.compute_loss

    def _step_loss_is_ours(self) -> bool:
        """Return whether a user's `training_step`, if there is one, takes its loss from ours."""
        step = getattr(self.training_step, "__func__", self.training_step)
        names = getattr(getattr(step, "__code__", None), "co_names", ())
        calls_ours = not {"compute_loss", "training_step"}.isdisjoint(names)
        return self._loss_is_ours() and (step is PackedSFTTrainer.training_step or calls_ours)

    @packed_runs_only
    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a row to the device, its CPU copy and its float32 weights with it."""
        prepared, row = super()._prepare_inputs(inputs), host_row(inputs)
        prepared = prepared if row is None else PackedBatch(prepared, row)
        self._step_loss.keep_weights(inputs, prepared)
        replace_current_row(prepared)
        return prepared

    @packed_runs_only
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weight each token; TRL weights all tokens the same, and all MoE micro-batches too."""
        parent, padded = super().compute_loss, self._loaders.evaluates_padded
        return self._step_loss.compute(
            parent, model, inputs, return_outputs, num_items_in_batch, padded=padded
        )

    @packed_runs_only
    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Forget the row, which is trained by now, and count the tokens of its documents."""
        set_current_row(None)
        super()._track_num_input_tokens(for_counting(inputs))

    # --- logging ------------------------------------------------------------------------------

    @packed_runs_only
    def _maybe_log_save_evaluate(self, *args: Any, **kwargs: Any) -> None:
        is_new = self.state.global_step > self._globalstep_last_logged  # as the parent asks
        logs = self.control.should_log and is_new
        others = self.control.should_evaluate or self.control.should_save
        if self._meter.is_running and (logs or others):
            self._total_train_tokens = self._meter.share(self._metrics["train"], log=logs)
        super()._maybe_log_save_evaluate(*args, **kwargs)

    @packed_runs_only
    def _finalize_training(self, trial: Any, num_train_samples: float, start_time: float) -> Any:
        """Log the totals too, and count documents as transformers' samples, not bins."""
        if self._meter.is_running:
            means = self._metrics["train"]
            self._total_train_tokens = self._meter.share(means, log=False)
            first_step = getattr(self, "_initial_global_step", None)
            num_train_samples = self._meter.log_run(means, num_train_samples, first_step)
        return super()._finalize_training(trial, num_train_samples, start_time)

    @packed_runs_only
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        # Not by TRL's `_metrics`: the totals would be lost where the last step was evaluated, for
        # TRL adds those of training only to a model in training mode.
        logs.update(self._meter.take_logs())
        super().log(logs, start_time)

    # --- checkpoints --------------------------------------------------------------------------

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the place in the epoch too, and delete older checkpoints when this one is whole."""
        name = f"{PREFIX_CHECKPOINT_DIR}-{self.state.global_step}"
        checkpoint = Path(self._get_output_dir(trial=trial)) / name
        with self._meter.pause(), write_whole(checkpoint, self):
            self._epochs.save(checkpoint)
            self._recorder.save(checkpoint)
            super()._save_checkpoint(model, trial)

    def _load_from_checkpoint(self, resume_from_checkpoint: str, model: Any = None) -> None:
        """Load weights also where files have other names than the model."""
        model = self.model if model is None else model
        if loads_by_name(self, resume_from_checkpoint, model):
            load_renamed(Path(resume_from_checkpoint), model)
        else:
            super()._load_from_checkpoint(resume_from_checkpoint, model)

    def _load_best_model(self) -> None:
        """Load weights also where files have other names than the model."""
        best = self.state.best_model_checkpoint
        if loads_by_name(self, best, self.model):
            load_renamed(Path(best), self.model)
        else:
            super()._load_best_model()

    def create_model_card(
        self,
        model_name: str | None = None,
        dataset_name: str | None = None,
        tags: str | list[str] | None = None,
    ) -> None:
        """Say in the model card what was packed, lost and checked; not on TRL's path."""
        report = self.packing_report
        super().create_model_card(model_name, dataset_name, with_tag(tags) if report else tags)
        if report and self.is_world_process_zero():
            describe_packing(Path(self.args.output_dir) / "README.md", report)

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
            packing = self._sampling.eval_packing
            test_dataset = self._prepare_later(test_dataset, packing=packing, name="test")
        with self._evaluating(padded=not self.args.prediction_loss_only):
            return super().predict(test_dataset, *args, **kwargs)

    @contextmanager
    def _evaluating(self, *, padded: bool) -> Iterator[None]:
        """Evaluate padded where logits are requested (callers expect a row for each document)."""
        with ExitStack() as stack:
            if not self._run_path.is_fixed:
                stack.enter_context(self._loaders.evaluating(padded=padded))
            stack.enter_context(self._attention_in_use())
            stack.enter_context(restore_current_row())
            stack.enter_context(self._meter.pause())
            set_current_row(None)
            yield

    @packed_runs_only
    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Report the mean over all trained tokens, not the mean of micro-batch means."""
        with restore_current_row():
            with self._step_loss.evaluating(self._loaders.sources) as sums:
                output = super().evaluation_loop(AnnouncedLoader(dataloader), *args, **kwargs)
            prefix, means = kwargs.get("metric_key_prefix", "eval"), self._metrics["eval"]
            self._step_loss.write_metrics(sums, output.metrics, means, prefix)
        return output

    @packed_runs_only
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Announce the row, and forget that of a step outside of `evaluate`."""
        with restore_current_row():
            set_current_row(inputs)
            return super().prediction_step(model, inputs, *args, **kwargs)
