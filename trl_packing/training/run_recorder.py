"""Write `run.json` and `run.html` into the output folder while a run trains.

    log, evaluation    written at most every 5 seconds, and at most 2 % of the time
    checkpoint         run.json is saved in it too, so that a resumed run continues the record
    end, error         written once more

Rank zero writes. A file that cannot be written is warned of once, and training goes on.
"""

import os
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from accelerate.logging import get_logger
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packing.config import PackingOptions
from trl_packing.training import run_page
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.run_record import FILE, NOTHING, UNKNOWN, RunRecord, Totals
from trl_packing.training.run_settings import (
    all_settings,
    changed_settings,
    device_in_words,
    installed_versions,
)

logger = get_logger(__name__)

_PADS = ("padded", "equal_lengths")  # attention backends


class RunRecorder(TrainerCallback):
    """Keeps the record of a run, and its page. ``trainer.remove_callback(RunRecorder)`` stops it.

    Args:
        trainer: its arguments and state are read.
        meter: counts what is trained.
        path: returns the path of the run in words.

    Attributes:
        least_seconds: between two writes.
        most_share: of the time that may be spent on writing.
    """

    least_seconds = 5.0
    most_share = 0.02

    def __init__(self, trainer: SFTTrainer, meter: ThroughputMeter, path: Callable[[], str]):
        self.trainer = trainer
        self.meter = meter
        self.path = path
        self.record: RunRecord | None = None  # of the run that trains, or trained last
        self._checkpoint: Path | None = None  # to resume from
        self._before: Totals = NOTHING  # of the run that is resumed
        self._tokens_before = 0  # counted by TRL in earlier runs of this trainer
        self._next_write = 0.0
        self._has_warned = False

    # --- events -------------------------------------------------------------------------------

    @contextmanager
    def following(self, checkpoint: Any) -> Iterator[None]:
        """Continue the record of `checkpoint` inside the block, and write it at its end."""
        is_path = isinstance(checkpoint, (str, Path))
        self._checkpoint, self.record = (Path(checkpoint) if is_path else None), None
        try:
            yield
        except BaseException as problem:
            with self._guarded():
                self._write(status=f"stopped by {type(problem).__name__}")
            raise
        with self._guarded():  # after all callbacks: only then is the report on a stream complete
            if self._write(status="finished"):
                page = Path(self.trainer.args.output_dir) / run_page.FILE
                print(f"{page} shows the curves, the report and the settings of this run")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guarded():
            self._begin(args, state)
            self._write()

    def _begin(self, args: Any, state: Any) -> None:
        trainer = self.trainer
        self._tokens_before = getattr(trainer, "_total_train_tokens", 0)
        self.record = RunRecord(
            name=args.run_name or args.output_dir,
            settings=all_settings(args),
            changed=changed_settings(args),
            versions=installed_versions(),
            facts={
                "model": _name_of(trainer.model),
                "device": device_in_words(args.device),
                "ranks": str(args.world_size),
            },
        )
        self._before = self._resume(state.global_step) if state.global_step else NOTHING
        self.record.totals[state.global_step] = self._before

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.start_clock()  # on TRL's path, where no micro-batch is counted

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guarded():
            self._count()
            if not self.trainer.is_in_train or time.monotonic() >= self._next_write:
                self._write()

    def save(self, checkpoint: Path) -> None:
        """Save the record in a checkpoint that is being written."""
        with self._guarded():
            self._count()
            if self._writes and self.trainer.args.should_save:
                checkpoint.mkdir(parents=True, exist_ok=True)
                replace_file(checkpoint / FILE, self._updated().to_json())

    # --- the record ---------------------------------------------------------------------------

    def _resume(self, step: int) -> Totals:
        """Take over the record up to `step`; return what was trained by then."""
        assert self.record is not None
        found = None
        if self._checkpoint is not None and (self._checkpoint / FILE).is_file():
            try:
                found = RunRecord.load(self._checkpoint / FILE)
            except (OSError, ValueError) as problem:
                self.record.notes.append(f"{self._checkpoint / FILE}: {problem}")
        if found is None:
            self.record.notes.append(
                f"Resumed at step {step:,} from a checkpoint without {FILE}: the documents, tokens "
                "and seconds before are unknown, so the curves can be shown over steps alone."
            )
            self.record.resumed = [step]
            return UNKNOWN
        if found.totals.get(step, UNKNOWN) == UNKNOWN and not found.notes:
            found.notes.append(f"{FILE} of step {step:,} has no counts: later ones are unknown.")
        self.record.totals = {at: total for at, total in found.totals.items() if at <= step}
        self.record.resumed = [*(at for at in found.resumed if at <= step), step]
        self.record.notes = found.notes
        return found.totals.get(step, UNKNOWN)

    def _count(self) -> None:
        """Note what was trained up to the current step, if that was counted over all ranks."""
        step = self.trainer.state.global_step
        if self.record is None or not self.trainer.is_in_train:
            return
        measured = self.meter.so_far()
        if measured is None:
            return
        counts, seconds = measured
        if self.path().startswith("TRL"):
            tokens = getattr(self.trainer, "_total_train_tokens", 0) - self._tokens_before
            now = Totals(tokens=tokens or None, seconds=seconds)
        elif counts.room or not step:
            pads = self.trainer.attention.backend in _PADS  # inside the model, where nobody counts
            computed = None if pads else counts.computed
            now = Totals(counts.documents, counts.tokens, counts.trained_tokens, computed, seconds)
        else:  # a user's collator: its rows have no copy on the CPU
            now = Totals(seconds=seconds)
        self.record.totals[step] = self._before.plus(now)

    def _updated(self, status: str | None = None) -> RunRecord:
        """Return the record with the log, the report and the time of now."""
        assert self.record is not None
        record, state = self.record, self.trainer.state
        record.path, record.log = self.path(), state.log_history
        record.status = status or record.status
        record.step, record.max_steps = state.global_step, max(state.max_steps, 0)
        record.written = f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC"
        report = getattr(self.trainer, "packing_report", None)
        if report is not None:
            record.report, record.verdict = report.lines(), report.checked.verdict
        return record

    # --- files --------------------------------------------------------------------------------

    @property
    def _writes(self) -> bool:
        """Whether this rank writes, into a folder that TRL has made."""
        args = self.trainer.args
        if self.record is None or not self.trainer.is_world_process_zero():
            return False
        if not PackingOptions.of(args).run_page or not Path(args.output_dir).is_dir():
            return False
        # A plain config that saves nothing expects an empty folder, as with TRL.
        return hasattr(args, "run_page") or args.save_strategy != "no"

    def _write(self, status: str | None = None) -> bool:
        """Write both files; return whether this run has any."""
        if not self._writes:
            return False
        folder, began = Path(self.trainer.args.output_dir), time.monotonic()
        try:
            record = self._updated(status)
            replace_file(folder / FILE, record.to_json())
            replace_file(folder / run_page.FILE, run_page.run_page(record))
        finally:
            now = time.monotonic()
            self._next_write = now + max(self.least_seconds, (now - began) / self.most_share)
        return True

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Warn of the first problem inside the block: no run stops because of its page."""
        try:
            yield
        except Exception as problem:
            if not self._has_warned:
                self._has_warned = True
                logger.warning(f"the run's page cannot be written ({problem!r}); training goes on")


def replace_file(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.{os.getpid()}")
    try:
        part.write_text(text, encoding="utf-8")
        os.replace(part, path)
    finally:
        part.unlink(missing_ok=True)


def _name_of(model: Any) -> str:
    config = getattr(model, "config", None)
    return getattr(config, "_name_or_path", "") or type(model).__name__
