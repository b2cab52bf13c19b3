"""Continue an epoch where a checkpoint was saved: with the same steps, or not at all.

    epoch.npz    progress          the epoch, its optimizer steps so far, the settings of its plan
                 lengths, tails    tokens of every document; checksums of the last tokens of some
                 trained           documents that the epoch has trained, or of a mixture its places
                                   (packing/draw.py); a bit each

`Trainer` computes epoch and steps from the number of optimizer steps, as if the current settings
had planned the whole run. Here they come from the record. A stream saves its position instead.
"""

import json
import math
import zlib
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger
from trl import SFTTrainer

from trl_packing.attention.state import temporarily
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.training.sampling import Sampling
from trl_packing.training.stream_loader import StreamBatches

logger = get_logger(__name__)

FILE = "epoch.npz"

_NUM_TAILS = 1024  # documents whose last tokens are compared: enough to notice another order
_TAIL_TOKENS = 32


@dataclass(frozen=True, eq=False)
class EpochRecord:
    """The progress of an epoch when a checkpoint was written."""

    global_step: int
    epoch: int  # the next one where an epoch had just ended
    steps: int  # of the epoch
    settings: Mapping[str, Any]  # on which the plan of an epoch depends
    lengths: np.ndarray  # tokens of every document
    tails: np.ndarray  # checksums of the last tokens of up to 1,024 documents, evenly spread
    trained: np.ndarray  # bits of the documents that are trained, of a mixture of its places

    def save(self, path: Path) -> None:
        arrays = {name: value for name, value in vars(self).items() if hasattr(value, "dtype")}
        progress = {name: value for name, value in vars(self).items() if name not in arrays}
        arrays["progress"] = np.array(json.dumps(progress))
        # Not compressed: that takes 1.5 s for a million lengths.
        np.savez(path, checksum=_checksum(arrays), **arrays)

    @classmethod
    def load(cls, path: Path) -> "EpochRecord":
        """Read the record that `save` has written.

        Raises:
            ValueError: it holds other numbers.
        """
        with np.load(path, allow_pickle=False) as found:
            arrays = dict(found)
        if arrays.pop("checksum", None) != _checksum(arrays):
            raise ValueError(
                f"{path} is damaged (its checksum is another); resume from another checkpoint, or "
                "delete the file and set ignore_data_skip=True to restart the epoch"
            )
        return cls(**json.loads(str(arrays.pop("progress"))), **arrays)

    def changed(self, settings: Mapping[str, Any]) -> list[str]:
        """Return in words which of `settings` differ from the recorded ones."""
        then = self.settings
        return [
            f"{name}={value} instead of {then.get(name)}"
            for name, value in settings.items()
            if value != then.get(name)
        ]


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    return zlib.crc32(b"".join(arrays[name].tobytes() for name in sorted(arrays)))


def _marks_of(documents: ArrowDocuments) -> tuple[np.ndarray, np.ndarray]:
    """Return `lengths` and `tails` of a record. A chat template may write a date at the start."""
    lengths = documents.lengths()
    spread = np.linspace(0, len(lengths) - 1, min(len(lengths), _NUM_TAILS)).astype(np.int64)
    chosen = documents.__getitems__(np.unique(spread))
    ends = [document["input_ids"][-_TAIL_TOKENS:].astype(np.int64) for document in chosen]
    tails = np.array([zlib.crc32(end.tobytes()) for end in ends], np.int64)
    return lengths.astype(np.min_scalar_type(int(lengths.max(initial=0)))), tails


