"""Continue an epoch where a checkpoint was saved: with the same steps, or not at all.

    a checkpoint within an epoch, resumed with
    the same steps                    the next step follows, on any ranks × accumulation × bins
                                      that make them
    other steps, documents or seed    refused, naming what changed; ignore_data_skip=True restarts
                                      the epoch
    a checkpoint between epochs, resumed with
    anything                          a whole epoch begins

`Trainer` computes epoch and steps from the number of optimizer steps, as if the current settings
had planned the whole run. Here they come from the record in the checkpoint. A stream saves its
position instead.
"""

import math
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.state import temporarily
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.streaming.loader import StreamBatches
from trl_packing.training.epoch_record import FILE, DocumentMarks, EpochRecord
from trl_packing.training.sampling import Sampling

logger = get_logger(__name__)


class Resumption(NamedTuple):
    """The place at which a resumed run continues.

    Attributes:
        epoch: its number.
        steps: optimizer steps of it to skip.
    """

    epoch: int
    steps: int


class ResumedEpochs:
    """Knows which documents of the current epoch are trained, and where a resumed run continues.

    Args:
        trainer: its arguments and state are read.
        sampling: knows the settings of the plan.

    Attributes:
        stream: that the run trains; None for a data set with a length.
    """

    def __init__(self, trainer: SFTTrainer, sampling: Sampling):
        self.trainer = trainer
        self.sampling = sampling
        self.stream: StreamBatches | None = None
        self._record: EpochRecord | None = None  # of the checkpoint to resume from
        self._sampler: PackedBatchSampler | None = None  # of the training that runs
        self._documents: ArrowDocuments  # of that sampler
        self._marks: DocumentMarks | None = None
        self._resumed: Resumption | None = None
        self._epoch = 0
        self._first_step = 0  # the step of the run at which the epoch began

    @contextmanager
    def resuming(self, checkpoint: Any) -> Iterator[None]:
        """Continue inside the block where the record in `checkpoint` says, if it has one."""
        record = None
        if isinstance(checkpoint, (str, Path)):
            path = Path(checkpoint) / FILE
            record = EpochRecord.load(path) if path.is_file() else None
        with temporarily(self, _record=record):
            yield

    # --- the place in an epoch ----------------------------------------------------------------

    def forget(self) -> None:
        """Follow nothing: no sampler of ours trains now."""
        self.stream = self._sampler = self._marks = self._resumed = None

    def follow_stream(self, stream: StreamBatches) -> None:
        """Follow a stream, which trains now."""
        self.forget()
        self.stream = stream

    def follow(self, sampler: PackedBatchSampler, documents: ArrowDocuments) -> None:
        """Follow `sampler`, which trains now, from the recorded place on."""
        self.forget()
        self._sampler, self._documents = sampler, documents
        record = self._record
        if record is None:
            return
        if self.trainer.args.ignore_data_skip:
            if record.epoch != record.global_step // self._num_steps(len(sampler)):
                self._resumed = Resumption(record.epoch, 0)
        else:
            self._resumed = self._place_in_epoch(record, sampler)

    def _place_in_epoch(self, record: EpochRecord, sampler: PackedBatchSampler) -> Resumption:
        """Return where the run continues."""
        if record.trained.any():
            settings = self.sampling.settings()
            record.check(settings, self._marks_of_documents())
            sampler.set_epoch(record.epoch)
            trained = np.zeros(sampler.num_drawn, bool)
            trained[sampler.places_in_first_steps(record.steps)] = True
            record.check_steps(np.array_equal(trained, record.trained), settings)
        return Resumption(record.epoch, record.steps)

    def _num_steps(self, num_micro_batches: int) -> int:
        """Return the optimizer steps of `num_micro_batches` of one rank."""
        return -(-num_micro_batches // self.sampling.accumulation)

    # --- numbers that `Trainer` computes ------------------------------------------------------

    def schedule(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `Trainer.set_initial_training_values` for a run that continues in an epoch."""
        if self._resumed is None:
            return found
        num_epochs, per_epoch, *others, max_steps = found
        num_epochs, max_steps = self._schedule(num_epochs, per_epoch, max_steps)
        assert self._record is not None
        if changed := self._record.changed(self.sampling.settings()):
            logger.warning(
                f"resumed with {changed}: {self._continuation(max_steps)}; training ends after "
                f"step {max_steps:,}"
            )
        return (num_epochs, per_epoch, *others, max_steps)

    def _schedule(self, num_epochs: int, per_epoch: int, max_steps: int) -> tuple[int, int]:
        """Return the number of epochs and of optimizer steps of the whole run."""
        assert self._record is not None
        assert self._resumed is not None
        args, step, (epoch, behind) = self.trainer.args, self._record.global_step, self._resumed
        if step == epoch * per_epoch + behind:
            return num_epochs, max_steps  # as `Trainer` counts
        if args.max_steps > 0:
            later = max(max_steps - step - (per_epoch - behind), 0)
            num_epochs = epoch + 1 + -(-later // per_epoch)
        else:
            requested = args.num_train_epochs - epoch
            left = max(_ceil(min(requested, 1) * per_epoch) - behind, 0)
            max_steps = step + left + max(_ceil((requested - 1) * per_epoch), 0)
        return (num_epochs if max_steps > step else epoch), max_steps

    def _continuation(self, max_steps: int) -> str:
        """Return in words what is trained from here on."""
        assert self._record is not None
        assert self._resumed is not None
        if max_steps <= self._record.global_step:
            return "nothing is left to train"
        if self.trainer.args.ignore_data_skip:
            return "the epoch restarts, because ignore_data_skip=True"
        if self._resumed.steps == 0:
            return "a whole epoch begins"
        return "the optimizer steps hold the same documents as then, and continue"

    def resume(self, epoch: int, skipped: int, checkpoint: str | None) -> tuple[int, int]:
        """Return the epoch in which the run continues, and the micro-batches to skip in it.

        Args:
            epoch: as `Trainer` computes it.
            skipped: micro-batches, likewise.
            checkpoint: the folder to resume from; None for a new run.

        Raises:
            ValueError: it was saved within a packed epoch, and now nothing is packed by lengths; or
                it was saved on a stream, and now the training set is none.
        """
        self._refuse_position_of_stream(checkpoint)
        if self._resumed is not None:
            epoch, steps = self._resumed
            return epoch, steps * self.sampling.accumulation
        if skipped and self._record is not None and self._record.trained.any():
            raise ValueError(
                "the checkpoint was saved within an epoch that was packed by its lengths; on a "
                "stream, or on TRL's path, documents come in another order, so those left to train "
                "are unknown. Resume with the former data and settings, or set "
                "ignore_data_skip=True to restart the epoch"
            )
        if skipped and self._sampler is not None:
            logger.warning(
                f"{checkpoint} has no {FILE}: an earlier version or another trainer wrote it. The "
                f"first {skipped:,} micro-batches of epoch {epoch} are skipped as if data and "
                "settings had not changed, which cannot be verified; if they have changed, "
                "documents are lost and repeated"
            )
        if self.stream is None or checkpoint is None or not skipped:
            return epoch, skipped
        # A stream has no length from which `Trainer` could compute the epoch.
        epoch, steps = self.stream.load(self._stream_file(checkpoint))
        return epoch, steps * self.sampling.accumulation

    def _refuse_position_of_stream(self, checkpoint: str | None) -> None:
        if checkpoint is None or self.stream is not None or self.trainer.args.ignore_data_skip:
            return
        if any(Path(checkpoint).glob("stream_*.json")):
            raise ValueError(
                f"{checkpoint} was saved on a stream, whose documents come in another order than "
                "those of a data set, so those left to train are unknown. Resume with the stream, "
                "or set ignore_data_skip=True to restart the epoch"
            )

    def begin_epoch(self, epoch: int, *, epochs_trained: int, skipped: int) -> None:
        """Note the step at which an epoch began.

        Args:
            epoch: its number.
            epochs_trained: the epoch in which the run began.
            skipped: micro-batches that the run skips in it.
        """
        self._epoch, self._first_step = epoch, self.trainer.state.global_step
        if epochs_trained == epoch and not self.trainer.args.ignore_data_skip:
            self._first_step -= self._num_steps(skipped)

    # --- saving -------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Save which documents of the epoch are trained, or the position of this rank in a stream.

        This comes before the checkpoint is uploaded.
        """
        if self.stream is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            self.stream.save(self._stream_file(checkpoint))
        elif self._sampler is not None and self.trainer.args.should_save:
            self.record().save(checkpoint / FILE)

    def _stream_file(self, checkpoint: str | Path) -> str:
        return str(Path(checkpoint) / f"stream_{self.trainer.args.process_index}.json")

    def record(self) -> EpochRecord:
        """Return the record of the epoch as it is trained so far."""
        assert self._sampler is not None
        epoch, steps = self._epoch, self.trainer.state.global_step - self._first_step
        trained = np.zeros(self._sampler.num_drawn, bool)
        self._sampler.set_epoch(epoch)  # a callback may have made a data loader too
        if steps >= self._num_steps(len(self._sampler)):
            epoch, steps = epoch + 1, 0
        else:
            trained[self._sampler.places_in_first_steps(steps)] = True
        return EpochRecord(
            global_step=self.trainer.state.global_step,
            epoch=epoch,
            steps=steps,
            steps_per_epoch=self._num_steps(len(self._sampler)),
            settings=self.sampling.settings(),
            marks=self._marks_of_documents(),
            trained=trained,
        )

    def _marks_of_documents(self) -> DocumentMarks:
        if self._marks is None:
            self._marks = DocumentMarks.of(self._documents)
        return self._marks


def _ceil(number: float) -> int:
    """Round up, except for a whole number with the rounding error of a float."""
    return math.ceil(number - 1e-9)
