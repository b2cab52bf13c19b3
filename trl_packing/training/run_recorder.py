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
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from accelerate.logging import get_logger
from transformers import TrainerCallback

from trl_packing.attention.backends import PADDED
from trl_packing.config import PackingOptions
from trl_packing.pages.page import storable
from trl_packing.pages.record import (
    FILE,
    NOTHING,
    PAGE,
    UNKNOWN,
    RunRecord,
    Totals,
    all_settings,
    changed_settings,
    installed_versions,
)
from trl_packing.pages.run_page import run_page
from trl_packing.training.before_training import RunReport
from trl_packing.training.metrics import ThroughputMeter

logger = get_logger(__name__)

_RESUMED_WITHOUT = (
    "Resumed at step {:,}, and what was trained by then is unknown ({}), so the curves can be "
    "shown over steps alone."
)


@dataclass(eq=False)
class RunRecorder(TrainerCallback):
    """Keeps the record of a run, and its page."""

    least_seconds = 5.0  # between writes

    meter: ThroughputMeter
    path: str  # of the run, in words
    trl_path: str | None  # the reason, on TRL's path
    data: dict[str, str]  # facts of the training set
    report: RunReport | None  # None on TRL's path
    total: Callable[[], int]  # the tokens that TRL logs
    record: RunRecord | None = None  # of the run that trains, or trained last
    _is_training: bool = False
    _checkpoint: Any = None  # to resume from
    _before: Totals = NOTHING  # trained by the run that is resumed
    _next_write: float = 0.0

    @contextmanager
    def recording(self, checkpoint: Any) -> Iterator[None]:
        """Continue the record of `checkpoint` inside the block, and write it at its end."""
        self._checkpoint, self.record = checkpoint, None
        self._is_training = True
        try:
            yield
        except BaseException as problem:
            self._write(status=f"stopped by {type(problem).__name__}")
            raise
        finally:
            self._is_training = False
        # After all callbacks: only then is the report on a stream complete.
        if self._write(status="finished"):
            path = Path(self._args.output_dir) / PAGE
            print(f"{path} shows the curves, the report and the settings of this run")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guarded():
            self._args, self._state = args, state
            model = kwargs["model"]
            step = state.global_step
            name = getattr(getattr(model, "config", None), "_name_or_path", "")
            name_of = torch.cuda.get_device_name if args.device.type == "cuda" else str
            self.record = record = RunRecord(
                name=args.run_name or args.output_dir,
                settings=all_settings(args),
                changed=changed_settings(args),
                versions=installed_versions(),
                facts={
                    "model": name or type(model).__name__,
                    "device": name_of(args.device),
                    "ranks": str(args.world_size),
                    **self.data,
                },
            )
            for name, config in (getattr(model, "peft_config", None) or {}).items():
                adapter = "peft." if name == "default" else f"peft {name}."
                values = {
                    n: sorted(v) if isinstance(v, set) else v for n, v in vars(config).items()
                }
                record.settings |= {adapter + n: v for n, v in storable(values).items()}
                record.changed += [adapter + n for n in changed_settings(config)]
            self._before = self._continue(record, step) if step else NOTHING
            record.totals[step] = self._before
        self._write()

    def on_step_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        self.meter.start_clock()  # on TRL's path, where no micro-batch is counted

    def on_log(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guarded():
            self._count()
        if not self._is_training or time.monotonic() >= self._next_write:
            self._write()

    def save(self, checkpoint: Path) -> None:
        """Save the record in a checkpoint that is being written."""
        with self._guarded():
            self._count()
            if self._writes() and self._args.should_save:
                checkpoint.mkdir(parents=True, exist_ok=True)
                replace_file(checkpoint / FILE, self._up_to_now().to_json())

    def _continue(self, record: RunRecord, step: int) -> Totals:
        """Take over the record of the checkpoint; return what was trained by then."""
        try:
            found = RunRecord.load(Path(self._checkpoint) / FILE)
        except (OSError, ValueError, TypeError) as problem:
            found = RunRecord("", notes=[_RESUMED_WITHOUT.format(step, problem)])
        record.totals = {at: total for at, total in found.totals.items() if at <= step}
        record.resumed = [*(at for at in found.resumed if at <= step), step]
        record.notes = found.notes
        return found.totals.get(step, UNKNOWN)

    def _count(self) -> None:
        """Note what was trained up to the current step, if that was counted over all ranks."""
        counts = self.meter.so_far()
        if self.record is None or not self._is_training or counts is None:
            return
        step = self._state.global_step
        now = Totals(seconds=counts["seconds"])
        if self.trl_path:
            now = now._replace(tokens=self.total() - self.meter.tokens_before or None)
        elif counts["room"] or not step:  # rows of a user's collator have no copy on the CPU
            counted: Any = {name: counts[name] for name in Totals.__annotations__}
            guard = self.report and self.report.collators.guard
            if guard and guard.attention.backend in PADDED:  # where nobody counts
                counted["computed_tokens"] = None
            now = Totals(**counted)
        sums: Any = (
            None if None in pair else sum(pair) for pair in zip(self._before, now, strict=True)
        )
        self.record.totals[step] = Totals(*sums)

    def _up_to_now(self, status: str | None = None) -> RunRecord:
        """Return the record with the log, the report and the time of now."""
        assert self.record is not None
        state = self._state
        report = self.report.current if self.report else None
        self.record = replace(
            self.record,
            path=self.path,
            trl_path=self.trl_path or "",
            log=state.log_history,
            status=status or self.record.status,
            step=state.global_step,
            max_steps=max(state.max_steps, 0),
            written=f"{datetime.now(UTC):%Y-%m-%d %H:%M} UTC",
            report=report.lines() if report else self.record.report,
            verdict=report.checked.verdict if report else self.record.verdict,
        )
        return self.record

    def _writes(self) -> bool:
        """Return whether this rank writes, into a folder that TRL has made."""
        if self.record is None or not self._state.is_world_process_zero:
            return False
        args = self._args
        # A plain config that saves nothing expects an empty folder, as with TRL.
        is_expected = hasattr(args, "run_page") or args.save_strategy != "no"
        return is_expected and PackingOptions.of(args).run_page and Path(args.output_dir).is_dir()

    def _write(self, status: str | None = None) -> bool:
        """Write both files; return whether they were written."""
        began = time.monotonic()
        with self._guarded():
            if self._writes():
                folder = Path(self._args.output_dir)
                record = self._up_to_now(status)
                replace_file(folder / FILE, record.to_json())
                replace_file(folder / PAGE, run_page(record))
                ended = time.monotonic()
                self._next_write = ended + max(self.least_seconds, 50 * (ended - began))
                return True
        return False

    @contextmanager
    def _guarded(self) -> Iterator[None]:
        """Warn of a problem inside the block: no run stops because of its page."""
        try:
            yield
        except Exception as problem:
            logger.warning_once(f"the run's page cannot be written ({problem!r})")


def replace_file(path: Path, text: str) -> None:
    """Write `text` so that a reader finds the old file or the new one, never a part."""
    part = path.with_name(f".{path.name}.part")
    part.write_text(text, encoding="utf-8")
    os.replace(part, path)