class ResumedEpochs:
    """Knows which documents of the current epoch are trained, and where a resumed run continues."""

    def __init__(self, trainer: SFTTrainer, sampling: Sampling):
        self.trainer = trainer
        self.sampling = sampling
        self.stream: StreamBatches | None = None  # that the run trains
        self._record: EpochRecord | None = None  # of the checkpoint to resume from
        self._sampler: Any = None  # of the training that runs, if it is ours
        self._marks: Any = None  # of its documents
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
        self._sampler, self._marks = sampler, _marks_of(documents)
        record = self._record
        if record is None:
            return
        if not self.trainer.args.ignore_data_skip:
            if record.trained.any():
                self._check_goes_on(record)
            self._place = (record.epoch, record.steps)
        elif record.epoch != record.global_step // self._num_steps(len(sampler)):
            self._place = (record.epoch, 0)

    def _check_goes_on(self, record: EpochRecord) -> None:
        """Raise ValueError unless the first steps of the epoch hold the trained documents."""
        then, now, (lengths, tails) = record.settings, self.sampling.settings(), self._marks
        changes = record.changed(now)
        if not (np.array_equal(lengths, record.lengths) and np.array_equal(tails, record.tails)):
            changes = [f"{len(record.lengths)} documents then, {len(lengths)} others now", *changes]
        elif then["mixture"] == now["mixture"]:
            self._sampler.set_epoch(record.epoch)
            if np.array_equal(self._trained_in(record.steps), record.trained):
                return
        if not changes:
            changes = ["a mixture of another number of epochs, or another version, planned them"]
        product = math.prod(then[name] for name in ("per_device_train_batch_size", "ranks"))
        raise ValueError(
            f"the checkpoint was saved after {record.steps:,} steps of an epoch, which would hold "
            f"other documents now ({'; '.join(changes)}). Resume with the former data and settings "
            "(per_device_train_batch_size × gradient_accumulation_steps × ranks may divide its "
            f"{product * then['gradient_accumulation_steps']} otherwise), or set "
            "ignore_data_skip=True to restart the epoch"
        )

    def _num_steps(self, num_micro_batches: int) -> int:
        return -(-num_micro_batches // self.sampling.accumulation)

    def _trained_in(self, steps: int) -> np.ndarray:
        """Return `trained` of a record after the first steps of the sampler's epoch."""
        trained = np.zeros(self._sampler.num_drawn, bool)
        drawn = self._sampler.drawn()
        trained[drawn.places[: drawn.step_ends[:steps].max(initial=0)]] = True
        return np.packbits(trained)

    # --- numbers that `Trainer` computes ------------------------------------------------------

    def schedule(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `Trainer.set_initial_training_values` for a run that continues in an epoch."""
        if self._place is None or self._record is None:
            return found
        args, step, (epoch, behind) = self.trainer.args, self._record.global_step, self._place
        num_epochs, per_epoch, *others, max_steps = found
        if step != epoch * per_epoch + behind:  # else as `Trainer` counts
            if args.max_steps <= 0:
                # Up to a rounding error: 1.1 epochs of 10 steps are 11.
                left = math.ceil((args.num_train_epochs - epoch) * per_epoch - 1e-9) - behind
                max_steps = step + max(left, 0)
            num_epochs = epoch
            if max_steps > step:
                num_epochs += -(-(max_steps - step + behind) // per_epoch)
        if changed := self._record.changed(self.sampling.settings()):
            logger.warning(
                f"resumed with {'; '.join(changed)} in epoch {epoch} after {behind:,} of its "
                f"steps; training ends after step {max_steps:,}"
            )
        return (num_epochs, per_epoch, *others, max_steps)

    def resume(self, epoch: int, skipped: int, checkpoint: str | None) -> tuple[int, int]:
        """Return the epoch in which the run continues, and the micro-batches to skip in it.

        `Trainer` computes `epoch` and `skipped` from the number of steps; `checkpoint` is the
        folder to resume from. ValueError: it was saved within an epoch of another order.
        """
        if self._place is not None:
            epoch, steps = self._place
            return epoch, steps * self.sampling.accumulation
        if checkpoint is None or self.trainer.args.ignore_data_skip:
            return epoch, skipped
        of_stream = any(Path(checkpoint).glob("stream_*.json"))
        was_planned = self._record is not None and self._record.trained.any()
        if (of_stream and self.stream is None) or (skipped and was_planned):
            of = "a stream" if of_stream else "a data set, which was packed by its lengths"
            raise ValueError(
                f"{checkpoint} was saved within an epoch of {of}; documents come in another order "
                "now. Resume with the former data, or set ignore_data_skip=True to restart it"
            )
        if skipped and self._sampler is not None:
            logger.warning(
                f"{checkpoint} has no {FILE}: an earlier version or another trainer wrote it. The "
                f"first {skipped:,} micro-batches of epoch {epoch} are skipped. With other data or "
                "settings, documents are lost and repeated"
            )
        if skipped and self.stream is not None:
            # A stream has no length from which `Trainer` could compute the epoch.
            epoch, steps = self.stream.load(self._stream_file(checkpoint))
            skipped = steps * self.sampling.accumulation
        return epoch, skipped

    def begin_epoch(self, epoch: int, *, epochs_trained: int, skipped: int) -> None:
        """Note the step at which an epoch began; the run skips `skipped` in its first one."""
        self._epoch, self._first_step = epoch, self.trainer.state.global_step
        if epochs_trained == epoch and not self.trainer.args.ignore_data_skip:
            self._first_step -= self._num_steps(skipped)

    # --- saving -------------------------------------------------------------------------------

    def save(self, checkpoint: Path) -> None:
        """Save which documents of the epoch are trained, or the position in a stream."""
        if self.stream is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            self.stream.save(self._stream_file(checkpoint))
        if self._sampler is None or not self.trainer.args.should_save:
            return
        step, epoch = self.trainer.state.global_step, self._epoch
        steps = step - self._first_step
        if steps >= self._num_steps(len(self._sampler)):
            epoch, steps = epoch + 1, 0
        self._sampler.set_epoch(self._epoch)  # a callback may have made a data loader too
        trained, (lengths, tails) = self._trained_in(steps), self._marks
        settings = self.sampling.settings()
        record = EpochRecord(step, epoch, steps, settings, lengths, tails, trained)
        record.save(checkpoint / FILE)

    def _stream_file(self, checkpoint: str | Path) -> str:
        return str(Path(checkpoint) / f"stream_{self.trainer.args.process_index}.json")
