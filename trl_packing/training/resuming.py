"""Continue an epoch where a checkpoint was saved: with the same steps, or not at all.

`Trainer` computes epoch and steps from the number of optimizer steps, as if the current settings
had planned the whole run. Here they come from the record ``epoch.json`` in the checkpoint. A stream
saves its position instead.
"""

import json
import math
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from accelerate.logging import get_logger

from trl_packing.attention.model_facts import temporarily
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.stream import StreamBatches

logger = get_logger(__name__)


FILE = "epoch.json"

_NUM_TAILS = 1024  # documents whose last tokens are compared: enough to notice another order
_TAIL_TOKENS = 32


@dataclass(frozen=True)
class EpochRecord:
    """The progress of an epoch when a checkpoint was written."""

    global_step: int
    epoch: int  # the next one where an epoch had just ended
    steps: int  # of the epoch
    settings: dict[str, Any]  # on which the plan of an epoch depends
    documents: list[int]  # their number, and a checksum
    trained: int  # checksum of those in the steps so far

    def save(self, path: Path) -> None:
        values = json.dumps(vars(self))
        path.write_text(json.dumps([values, zlib.crc32(values.encode())]), encoding="utf-8")

    @classmethod
    def load(cls, path: Path) -> "EpochRecord":
        """Read what `save` has written; ValueError if it was changed."""
        with suppress(ValueError):  # of JSON that is cut off
            values, checksum = json.loads(path.read_text(encoding="utf-8"))
            if zlib.crc32(values.encode()) == checksum:
                return cls(**json.loads(values))
        raise ValueError(
            f"{path} is damaged; resume from another checkpoint, or delete the file and set "
            "ignore_data_skip=True to restart the epoch"
        )


def marks_of(documents: ArrowDocuments) -> list[int]:
    """Return the number of documents, and a checksum of all lengths and of some last tokens."""
    lengths = documents.lengths().astype(np.int64)
    spread = np.linspace(0, len(lengths) - 1, min(len(lengths), _NUM_TAILS)).astype(np.int64)
    chosen = documents.__getitems__(np.unique(spread))
    # Not the first tokens: a chat template may write a date there.
    ends = [document["input_ids"][-_TAIL_TOKENS:].astype(np.int64) for document in chosen]
    return [len(lengths), zlib.crc32(np.concatenate([lengths, *ends]).tobytes())]


