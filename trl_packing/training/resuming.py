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
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.state import temporarily
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.epoch_record import FILE, DocumentMarks, EpochRecord
from trl_packing.training.sampling import Sampling
from trl_packing.training.stream_loader import StreamBatches

logger = get_logger(__name__)


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
        self._marks: DocumentMarks | None = None  # of its documents
        self._place: tuple[int, int] | None = None  # the epoch that continues, its steps to skip
        self._epoch = 0
        self._first_step = 0  # the step of the run at which the epoch began

    @contextmanager
    def resuming(self, checkpoint: Any) -> Iterator[None]:
        """Continue inside the block where the record in `checkpoint` says, if it has one."""
        record = None
        if isinstance(checkpoint, (str, Path)) and (Path(checkpoint) / FILE).is_file():
            record = EpochRecord.load(Path(checkpoint) / FILE)
        with temporarily(self, _record=record):
            yield

    # --- the place in an epoch ----------------------------------------------------------------

    def follow_stream(self, stream: StreamBatches | None) -> None:
        """Follow a stream, which trains now; None: no sampler of ours trains."""
        self.stream = stream
        self._sampler = self._marks = self._place = None

    def follow(self, sampler: PackedBatchSampler, documents: ArrowDocuments) -> None:
        """Follow `sampler`, which trains now, from the recorded place on.

        Raises:
            ValueError: the steps of the epoch would hold other documents now.
        """
        self.follow_stream(None)
        self._sampler, self._marks = sampler, DocumentMarks.of(documents)
        record = self._record
        if record is None:
            return
        if not self.trainer.args.ignore_data_skip:
            if record.trained.any():
                settings = self.sampling.settings()
                record.check(settings, self._marks)
                sampler.set_epoch(record.epoch)
                is_same = np.array_equal(self._trained_in(record.steps), record.trained)
                record.check_steps(is_same, settings)
            self._place = (record.epoch, record.steps)
        elif record.epoch != record.global_step // self._num_steps(len(sampler)):
            self._place = (record.epoch, 0)

    def _num_steps(self, num_micro_batches: int) -> int:
        """Return the optimizer steps of `num_micro_batches` of one rank."""
        return -(-num_micro_batches // self.sampling.accumulation)

    def _trained_in(self, steps: int) -> np.ndarray:
        """Return which documents the first steps of the sampler's epoch train, bool."""
        assert self._sampler is not None
        trained = np.zeros(self._sampler.num_drawn, bool)
        trained[self._sampler.places_in_first_steps(steps)] = True
        return trained

    # --- numbers that `Trainer` computes ------------------------------------------------------

    def schedule(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `Trainer.set_initial_training_values` for a run that continues in an epoch."""
        if self._place is None or self._record is None:
            return found
        args, step, (epoch, behind) = self.trainer.args, self._record.global_step, self._place
        num_epochs, per_epoch, *others, max_steps = found
        if step == epoch * per_epoch + behind:
            pass  # as `Trainer` counts
        elif args.max_steps > 0:
            later = max(max_steps - step - (per_epoch - behind), 0)
            num_epochs = epoch + 1 + -(-later // per_epoch)
        else:
            requested = args.num_train_epochs - epoch
            left = max(_ceil(min(requested, 1) * per_epoch) - behind, 0)
            max_steps = step + left + max(_ceil((requested - 1) * per_epoch), 0)
            num_epochs = num_epochs if max_steps > step else epoch
        if changed := self._record.changed(self.sampling.settings()):
            logger.warning(
                f"resumed with {changed} in epoch {epoch} after {behind:,} of its steps; training "
                f"ends after step {max_steps:,}"
            )
        return (num_epochs, per_epoch, *others, max_steps)

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
        position = [] if checkpoint is None else [*Path(checkpoint).glob("stream_*.json")]
        if position and self.stream is None and not self.trainer.args.ignore_data_skip:
            raise ValueError(
                f"{checkpoint} was saved on a stream, whose documents come in another order than "
                "those of a data set, so those left to train are unknown. Resume with the stream, "
                "or set ignore_data_skip=True to restart the epoch"
            )
        if self._place is not None:
            epoch, steps = self._place
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
        if skipped and self.stream is not None and checkpoint is not None:
            # A stream has no length from which `Trainer` could compute the epoch.
            epoch, steps = self.stream.load(self._stream_file(checkpoint))
            skipped = steps * self.sampling.accumulation
        return epoch, skipped

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
        if self._sampler is None or self._marks is None or not self.trainer.args.should_save:
            return
        epoch, steps = self._epoch, self.trainer.state.global_step - self._first_step
        per_epoch = self._num_steps(len(self._sampler))
        if steps >= per_epoch:
            epoch, steps = epoch + 1, 0
        self._sampler.set_epoch(self._epoch)  # a callback may have made a data loader too
        record = EpochRecord(
            global_step=self.trainer.state.global_step,
            epoch=epoch,
            steps=steps,
            steps_per_epoch=per_epoch,
            settings=self.sampling.settings(),
            marks=self._marks,
            trained=self._trained_in(steps),
        )
        record.save(checkpoint / FILE)

    def _stream_file(self, checkpoint: str | Path) -> str:
        return str(Path(checkpoint) / f"stream_{self.trainer.args.process_index}.json")


def _ceil(number: float) -> int:
    """Round up, except for a whole number with the rounding error of a float."""
    return math.ceil(number - 1e-9)
