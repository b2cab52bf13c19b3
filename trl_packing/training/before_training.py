"""What happens before the first step, in this order.

    the trainer is built        backend and head of packed rows           `make_model_ready`
                                documents → sampler → shapes → report     `plan`
    a data loader is asked for  another set, batch size, groups: anew     `plan_again`
    the model is wrapped        the model as it will run is checked       `before_first_step`

The documents of an evaluation are checked before its data loader is made (`check`). In a loop of
the user's own, the model is checked when it is first called on a packed row (`settle`).
"""

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
from accelerate import Accelerator
from datasets import IterableDataset
from torch import nn
from transformers import TrainerCallback

from trl_packing.attention.calls import allows_other_rows
from trl_packing.attention.install import use_attention
from trl_packing.attention.model_facts import restore_implementation
from trl_packing.attention.neftune import scale_noise_by_document
from trl_packing.data.counts import PreparationCounts
from trl_packing.data.stream import columns_kept
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.isolation.frozen_layers import check_frozen_layers
from trl_packing.isolation.guard import IsolationGuard
from trl_packing.loss.lm_head import add_trained_positions_head
from trl_packing.loss.sums import Sources
from trl_packing.run.report import PackingReport, PrefixSavings, report_of
from trl_packing.run.run import Run
from trl_packing.run.sampling import Sampling
from trl_packing.run.sources import Mixture, columns_of, documents_of, training_sources
from trl_packing.training.chunks import check_chunks
from trl_packing.training.collators import RunCollators
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.resuming import ResumedEpochs

_FLOAT32 = "float32, by default on this CPU (use_cpu=True, bf16=True trains in bf16)"


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
class RunReport:
    """The report on the epoch that is planned, with what is known of the model by now."""

    collators: RunCollators
    sharing: PrefixSharing
    planned: PackingReport = field(init=False)

    @property
    def current(self) -> PackingReport:
        """The report, with the attention, its check and the shapes in use."""
        mode = self.sharing.mode
        guard = self.collators.guard
        shapes = self.collators.packed.static_shapes
        reason = self.sharing.reason()
        prefixes = self.planned.prefixes
        if mode != "off":
            prefixes = replace(prefixes or PrefixSavings(mode), reason=reason)
        leaves_out = getattr(self.collators.run.args, "_leaves_bf16_out", False)
        return replace(
            self.planned,
            attention=str(guard.attention),
            precision=_FLOAT32 if leaves_out else None,
            checked=guard.checked,
            tokens_per_micro_batch=None if shapes is None else shapes.num_tokens,
            prefixes=None if mode == "off" and reason else prefixes,
        )

    def print(self) -> None:
        """Print the report below the progress bar."""
        print(f"\n{self.current}", flush=True)


