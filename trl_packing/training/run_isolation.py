"""Checks that the documents of a run stay apart, before anything is computed on them.

    before an epoch of groups is planned    the model, not wrapped yet
    before the run takes its path           the same, with images
    before the first step                   the model as it will run
    before an evaluation                    the same, on the documents of that set
    in a loop of the user's own             the model, when it is first called on a packed row

The check may switch to a slower attention. Then it decides whether rows share prefixes.
"""

from typing import Any

from datasets import Dataset
from torch import nn
from trl import SFTTrainer

from trl_packing.attention.calls import allows_other_rows
from trl_packing.attention.implementation import restore_implementation
from trl_packing.attention.install import install_attention, use_attention
from trl_packing.attention.packed_calls import settle_first
from trl_packing.isolation.guard import IsolationGuard, NotIsolated, Precision
from trl_packing.loss.lm_head import add_trained_positions_head
from trl_packing.training.collators import RunCollators
from trl_packing.training.columns import documents_of
from trl_packing.training.prefix_sharing import PrefixSharing, prefix_savings
from trl_packing.training.run_report import RunReport


def make_model_ready(guard: IsolationGuard, args: Any) -> None:
    """Install the backend and the head of packed rows on the model of `guard`.

    Args:
        guard: of the run.
        args: settings of the run, with its device and precision.

    Raises:
        ValueError: the requested backend is unknown, or cannot be exact on this model.
    """
    guard.select_backend(Precision.of_settings(args))
    add_trained_positions_head(guard.base_model)
    restore_implementation(guard.base_model)


