"""The report of a run that trains: kept up to date, and printed."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

from datasets import IterableDataset
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.stream import columns_kept
from trl_packing.run.columns import columns_of, documents_of
from trl_packing.run.report import PackingReport, PrefixSavings, report_of
from trl_packing.training.collators import RunCollators
from trl_packing.training.prefix_sharing import PrefixSharing
from trl_packing.training.resuming import ResumedEpochs

_FLOAT32 = "float32, by default on this CPU (use_cpu=True, bf16=True trains in bf16)"


@dataclass(eq=False)
class RunReport(TrainerCallback):
    """Keeps the report of a run up to date, and prints it."""

    trainer: SFTTrainer
    collators: RunCollators
    preparation: dict[str, PreparationCounts]  # of each data set, by its name
    sharing: PrefixSharing
    epochs: ResumedEpochs
    samples_bins: bool  # and not the documents of a user's sampler
    before_first_step: Callable[[], None]  # called when the model is wrapped
    batch_size: int = 0  # for which the epoch is planned

    def __post_init__(self) -> None:
        self.plan()

    @property
    def current(self) -> PackingReport:
        """The report, with the attention, its check and the shapes in use."""
        mode, sampling = self.sharing.mode, self.collators.sampling
        reason = self.sharing.reason()
        prefixes = self._planned.prefixes
        if mode != "off":
            prefixes = replace(prefixes or PrefixSavings(mode), reason=reason)
        return replace(
            self._planned,
            attention=str(self.collators.guard.attention),
            precision=_FLOAT32 if getattr(sampling.args, "_leaves_bf16_out", False) else None,
            checked=self.collators.guard.checked,
            tokens_per_micro_batch=self.collators.tokens_per_micro_batch,
            prefixes=None if mode == "off" and reason else prefixes,
        )

    @property
    def prefixes(self) -> Any:
        """What the plan knows of the common prefixes of the training set; None without a plan."""
        return self._planned.prefixes

    def plan(self, sampler: Any = None) -> None:
        """Plan the first epoch anew; with the sampler of a subclass once that can be called."""
        user_loss, dataset = self.trainer.compute_loss_func, self.trainer.train_dataset
        sampling = self.collators.sampling
        documents = None
        self.batch_size = sampling.batch_size
        is_stream = isinstance(dataset, IterableDataset)
        columns = columns_kept(dataset) if is_stream else columns_of(dataset)
        if not is_stream:
            documents = documents_of(dataset, user_loss)
            self.collators.guard.limits.check(dataset, "train")
            if sampler is None and self.samples_bins:
                sampler = sampling.for_training(documents)
        self._planned = report_of(
            sampling,
            documents,
            sampler,
            columns=None if user_loss else columns,
            preparation=None if is_stream else self.preparation.get("train"),
        )

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.before_first_step()
        self._print(state)

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the report on a stream, which is counted as it is read."""
        if self.epochs.stream is None:
            return
        counts = self.epochs.stream.counts_of_all_ranks()
        self._planned = replace(self._planned, preparation=counts)
        self._print(state)

    def _print(self, state: Any) -> None:
        if state.is_world_process_zero:
            print(f"\n{self.current}", flush=True)  # below the progress bar
