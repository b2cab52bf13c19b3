"""`PackedSFTTrainer`: TRL's `SFTTrainer` on documents that are packed when they are sampled.

Each method of Hugging Face is overridden once, in a few lines that call an object of the run; see
`__init__` and `_build_packed_run`. `tests/seams.py` lists the methods with their parameters.

`_trl_path` says why a run takes TRL's path; then each override calls TRL's method. It is decided
before anything else exists.
"""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace
from functools import partial, wraps
from typing import TYPE_CHECKING, Any, TypeVar

import torch
from accelerate.logging import get_logger
from accelerate.utils import broadcast_object_list
from datasets import Dataset, IterableDataset
from transformers import (
    EvalPrediction,
    PreTrainedTokenizerBase,
    ProcessorMixin,
    TrainerCallback,
    TrainingArguments,
)
from trl import SFTTrainer

from trl_packing.attention.backends import AttentionChoice
from trl_packing.attention.calls import (
    CurrentBatches,
    replace_current_row,
    set_current_row,
    settle_first,
    use_current_row,
)
from trl_packing.attention.install import use_attention
from trl_packing.attention.model_facts import (
    check_model,
    layer_values,
    temporarily,
    text_config,
)
from trl_packing.attention.sequence_parallel import group_of_row
from trl_packing.data.files import records_of
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.host_row import PackedBatch, for_counting, host_row, parts_of, send
from trl_packing.documents.labels import SOURCE_WEIGHTS, TOKEN_WEIGHTS
from trl_packing.loss.step_loss import StepLoss, without_weights
from trl_packing.loss.sums import LossSums
from trl_packing.pages.record import facts_of_data
from trl_packing.run.arguments import (
    check_ranks,
    check_set_afterwards,
    explain_missing_marks,
    hide_packing,
    leave_packing,
    refuse_model_init,
)
from trl_packing.run.report import PackingReport
from trl_packing.run.run import Run, TrainerCall
from trl_packing.run.sampling import Sampling, ranks_of
from trl_packing.run.sources import columns_of, trains_completions
from trl_packing.training.before_training import BeforeTraining, RunReport, make_model_ready
from trl_packing.training.between_steps import BetweenSteps, use_averaged_weights
from trl_packing.training.checkpoints import checkpoint_to_resume, load_renamed, write_whole
from trl_packing.training.chunks import Chunks, is_longer
from trl_packing.training.collators import RunCollators
from trl_packing.training.engines import (
    forget_evaluation_wrapper,
    gather_full_state_dict,
    keep_outputs_precise,
    without_sync,
)
from trl_packing.training.loaders import PackedLoaders
from trl_packing.training.malloc import keep_freed_pages
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_data import RunData, check_evaluation_sets
from trl_packing.training.run_recorder import RunRecorder
from trl_packing.training.user_loss import OtherModels
from trl_packing.versions import warn_of_untested_versions

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
        if self._trl_path is None:
            return method(self, *args, **kwargs)
        return getattr(super(PackedSFTTrainer, self), method.__name__)(*args, **kwargs)

    return choose  # type: ignore[return-value]