@dataclass(eq=False)
class ResumedEpochs:
    """Knows which documents of the current epoch are trained, and where a resumed run continues."""

    args: Any
    stream: StreamBatches | None = None  # that the run trains
    _checkpoint: Path | None = None  # to resume from
    _record: EpochRecord | None = None  # in it
    _sampler: Any = None  # of the training that runs, if it is ours
    _settings: dict[str, Any] = field(default_factory=dict)  # on which its epochs depend
    _marks: Any = None  # of its documents
    _position: tuple[int, int] | None = None  # the epoch that continues, its steps to skip
    _epoch: int = 0
    _first_step: int = 0  # the step of the run at which the epoch began

    @contextmanager
    def resuming(self, checkpoint: Any) -> Iterator[None]:
        """Continue inside the block where `checkpoint` was saved, if it is a folder."""
        folder = Path(checkpoint) if isinstance(checkpoint, (str, Path)) else None
        record = None
        if folder is not None and (folder / FILE).is_file():
            record = EpochRecord.load(folder / FILE)
        with temporarily(self, _checkpoint=folder, _record=record):
            yield

    def set_stream(self, stream: StreamBatches | None) -> None:
        """Set the stream that trains now; None: no sampler of ours trains."""
        self.stream = stream
        self._sampler = self._marks = self._position = None

    def start(
        self, sampler: PackedBatchSampler, documents: ArrowDocuments, settings: dict[str, Any]
    ) -> None:
        """Start from the recorded position of `sampler`, which trains now.

        `settings` are those on which its epochs depend.

        Raises:
            ValueError: the steps of the epoch would hold other documents now.
        """
        self.set_stream(None)
        self._sampler, self._settings = sampler, settings
        self._marks = marks_of(documents)
        record = self._record
        if record is None:
            return
        if not self.args.ignore_data_skip:
            if record.steps:
                self._check_goes_on(record)
            self._position = (record.epoch, record.steps)
        elif record.epoch != record.global_step // self._num_steps(len(sampler)):
            self._position = (record.epoch, 0)

    def _check_goes_on(self, record: EpochRecord) -> None:
        """Raise ValueError unless the first steps of the epoch hold the trained documents."""
        then = record.settings
        now = self._settings
        changes = [
            f"{name}={value} instead of {then.get(name)}"
            for name, value in now.items()
            if value != then.get(name)
        ]
        if self._marks != record.documents:
            numbers = f"{record.documents[0]} documents then, {self._marks[0]} others now"
            changes = [numbers, *changes]
        elif then["mixture"] == now["mixture"]:
            self._sampler.set_epoch(record.epoch)
            if self._trained_in(record.steps) == record.trained:
                return
        raise ValueError(
            f"the checkpoint was saved after {record.steps:,} steps of an epoch, which would hold "
            f"other documents now ({'; '.join(changes) or 'num_train_epochs'}). Resume with the "
            "former data and settings (per_device_train_batch_size × gradient_accumulation_steps × "
            "ranks may divide otherwise), or set ignore_data_skip=True to restart the epoch"
        )

    def _num_steps(self, num_micro_batches: int) -> int:
        return -(-num_micro_batches // self.args.gradient_accumulation_steps)

    def _trained_in(self, steps: int) -> int:
        """Return `trained` of a record after the first steps of the sampler's epoch."""
        drawn = self._sampler.drawn()
        places = drawn.places[: drawn.step_ends[:steps].max(initial=0)].astype(np.int64)
        return zlib.crc32(np.sort(places).tobytes())

    def schedule(self, found: tuple[Any, ...]) -> tuple[Any, ...]:
        """Return `Trainer.set_initial_training_values` for a run that continues in an epoch."""
        if self._position is None or self._record is None:
            return found
        args = self.args
        step = self._record.global_step
        epoch, behind = self._position
        num_epochs, per_epoch, *others, max_steps = found
        if step != epoch * per_epoch + behind:  # else as `Trainer` counts
            if args.max_steps <= 0:
                # Up to a rounding error: 1.1 epochs of 10 steps are 11.
                left = math.ceil((args.num_train_epochs - epoch) * per_epoch - 1e-9) - behind
                max_steps = step + max(left, 0)
            num_epochs = epoch
            if max_steps > step:
                num_epochs += -(-(max_steps - step + behind) // per_epoch)
        return (num_epochs, per_epoch, *others, max_steps)

    def resume(self, epoch: int, skipped: int) -> tuple[int, int]:
        """Return the epoch in which the run continues, and the micro-batches to skip in it.

        `Trainer` computes `epoch` and `skipped` from the number of steps. ValueError: the
        checkpoint was saved within an epoch of another order.
        """
        accumulation = self.args.gradient_accumulation_steps
        if self._position is not None:
            epoch, steps = self._position
            return epoch, steps * accumulation
        checkpoint = self._checkpoint
        if checkpoint is None or self.args.ignore_data_skip:
            return epoch, skipped
        of_stream = any(checkpoint.glob("stream_*.json"))
        was_planned = self._record is not None and self._record.steps
        if (of_stream and self.stream is None) or (skipped and was_planned):
            raise ValueError(
                f"{checkpoint} was saved within an epoch of {'a' if of_stream else 'no'} stream; "
                "resume with the former data, or set ignore_data_skip=True to restart the epoch"
            )
        if skipped and self._sampler is not None:
            logger.warning(
                f"{checkpoint} has no {FILE}: another trainer wrote it. The first {skipped:,} "
                f"micro-batches of epoch {epoch} are skipped, whatever they hold"
            )
        if skipped and self.stream is not None:
            # A stream has no length from which `Trainer` could compute the epoch.
            epoch, steps = self.stream.load(self._stream_file(checkpoint))
            skipped = steps * accumulation
        return epoch, skipped

    def begin_epoch(self, epoch: int, step: int, *, epochs_trained: int, skipped: int) -> None:
        """Note the `step` at which an epoch began; the run skips `skipped` in its first one."""
        self._epoch = epoch
        self._first_step = step
        if epochs_trained == epoch and not self.args.ignore_data_skip:
            self._first_step -= self._num_steps(skipped)

    def save(self, checkpoint: Path, step: int) -> None:
        """Save which documents are trained at a `step` in the epoch, or the place in a stream."""
        if self.stream is not None:
            checkpoint.mkdir(parents=True, exist_ok=True)
            self.stream.save(self._stream_file(checkpoint))
        if self._sampler is None or not self.args.should_save:
            return
        epoch = self._epoch
        steps = step - self._first_step
        if steps >= self._num_steps(len(self._sampler)):
            epoch += 1
            steps = 0
        self._sampler.set_epoch(self._epoch)  # a callback may have made a data loader too
        trained = self._trained_in(steps)
        EpochRecord(step, epoch, steps, self._settings, self._marks, trained).save(
            checkpoint / FILE
        )

    def _stream_file(self, checkpoint: Path) -> Path:
        return checkpoint / f"stream_{self.args.process_index}.json"
