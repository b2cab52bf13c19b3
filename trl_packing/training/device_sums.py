"""Sums that stay on the device while a run trains, and are read with one wait.

A wait for the device costs time. A log, an evaluation and a checkpoint in one optimizer step share
one.
"""

from collections.abc import Sequence

import torch
from trl import SFTTrainer

from trl_packing.documents.host_row import wait_for
from trl_packing.loss.sums import LossSums, added


class DeviceSums:
    """Reads the sums of the micro-batches that this rank has trained.

    Args:
        trainer: its device, accelerator and state are read.
        trained: the sums.
    """

    def __init__(self, trainer: SFTTrainer, trained: LossSums):
        self.trainer = trainer
        self.trained = trained
        self._read: Sequence[float] = ()  # of this rank, since the last `gather`
        self._waited_after: int | None = None  # the optimizer step of the last wait

    def start_run(self) -> None:
        """Start from zero."""
        self.trained.take()
        self._read, self._waited_after = (), None

    def gather(self, counted: Sequence[float]) -> list[list[float]]:
        """Return the sums of each rank since the last call, with `counted` after them.

        Sums of several ranks that are still on the device are added up by the same wait.
        """
        if self.trainer.args.world_size == 1:
            self.wait()
        row = [*self._read_of(self.trained.width), *counted]
        self._read = ()
        if self.trainer.args.world_size == 1:
            return [row]
        sent = torch.tensor([row], dtype=torch.float64)
        sent = sent.to(self.trainer.args.device, non_blocking=True)
        pending = self.trained.take()
        if pending is not None:
            sent[0, : len(pending)] += pending
        rows: list[list[float]] = self.trainer.accelerator.gather(sent).tolist()
        self._waited_after = self.trainer.state.global_step
        return rows

    def wait(self) -> None:
        """Wait until the device has finished what is queued, at most once an optimizer step."""
        if self._waited_after == self.trainer.state.global_step:
            return
        self._waited_after = self.trainer.state.global_step
        pending = self.trained.take()
        if pending is not None:
            pending = pending.to("cpu", non_blocking=True)  # readable after the wait
        wait_for(self.trainer.args.device)
        if pending is not None:
            self._read = added([self._read_of(len(pending)), pending.tolist()])

    def _read_of(self, width: int) -> Sequence[float]:
        """Return what was read of this rank; sources that a stream has shown since have zeros."""
        return [*self._read, *(0.0,) * (width - len(self._read))][:width]