class PackedSFTTrainer(SFTTrainer):
    """Supervised fine-tuning that never computes on padding and keeps documents apart.

    With ``packing=True`` a micro-batch is `per_device_train_batch_size` bins of `max_length`
    tokens. With ``packing=False`` an optimizer step holds the documents of the padded run. Either
    way a micro-batch is one flat row of isolated documents.

    A user's data collator, a data set with `with_transform`, and images of a model type that is not
    in docs/images.md take TRL's path unchanged, with a warning.

    Documents may have `loss_weights`, a number for each token, and `loss_weight`, one for the whole
    document. The loss of a step is the weighted mean over its trained tokens, of all micro-batches
    and ranks, and so is `eval_loss`. In `mean_token_accuracy` and `entropy` each trained token has
    weight 1.

    Args:
        model: a name, or a model of transformers, with or without PEFT.
        args: a `PackedSFTConfig`, a plain `SFTConfig` or `TrainingArguments`. None takes the
            defaults of TRL's `SFTConfig`, padding-free.
        data_collator: a `PackedCollator`, or a `DataCollatorForCompletionOnlyLM` that labels the
            documents; others as above.
        train_dataset: rows in any form of docs/data.md, tokenized or not, packed by TRL or not; or
            a stream; or a dictionary of several, each a source (`mixture`).
        eval_dataset: the same, or a dictionary of data sets.
        processing_class: the tokenizer; by default the model's.
        compute_loss_func: a loss of the model's outputs, without weights (docs/loss.md).
        compute_metrics: gets one padded row for each document.
        callbacks: as in TRL, and so are `optimizers`, `optimizer_cls_and_kwargs`,
            `preprocess_logits_for_metrics`, `quantization_config`, `peft_config`,
            `formatting_func` and parameters of a newer TRL.

    Raises:
        ValueError: settings, columns or data cannot be trained as they are; raised before training.
        RuntimeError: documents leak into each other; raised by `train` and `evaluate`.
    """

    _tag_names = [*SFTTrainer._tag_names, "trl-packing"]  # noqa: RUF012
    _run_report: RunReport | None = None  # until the packed run is built
    model_accepts_loss_kwargs: bool
    train_dataset: Any
    data_collator: Any

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
        refuse_model_init(newer.get("model_init"))
        rest = newer | {
            "processing_class": processing_class,
            "compute_loss_func": compute_loss_func,
            "compute_metrics": compute_metrics,
            "optimizers": optimizers,
            "optimizer_cls_and_kwargs": optimizer_cls_and_kwargs,
            "preprocess_logits_for_metrics": preprocess_logits_for_metrics,
            "quantization_config": quantization_config,
            "peft_config": peft_config,
            "formatting_func": formatting_func,
        }
        self._run = run = Run.of(
            TrainerCall(
                model,
                args,
                train_dataset,
                processing_class,
                data_collator,
                formatting_func,
                eval_dataset,
                compute_loss_func,
                compute_metrics,
            )
        )
        check_model(model, args)
        self._trl_path = reason = run.trl_path
        self._between_steps = BetweenSteps()
        rest["callbacks"] = [*(callbacks or ()), self._between_steps]
        if reason:
            leave_packing(args, reason, train_dataset, eval_dataset, data_collator)
            super().__init__(model, args, data_collator, train_dataset, eval_dataset, **rest)
            self._follow_trl(reason)
            return
        self._prepare_by_trl(rest)
        check_ranks(self.args, self._ranks_with_same_rows())
        self._between_steps.begin()
        evaluated = [*self._evaluation_sets().values()]
        run.check_prepared(self.train_dataset, evaluated, balances_experts=self.aux_loss_enabled)
        self._build_packed_run()

    def _follow_trl(self, reason: str) -> None:
        """Leave everything to TRL but resuming and the record of the run."""
        self._epochs = ResumedEpochs(self.args)
        self._between_steps.begin()
        self._record_run(LossSums())
        logger.warning(f"{reason}: taking TRL's path unchanged, without packing by us")

    def _prepare_by_trl(self, rest: dict[str, Any]) -> None:
        """Run TRL's constructor, which prepares the data sets by `_prepare_dataset`."""
        run = self._run
        call, args = run.call, run.args
        rest["processing_class"] = run.processing_class
        sets = run.images.take(run.sets, "train")
        evaluated = run.images.take(call.eval_dataset, "eval")
        # TRL's constructor gets the first of several sources; `_run_data` prepares all.
        self._run_data = RunData(sets if run.has_sources else None)
        first = next(iter(sets.values()))
        with hide_packing(args):
            try:
                super().__init__(call.model, args, None, first, evaluated, **rest)
            except Exception:  # a TypeError without a template (TRL 1.16)
                explain_missing_marks(args, getattr(self, "_tokenizer", None), first)
                raise
        run.args = self.args  # TRL makes its own of None, and of TrainingArguments

    def _evaluation_sets(self) -> dict[str, Any]:
        given = self.eval_dataset
        return given if isinstance(given, dict) else {"eval": given}

    def _build_packed_run(self) -> None:
        """Make the objects of a packed run, which need the model and the prepared data sets."""
        run, args = self._run, self.args
        keep_outputs_precise(self.accelerator)
        if run.options.sequence_parallel_size > 1:
            group_of_row(run.options.sequence_parallel_size)  # made by all ranks together
        # TRL divides by the tokens of one micro-batch for model classes that do not accept
        # `num_items_in_batch`, although its own loss takes the count: gemma3, Qwen-VL, ...
        self._takes_count: bool = self.model_accepts_loss_kwargs
        self.model_accepts_loss_kwargs = True
        self.padding_free = True
        self._guard = guard = run.images.guard(
            self.model,
            attention=run.options.attention,
            isolation_check=run.options.isolation_check,
            packing_requested=run.packing or run.eval_packing or args.padding_free,
            num_ranks=run.options.sequence_parallel_size,
        )
        make_model_ready(guard, args)
        collator = run.images.add_to(run.collator(self._tokenizer.pad_token_id), self)
        collators = RunCollators.of(run, guard, collator, self.data_collator)
        self.data_collator = collators.packed
        sharing = PrefixSharing(
            collators,
            run.options.prefix_sharing,
            loss_is_ours=lambda: self.compute_loss_func is None and self._loss_is_ours(),
            balances_experts=self.aux_loss_enabled,
        )
        size = max(layer_values(text_config(self.model), "hidden_size"), default=None)
        self._epochs = ResumedEpochs(args)
        self._run_report = RunReport(collators, sharing)
        self._before_training = before = BeforeTraining(
            run,
            self.accelerator,
            collators,
            Sampling(run, self._train_batch_size, size, sharing.draws_groups),
            sharing,
            self._run_report,
            self._epochs,
            self._run_data.counts,
            trainer_name=type(self).__name__,
            samples_bins=self._is_ours("_get_train_sampler"),
            is_whole=not (self.is_fsdp_enabled or self.is_deepspeed_enabled),
            is_in_train=lambda: self.is_in_train,
            begin=lambda: before.before_first_step(self.model_wrapped, self.train_dataset),
        )
        self._configure_sampling()
        before.plan(self.train_dataset)
        settle_first(self.model, before.settle)
        if args.world_size == 1:
            # accelerate would cut boundaries as if they were rows; on several ranks it is refused.
            loading = self.accelerator.dataloader_config
            loading.split_batches = loading.dispatch_batches = False
        self._step_loss = self._make_step_loss()
        self._record_run(self._step_loss.trained)
        self._loaders = PackedLoaders(
            before,
            self._meter,
            global_step=lambda: self.state.global_step,
            evaluates_bins=type(self)._get_eval_sampler is SFTTrainer._get_eval_sampler,
        )
        self._other_models = OtherModels(self.model)
        check_evaluation_sets(guard.limits, self._evaluation_sets())
        self.add_callback(before)

    def _make_step_loss(self) -> StepLoss:
        return StepLoss(
            self.args,
            self.accelerator,
            tp_size=self.get_tp_size(),
            smoothing=self.args.label_smoothing_factor if self.label_smoother else 0.0,
            balance=self.router_aux_loss_coef if self.aux_loss_enabled else 0.0,
        )

    @property
    def attention(self) -> AttentionChoice | None:
        """The backend that keeps documents of a row apart, and why; None on TRL's path."""
        return None if self._trl_path else self._guard.attention

    @property
    def packing_report(self) -> PackingReport:
        """Documents, bins and steps of an epoch; None on TRL's path."""
        return self._run_report.current if self._run_report else None  # type: ignore[return-value]

    def _record_run(self, trained: LossSums) -> None:
        """Count what is trained, and keep the record of the run."""
        self._meter = ThroughputMeter(
            self.args,
            self.accelerator,
            trained,
            tp_size=self.get_tp_size(),
            balances=self.aux_loss_enabled,
            means=self._metrics["train"],
            set_total=partial(setattr, self, "_total_train_tokens"),
            is_packed=self._trl_path is None,
        )
        path = "packed" if self._run.packing else "padding-free"
        self._recorder = RunRecorder(
            self._meter,
            "TRL's path" if self._trl_path else path,
            self._trl_path,
            facts_of_data(self._run.call.train_dataset),
            report=self._run_report,
            total=lambda: self._total_train_tokens,
        )
        self.add_callback(self._recorder)

    def _is_ours(self, method: str) -> bool:
        found = getattr(getattr(self, method), "__func__", None)
        return found is getattr(PackedSFTTrainer, method)

    def _loss_is_between(self) -> bool:
        """Return whether a class between ours and `SFTTrainer` computes the loss."""
        return super().compute_loss.__func__ is not SFTTrainer.compute_loss

    def _loss_is_ours(self) -> bool:
        return self._is_ours("compute_loss") and not self._loss_is_between()

    @packed_runs_only
    def _prepare_dataset(
        self,
        dataset: Any,
        processing_class: Any,
        args: Any,
        packing: bool,
        formatting_func: Any,
        dataset_name: str,
    ) -> Any:
        """Prepare a data set by the rules of the run; TRL's code tokenizes what ours cannot."""
        make = super()._prepare_dataset
        # TRL would cut at max_length without counting, and pack in windows of 1,000 rows.
        unlimited = copy.copy(args)
        unlimited.max_length = None

        def by_trl(rows: Any, formatting_func: Any, name: str, completion_only: bool) -> Any:
            with temporarily(self, completion_only_loss=completion_only):
                return make(rows, processing_class, unlimited, False, formatting_func, name)

        trains = dataset_name == "train" and self._run_data.expects_training
        if trains and not self._run.has_sources and records_of(dataset):
            # TRL does not see the rows, which decide.
            self.completion_only_loss = trains_completions(dataset, args.completion_only_loss)
        run = replace(self._run, args=args).with_rules(
            processing_class,
            chat_template=self.chat_template,
            completion_only=self.completion_only_loss,
            by_trl=by_trl,
            formatting_func=formatting_func,
        )
        return self._run_data.prepare(run, dataset, dataset_name)

    def _prepare_later(self, dataset: Any, name: str) -> Any:
        """Return the documents of rows that were not passed to the constructor."""
        with temporarily(self._run_data, expects_training=name == "train"):
            return self._prepare_dataset(
                dataset,
                self.processing_class,
                self.args,
                self._run.packing,
                self._formatting_func,
                name,
            )

    @packed_runs_only
    def _get_dataloader(
        self,
        dataset: Any,
        description: str,
        batch_size: int,
        sampler_fn: Any = None,
        is_training: bool = False,
        dataloader_key: str | None = None,
    ) -> Any:
        """Make micro-batches of documents, read from Arrow, that are known to stay apart."""
        make = super()._get_dataloader

        def by_trl(rows: Any, sampler_of: Any, collator: Any) -> Any:
            # Columns are chosen already: TRL would remove weights.
            with (
                temporarily(self, data_collator=collator),
                temporarily(self.args, remove_unused_columns=False),
            ):
                return make(rows, description, batch_size, sampler_of, is_training, dataloader_key)

        run, loaders = self._run, self._loaders
        run.args = self.args
        self._configure_sampling()
        check_set_afterwards(self.data_collator, loaders.collators.packed, self.train_dataset)
        if is_training:
            if dataset is not self._before_training.dataset:  # it was set on the built trainer
                # Tokens without packing are trained as they are, as in TRL; bins have a capacity.
                is_tokenized = "input_ids" in columns_of(dataset) and not records_of(dataset)
                if run.packing or not is_tokenized:
                    self.train_dataset = dataset = self._prepare_later(dataset, "train")
            return loaders.train(by_trl, dataset, sampler_fn, self._max_tokens())
        name = dataloader_key or "test"
        if run.skips_preparation:  # TRL knows only its own collator
            run.check_nothing_is_skipped([dataset])
            self._reject_skip_prepare_without_labels({name: dataset}, loaders.collators.padded)
        elif dataloader_key is None:
            dataset = self._prepare_later(dataset, name)
        # Callers that ask for logits expect a row for each document, of which none can leak.
        asks = self.compute_metrics if dataloader_key else not self.args.prediction_loss_only
        return loaders.evaluate(
            by_trl, self.model, dataset, sampler_fn, dataloader_key, padded=bool(asks)
        )

    def _configure_sampling(self, **changes: Any) -> None:
        """Take the settings of now; ranks that divide a row must see the same batch."""
        shared = self._ranks_with_same_rows() * self._run.options.sequence_parallel_size
        size = self._train_batch_size
        if self._max_tokens() is not None:  # the budget is lowered, and steps stay as they are
            size = self.args.per_device_train_batch_size
        before = self._before_training
        before.sampling = replace(
            before.sampling, batch_size=size, ranks=ranks_of(self.args, shared), **changes
        )

    def _ranks_with_same_rows(self) -> int:
        return self.get_tp_size() * self.get_cp_size() * self.get_sp_size()

    def _max_tokens(self) -> int | None:
        """Return the budget of a micro-batch, of which `auto_find_batch_size` has left a part."""
        options = self._run.options
        most = options.tokens_per_forward
        if most is None:
            return None
        if options.max_tokens_in_memory and not self._loss_is_ours():
            raise ValueError(
                f"max_tokens_in_memory={most} computes the loss of chunks without compute_loss of "
                f"{type(self).__name__}; leave one of them out"
            )
        return max(most * self._train_batch_size // self.args.per_device_train_batch_size, 1)

    @packed_runs_only
    def _get_train_sampler(self, train_dataset: Any = None) -> Any:
        if isinstance(train_dataset, ArrowDocuments):
            return self._before_training.sampling.for_training(train_dataset)
        return super()._get_train_sampler(train_dataset)

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **kwargs: Any) -> Any:
        """Train, on all ranks together also after an evaluation; resume from a whole checkpoint."""
        refuse_model_init(self.model_init)
        forget_evaluation_wrapper(self)
        # accelerate draws the order of documents from torch's seed: that of rank 0.
        seed = broadcast_object_list([torch.initial_seed()])[0]
        attention: Any = nullcontext()
        if self._trl_path is None:
            self._configure_sampling(torch_seed=seed)
            attention = use_attention(self.model, self._guard.attention)
        checkpoint = checkpoint_to_resume(resume_from_checkpoint, self)
        load_renamed(self, checkpoint)
        with (
            attention,
            use_current_row(None),
            keep_freed_pages(self.args.device.type == "cpu"),
            self._epochs.resuming(checkpoint),
            self._recorder.recording(checkpoint),
        ):
            output = super().train(checkpoint, *args, **kwargs)
        if self.args.load_best_model_at_end:
            load_renamed(self, self.state.best_model_checkpoint)
        return output

    @packed_runs_only
    def set_initial_training_values(self, args: Any, dataloader: Any) -> Any:
        """Count the epochs and steps that are left from where a resumed epoch continues."""
        return self._epochs.schedule(super().set_initial_training_values(args, dataloader))

    def _init_training_state(self, *args: Any, **kwargs: Any) -> tuple[int, int]:
        """Continue where the record in the checkpoint says, or where a stream was."""
        epoch, skipped = super()._init_training_state(*args, **kwargs)
        self._meter.start_run(self.state, self._total_train_tokens)
        return self._epochs.resume(epoch, skipped)

    @packed_runs_only
    def _run_epoch(self, *, epoch: int, **kwargs: Any) -> None:
        """Run an epoch, and measure each of its steps before it is trained."""
        self._epochs.begin_epoch(
            epoch,
            self.state.global_step,
            epochs_trained=kwargs["epochs_trained"],
            skipped=kwargs["steps_trained_in_current_epoch"],
        )
        measured = partial(self._measured, self.get_batch_samples)  # which may be a user's
        try:
            with temporarily(self, get_batch_samples=measured):
                super()._run_epoch(epoch=epoch, **kwargs)
        finally:
            self._step_loss.forget()

    def _measured(
        self, read: Callable[..., Any], epoch_iterator: Any, num_batches: int, device: Any
    ) -> Any:
        """Measure a step before its first micro-batch; each is the current row while it runs."""
        batches, num_items = read(epoch_iterator, num_batches, device)
        if num_items is None:
            num_items = self._get_num_items_in_batch(batches, device)
        loaders = self._loaders
        self._run.images.measure(batches)
        self._step_loss.measure(
            batches,
            num_items,
            device,
            weighted=loaders.has_weights or loaders.collators.packed.shares_prefixes,
        )
        self._meter.count(batches, loaders.room)
        if loaders.divided is not None:
            loaders.divided.divide_alike(batches, device)
        return CurrentBatches(batches), num_items

    @packed_runs_only
    def training_step(self, model: Any, inputs: Any, num_items_in_batch: Any = None) -> Any:
        """Make the row current: `compute_loss` and the caller may be a user's."""
        takes_count = self._takes_count or self.compute_loss_func is not None
        # A user's mean relies on getting no count where the model class takes none, as in TRL.
        hidden = None
        if num_items_in_batch is not None and not (self._loss_is_ours() or takes_count):
            is_scaled = getattr(self, "loss_is_scaled_for_ga", None)
            divisor = 1 if is_scaled else self.current_gradient_accumulation_steps
            num_items_in_batch, hidden = None, (num_items_in_batch, divisor)
        is_own = not (self._is_ours("training_step") and self._loss_is_ours())
        parts = parts_of(inputs)
        has_chunks = self._run.options.max_tokens_in_memory is not None
        most = self._max_tokens() if has_chunks else None
        losses = []
        with (
            self._other_models.watch() if is_own and not self.args.torch_compile else nullcontext(),
            temporarily(self._step_loss, hidden_num_items=hidden, is_divided=len(parts) > 1),
        ):
            for number, part in enumerate(parts, start=1):
                is_last = number == len(parts)
                syncs = nullcontext() if is_last else without_sync(self.accelerator, model)
                with use_current_row(part), syncs:
                    if most is not None and is_longer(part, most):
                        losses.append(self._train_in_chunks(model, part, num_items_in_batch, most))
                        continue
                    losses.append(super().training_step(model, part, num_items_in_batch))
        return torch.stack(losses).sum() if len(losses) > 1 else losses[0]

    def _train_in_chunks(self, model: Any, inputs: Any, num_items: Any, most: int) -> Any:
        """Train a document of more than `most` tokens, in place of Trainer's `training_step`."""
        model.train()
        if hasattr(self.optimizer, "train"):
            self.optimizer.train()
        prepared = self._prepare_inputs(inputs)
        chunks = Chunks(
            model,
            most,
            loss_of=lambda chunk: self._step_loss.compute(
                model, chunk, False, num_items, user_loss=None, training=True
            ),
            backward=self.accelerator.backward,
            without_sync=partial(without_sync, self.accelerator, model),
            autocast=self.accelerator.autocast,
        )
        with self.compute_loss_context_manager():
            return chunks.train(prepared, int(inputs.host.lengths[0]))

    @contextmanager
    def compute_loss_context_manager(self) -> Iterator[None]:
        """Compute a loss with TRL's settings of experts, with which `generate` fails."""
        with super().compute_loss_context_manager(), self._between_steps.in_step():
            yield

    @packed_runs_only
    def _prepare_inputs(self, inputs: Any) -> Any:
        """Move a row to the device, its CPU copy and its float32 weights with it."""
        prepared = super()._prepare_inputs(inputs)
        row = host_row(inputs)
        prepared = prepared if row is None else PackedBatch(prepared, row)
        # With a cache, another model would not read the positions.
        if prepared.get("cu_seq_lens_q") is not None:
            prepared["use_cache"] = False
        for name in {TOKEN_WEIGHTS, SOURCE_WEIGHTS} & inputs.keys():  # DeepSpeed casts them
            prepared[name] = send(inputs[name], self.args.device)
        replace_current_row(prepared)
        return prepared

    @packed_runs_only
    def compute_loss(
        self, model: Any, inputs: Any, return_outputs: bool = False, num_items_in_batch: Any = None
    ) -> Any:
        """Weight each token; TRL weights all tokens the same, and all MoE micro-batches too."""
        if self._loss_is_between():
            inputs = without_weights(inputs)
            return super().compute_loss(model, inputs, return_outputs, num_items_in_batch)
        return self._step_loss.compute(
            model,
            inputs,
            return_outputs,
            num_items_in_batch,
            user_loss=self.compute_loss_func,
            training=self.model.training,
        )

    @packed_runs_only
    def _track_num_input_tokens(self, inputs: Any) -> None:
        """Forget the row, which is trained by now, and count the tokens of its documents."""
        set_current_row(None)
        self._step_loss.check_was_computed(inputs, type(self).__name__)
        super()._track_num_input_tokens(for_counting(inputs))

    @packed_runs_only
    def log(self, logs: dict[str, float], start_time: float | None = None) -> None:
        """Log what a person reads; all that was measured is in `state.log_history`."""
        self._meter.add_up_before(logs)
        # Not by TRL's `_metrics`: the totals would be lost where the last step was evaluated, for
        # TRL adds those of training only to a model in training mode.
        shown, measured = self._meter.take_logs()
        logs.update(shown)
        super().log(logs, start_time)
        self.state.log_history[-1].update(measured)

    def _save_checkpoint(self, model: Any, trial: Any) -> None:
        """Save the place in the epoch too, and delete older checkpoints when this one is whole."""
        with self._meter.pause(), write_whole(self, trial) as checkpoint:
            self._epochs.save(checkpoint, self.state.global_step)
            self._recorder.save(checkpoint)
            super()._save_checkpoint(model, trial)

    def save_model(self, output_dir: str | None = None, _internal_call: bool = False) -> None:
        """Save the whole model on any engine; parts of checkpoints are saved as configured."""
        use_averaged_weights(self.optimizer)  # and not back: resumed steps begin with them, too
        with nullcontext() if _internal_call else gather_full_state_dict(self.accelerator):
            super().save_model(output_dir, _internal_call)

    def evaluate(self, *args: Any, **kwargs: Any) -> dict[str, float]:
        """Evaluate while the clock of training stands still."""
        with self._meter.pause():
            return super().evaluate(*args, **kwargs)

    @packed_runs_only
    def evaluation_loop(self, dataloader: Any, *args: Any, **kwargs: Any) -> Any:
        """Report the mean over all trained tokens, not the mean of micro-batch means."""
        sources = self._loaders.sources.get(dataloader)
        with use_attention(self.model, self._guard.attention), use_current_row(None):
            sums = LossSums(len(sources.names) if sources else 0)
            with temporarily(self._step_loss, evaluated=sums):
                output = super().evaluation_loop(CurrentBatches(dataloader), *args, **kwargs)
            self._step_loss.write_metrics(
                sums,
                sources,
                output.metrics,
                kwargs.get("metric_key_prefix", "eval"),
                means=self._metrics["eval"],
                num_tokens=self._total_train_tokens,
                user_loss=self.compute_loss_func,
            )
        self._loaders.report_losses(dataloader)
        return output

    @packed_runs_only
    def prediction_step(self, model: Any, inputs: Any, *args: Any, **kwargs: Any) -> Any:
        """Make the row current during the call."""
        with use_current_row(inputs):
            return super().prediction_step(model, inputs, *args, **kwargs)