@dataclass(eq=False)
class BeforeTraining(TrainerCallback):
    """Plans the epochs of a run, and checks its model before it trains or evaluates.

    Attributes:
        counts: what preparation kept and lost of each data set, by its name.
        trainer_name: the class of the trainer, for messages.
        samples_bins: the sampler is ours, not a user's, which draws documents.
        is_whole: no other rank holds a part of the model.
        is_in_train: whether the trainer trains now.
        begin: calls `before_first_step` with the model as it will run.
        dataset: the training set that is planned.
        documents: its documents; None of a stream.
        sources: of it; None if it names none.
        mixture: of the documents that are drawn.
    """

    run: Run
    accelerator: Accelerator
    collators: RunCollators
    sampling: Sampling
    sharing: PrefixSharing
    report: RunReport
    epochs: ResumedEpochs
    counts: dict[str, PreparationCounts]
    trainer_name: str
    samples_bins: bool
    is_whole: bool
    is_in_train: Callable[[], bool]
    begin: Callable[[], None]
    dataset: Any = None
    documents: ArrowDocuments | None = None
    sources: Sources | None = None
    mixture: Mixture | None = None
    _batch_size: int = 0  # for which the epoch is planned
    _plans_groups: bool = False

    @property
    def guard(self) -> IsolationGuard:
        """The guard of the run."""
        return self.collators.guard

    def plan(self, dataset: Any) -> None:
        """Plan the first epoch of a training set: its documents, micro-batches, shapes, report.

        Raises:
            ValueError: its documents, or the settings for them, cannot be trained.
        """
        sampling = self.sampling
        self.dataset = dataset
        self._batch_size = sampling.batch_size
        self.sources = training_sources(dataset, self.run.options)
        self._plans_groups = sampling.draws_groups(True)
        self.documents = self.mixture = sampler = None
        if not isinstance(dataset, IterableDataset):
            self.documents = documents_of(dataset, self.run.call.compute_loss_func, self.sources)
            self.guard.limits.check(dataset, "train")
            if self.samples_bins:
                sampler, self.mixture, _ = sampling.planned(self.documents)
        are_documents = sampler is not None and not sampler.rows
        self.collators.hold_shapes(sampling.batch_size, sampler if are_documents else None)
        self.report_on(sampler)

    def report_on(self, sampler: Any) -> None:
        """Report on the first epoch of a sampler, which a user may have written."""
        is_stream = self.documents is None
        columns = columns_kept(self.dataset) if is_stream else columns_of(self.dataset)
        self.report.planned = report_of(
            self.sampling,
            self.documents,
            sampler,
            columns=None if self.run.call.compute_loss_func else columns,
            mixture=self.mixture,
            preparation=None if is_stream else self.counts.get("train"),
        )

    def plan_again(self, dataset: Any) -> None:
        """Plan another training set or batch size, and decide on groups before they are drawn.

        Bins of groups hold the tokens of shared rows, so the model is checked, not wrapped yet.
        """
        # `auto_find_batch_size` changes the size of micro-batches.
        if dataset is not self.dataset or self.sampling.batch_size != self._batch_size:
            self.plan(dataset)
        if self.sharing.mode == "group" and not self.samples_bins:
            raise ValueError(
                f"prefix_sharing='group', but _get_train_sampler of {self.trainer_name} draws "
                "documents, not groups; set prefix_sharing='bin'"
            )
        # A sharded model cannot run yet. It is checked before the first step, as any other.
        if self.sampling.draws_groups(True) and self.is_whole:
            model = self.guard.model
            with use_attention(model, self.guard.attention), self.accelerator.autocast():
                self.check(model, dataset, training=True)
            self.guard.forget_checks()  # the model will be wrapped before the first step
            self.sharing.check_again()
        if self._plans_groups != self.sampling.draws_groups(True):
            self.plan(dataset)

    def before_first_step(self, model: Any, dataset: Any) -> None:
        """Check the model, wrapped as it will run, on the documents that it trains, and report.

        Raises:
            RuntimeError: a document affects another, or planned groups cannot be shared, or a long
                document cannot run in chunks.
        """
        guard = self.guard
        is_main = self.accelerator.is_main_process
        scale_noise_by_document(guard.base_model)
        guard.check_head(model)
        if guard.checks and not guard.passed:
            if is_main:  # the progress bar stands still
                print("\nchecking that no document of a packed row affects another ...", flush=True)
            if self.is_whole:
                check_frozen_layers(guard.base_model)
        self.check(model, dataset, training=True)
        if self._plans_groups and not self.collators.packed.shares_prefixes:
            # Bins of groups would hold more tokens than was planned.
            raise RuntimeError(
                "prefix_sharing='group' has planned bins, but the model cannot share as it runs "
                f"now: {self.sharing.reason()}; set prefix_sharing='bin' or 'off'"
            )
        most = self.run.options.max_tokens_in_memory
        if most is not None:
            if self.sharing.balances_experts or not self.is_whole:
                raise RuntimeError(
                    f"max_tokens_in_memory={most} needs whole parameters, and no balance of "
                    "experts: use DDP in place of FSDP or DeepSpeed, and router_aux_loss_coef=0.0"
                )
            check_chunks(guard.base_model)
        if is_main:
            self.report.print()

    def check(self, model: Any, dataset: Any, *, training: bool) -> None:
        """Stop, or switch to a slower attention, before anything is computed on leaking documents.

        Args:
            model: wrapped as it will run.
            dataset: the documents to check it on.
            training: the mode of the model.
        """
        documents = self._documents_apart(model, dataset, training)
        self.collators.drop_shapes_of_padded_rows()
        prefixes = self.report.planned.prefixes
        pays = prefixes is None or prefixes.pays or not training
        self.sharing.decide(model, documents, training=training, pays=pays)

    def _documents_apart(self, model: Any, dataset: Any, training: bool) -> list[np.ndarray]:
        """Return documents that represent a data set, and that are known to stay apart."""
        guard, probes = self.guard, self.collators.for_probes()
        guard.check_head(model)
        documents = guard.sample(dataset, self.run.args.max_length)
        guard.ensure(documents, training=training, wrapped=model, collator=probes)
        return documents

    def check_evaluation(self, model: Any, dataset: Any, name: str, *, padded: bool) -> None:
        """Check an evaluation set, and that its documents stay apart; of padded rows none leaks."""
        self.guard.limits.check(dataset, name)
        with use_attention(model, self.guard.attention):
            if padded:
                self.guard.check_head(model)
            else:
                self.check(model, dataset, training=False)

    def settle(self, called: nn.Module) -> None:
        """Check the model, `called` in a loop of the user's own; RuntimeError if it fails."""
        guard, args = self.guard, self.run.args
        # The check itself calls it, too.
        if allows_other_rows() or not guard.checks or self.is_in_train():
            return
        if called.training in {in_training for _, in_training, *_ in guard.passed}:
            return
        if args.world_size > 1 or args.torch_compile or not self.is_whole:
            raise RuntimeError(
                f"{type(called).__name__} was called on packed documents outside of train() and "
                "evaluate(); for a loop of your own, call enable_packing(model) first"
            )
        with use_attention(guard.model, guard.attention), self.accelerator.autocast():
            self._documents_apart(guard.model, self.dataset, called.training)

    def on_train_begin(self, *_: Any, **kwargs: Any) -> None:
        """Do what comes before the first step."""
        self.begin()

    def on_train_end(self, *_: Any, **kwargs: Any) -> None:
        """Complete the report on a stream, which is counted as it is read."""
        if self.epochs.stream is not None:
            self.report.planned = replace(
                self.report.planned, preparation=self.epochs.stream.counts_of_all_ranks()
            )
            if self.accelerator.is_main_process:
                self.report.print()