class RunIsolation:
    """Checks the documents of a run by its guard, and decides whether they share prefixes.

    Args:
        trainer: its model, training set and arguments are read.
        collators: make the rows, and know the guard.
        report: knows whether the planned epoch holds groups, and is made again if it must not.
        sharing: decides whether rows share prefixes.
    """

    def __init__(
        self,
        trainer: SFTTrainer,
        collators: RunCollators,
        report: RunReport,
        sharing: PrefixSharing,
    ):
        self.trainer = trainer
        self.guard = collators.guard
        self.collators = collators
        self.report = report
        self.sharing = sharing
        self._trains_groups = False
        self._settled: set[bool] = set()  # modes that were checked for a user's own loop
        settle_first(self.guard.model, self.settle)
        self._looked_at: dict[int, tuple[Dataset, bool]] = {}  # evaluation sets

    def ensure(
        self,
        model: Any,
        dataset: Any,
        *,
        training: bool,
        planned: bool = True,
        padded: bool = False,
    ) -> None:
        """Stop, or switch to a slower attention, before anything is computed on leaking documents.

        Args:
            model: wrapped as it will run.
            dataset: the documents to check it on.
            training: the mode of the model.
            planned: whether the epoch is planned already, maybe in groups.
            padded: whether each document has a row of its own, so that none can leak.
        """
        self.guard.check_head(model)
        if padded:
            return
        is_first = training and planned and self.guard.checks and not self.guard.passed
        if is_first and self.trainer.is_world_process_zero():  # the progress bar stands still
            print("\nchecking that no document of a packed row affects another ...", flush=True)
        documents = self.guard.sample(dataset, self.trainer.args.max_length)
        self.guard.ensure(
            documents,
            training=training,
            wrapped=model,
            collator=self.collators.for_probes(),
        )
        self.collators.drop_shapes_of_padded_rows()
        pays = self.report.sharing_pays if training else self._evaluation_shares(dataset)
        self.sharing.decide(model, documents, training=training, pays=pays)
        if training and planned:
            self._check_groups_are_shared()

    def ensure_unwrapped(self, *, training: bool) -> None:
        """Check the training set on the model before an engine wraps it."""
        trainer = self.trainer
        with use_attention(trainer.model, self.guard.attention), trainer.accelerator.autocast():
            self.ensure(trainer.model, trainer.train_dataset, training=training, planned=False)

    def settle(self, module: nn.Module, called: nn.Module) -> bool:
        """Make a call of the model exact where no check has run: in a loop of the user's own.

        Args:
            module: the model or a part of it.
            called: the same, or a copy of it, which keeps the backend that it was copied with.

        Returns:
            Whether a backend was installed on `called`.

        Raises:
            RuntimeError: the model cannot be checked here, or is not exact.
        """
        trainer, guard = self.trainer, self.guard
        if allows_other_rows() or not guard.checks:  # the check itself, or isolation_check="off"
            return False
        modes = {check.training for check in guard.passed} | self._settled
        is_new = not (trainer.is_in_train or called.training in modes)
        if is_new:
            args = trainer.args
            if args.world_size > 1 or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
                raise RuntimeError(
                    f"{type(called).__name__} was called on packed documents outside of train() and"
                    " evaluate(), which check their isolation on all ranks; for a loop of your own,"
                    " call enable_packing(model) first"
                )
            dataset = trainer.train_dataset
            documents = [] if dataset is None else guard.sample(dataset, args.max_length)
            with use_attention(trainer.model, guard.attention), trainer.accelerator.autocast():
                guard.check_head(trainer.model)
                guard.ensure(
                    documents, training=called.training, collator=self.collators.for_probes()
                )
            self._settled.add(called.training)
            if args.torch_compile:
                guard.forget_checks()  # the model will be wrapped before the first step
        if called is not module:
            install_attention(called, guard.attention)
        return called is not module or is_new

    def why_not_exact(self, *, training: bool) -> str | None:
        """Return why no attention backend is exact with images.

        None if one is, or if the model cannot run before an engine has wrapped it.

        Raises:
            NotIsolated: the settings ask for a backend by its name.
        """
        trainer = self.trainer
        if trainer.is_in_train or trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled:
            return None
        try:
            self.ensure_unwrapped(training=training)
        except NotIsolated as error:
            if self.collators.options.attention != "auto":
                raise
            found = str(error).split(". ")[0]  # without its remedies
            return f"no attention backend is exact with images ({found})"
        if trainer.args.world_size > 1 or trainer.args.torch_compile:
            self.guard.forget_checks()  # the model will be wrapped before the first step
        return None

    # --- groups of documents with a common prefix ---------------------------------------------

    def decide_on_groups(self) -> None:
        """Decide before an epoch is planned: bins of groups hold the tokens of shared rows."""
        trainer, sampling = self.trainer, self.collators.sampling
        if self.sharing.mode == "group" and not self.report.samples_bins:
            raise ValueError(
                f"prefix_sharing='group', but _get_train_sampler of {type(trainer).__name__} draws "
                "documents, not groups; set prefix_sharing='bin'"
            )
        # A sharded model cannot run yet. It is checked before the first step, as any other.
        is_whole = not (trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled)
        if sampling.draws_groups(True) and is_whole:
            self.ensure_unwrapped(training=True)
            self.guard.forget_checks()  # the model will be wrapped before the first step
            self.sharing.check_again()
        self._trains_groups = sampling.draws_groups(True)
        has_length = isinstance(trainer.train_dataset, Dataset)
        if has_length and self.report.plans_groups != self._trains_groups:
            self.report.plan()

    def _check_groups_are_shared(self) -> None:
        """Raise RuntimeError if rows of groups would hold more tokens than was planned."""
        if self._trains_groups and not self.collators.packed.shares_prefixes:
            raise RuntimeError(
                "prefix_sharing='group' has filled bins by the tokens that groups compute together,"
                f" but the model cannot share as it runs now: {self.sharing.reason}; set "
                "prefix_sharing='bin' or 'off'"
            )

    def _evaluation_shares(self, dataset: Any) -> bool:
        """Return whether documents of an evaluation set share prefixes; look at each set once."""
        if self.sharing.mode == "off" or not isinstance(dataset, Dataset):
            return True
        known = self._looked_at.get(id(dataset))
        if known is None:
            documents = documents_of(dataset, self.trainer.compute_loss_func)
            sampler = self.collators.sampling.for_evaluation(documents)
            pays = prefix_savings(documents, sampler, self.sharing.mode).pays
            known = self._looked_at[id(dataset)] = (dataset, pays)
        return known[1]
