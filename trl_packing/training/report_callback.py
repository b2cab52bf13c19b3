"""Prints the report of a run when training starts, and that of a stream again when it ends."""

from collections.abc import Callable
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_packing.training.resuming import ResumedEpochs
from trl_packing.training.run_report import RunReport
from trl_packing.training.throughput import Counts

logger = get_logger(__name__)


class ReportCallback(TrainerCallback):
    """Prints the report when a packed run starts, and when a stream was read.

    Args:
        report: of the run.
        epochs: know the stream that is trained.
        before_first_step: called when the model is wrapped and nothing is trained yet.
        so_far: returns the counts of the run, of all ranks, and its seconds.
    """

    def __init__(
        self,
        report: RunReport,
        epochs: ResumedEpochs,
        before_first_step: Callable[[], None],
        so_far: Callable[[], tuple[Counts, float] | None],
    ):
        self.report = report
        self.epochs = epochs
        self.before_first_step = before_first_step
        self.so_far = so_far
        self._has_warned = False

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Check isolation and print the report, but not on TRL's path."""
        if self.report.current is not None:
            self.before_first_step()
            self._print(state)

    def on_step_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Warn early of the documents that a stream loses: reading it may take days."""
        stream = self.epochs.stream
        if stream is not None and not self._has_warned and (words := str(stream.counts)):
            read = stream.counts.before.documents
            logger.warning(f"of the first {read:,} documents of the stream: {words}")
            self._has_warned = True

    def on_train_end(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        """Complete the report on a stream, which is counted as it is read."""
        if self.epochs.stream is not None:
            counts, measured = self.epochs.stream.counts_of_all_ranks(), self.so_far()
            self.report.count_stream(counts, measured and measured[0])
            self._print(state)

    def _print(self, state: Any) -> None:
        if state.is_world_process_zero:
            print(f"\n{self.report.current}", flush=True)  # below the progress bar
