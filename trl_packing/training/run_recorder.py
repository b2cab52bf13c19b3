"""Write `run.json` and `run.html` into the output folder while a run trains.

    log, evaluation    written at most every 5 seconds, and at most 2 % of the time
    checkpoint         run.json is saved in it too, so that a resumed run continues the record
    end, error         written once more

Rank zero writes. A file that cannot be written is warned of once, and training goes on.
"""

import json
import os
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import MISSING, fields, replace
from datetime import UTC, datetime
from pathlib import Path
from platform import python_version
from typing import Any

import torch
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import TrainerCallback
from trl import SFTTrainer

from trl_packing.attention.backends import PADDED
from trl_packing.config import PackingOptions
from trl_packing.pages.page import storable
from trl_packing.training.metrics import ThroughputMeter
from trl_packing.training.run_page import FILE, NOTHING, PAGE, UNKNOWN, RunRecord, Totals, run_page
from trl_packing.versions import TESTED, installed_version

logger = get_logger(__name__)

_RESUMED_WITHOUT = (
    "Resumed at step {:,}, and what was trained by then is unknown ({}), so the curves can be "
    "shown over steps alone."
)


class RunRecorder(TrainerCallback):
    """Keeps the record of a run, and its page.

    `path` returns the path of the run in words; `trl_path` says why it is TRL's, if it is. `data`
    are the facts of the training set.
    """

    least_seconds = 5.0  # between writes

    def __init__(
        self,
        trainer: SFTTrainer,
        meter: ThroughputMeter,
        path: Callable[[], str],
        trl_path: str | None,
        data: dict[str, str],
    ):
        self.trainer, self.meter, self.path, self.trl_path = trainer, meter, path, trl_path
        self.data = data
        self.record: RunRecord | None = None  # of the run that trains, or trained last
        self._checkpoint: Any = None  # to resume from
        self._before = NOTHING  # trained by the run that is resumed
        self._next_write = 0.0

    @contextmanager
    def recording(self, checkpoint: Any) -> Iterator[None]:
        """Continue the record of `checkpoint` inside the block, and write it at its end."""
        self._checkpoint, self.record = checkpoint, None
        try:
            yield
        except BaseException as problem:
            self._write(status=f"stopped by {type(problem).__name__}")
            raise
        # After all callbacks: only then is the report on a stream complete.
        if self._write(status="finished"):
            path = Path(self.trainer.args.output_dir) / PAGE
            print(f"{path} shows the curves, the report and the settings of this run")

    def on_train_begin(self, args: Any, state: Any, control: Any, **kwargs: Any) -> None:
        with self._guarded():
            model, step = self.trainer.model, state.global_step
            name = getattr(getattr(model, "config", None), "_name_or_path", "")
            name_of = torch.cuda.get_device_name if args.device.type == "cuda" else str
            facts = {"model": name or type(model).__name__, "device": name_of(args.device)}
            self.record = record = RunRecord(
                name=args.run_name or args.output_dir,
                settings=all_settings(args),
                changed=changed_settings(args),
                versions=installed_versions(),
                facts=facts | {"ranks": str(args.world_size)} | self.data,
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
        if not self.trainer.is_in_train or time.monotonic() >= self._next_write:
            self._write()

    def save(self, checkpoint: Path) -> None:
        """Save the record in a checkpoint that is being written."""
        with self._guarded():
            self._count()
            if self._writes() and self.trainer.args.should_save:
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
        step = self.trainer.state.global_step
        counts = self.meter.so_far()
        if self.record is None or not self.trainer.is_in_train or counts is None:
            return
        now = Totals(seconds=counts["seconds"])
        if self.trl_path:
            tokens = self.trainer._total_train_tokens - self.meter.tokens_before
            now = now._replace(tokens=tokens or None)
        elif counts["room"] or not step:  # rows of a user's collator have no copy on the CPU
            counted: Any = {name: counts[name] for name in Totals.__annotations__}
            if self.trainer.attention.backend in PADDED:  # inside the model, where nobody counts
                counted["computed_tokens"] = None
            now = Totals(**counted)
        pairs = zip(self._before, now, strict=True)
        sums: Any = (None if None in pair else sum(pair) for pair in pairs)
        self.record.totals[step] = Totals(*sums)

    def _up_to_now(self, status: str | None = None) -> RunRecord:
        """Return the record with the log, the report and the time of now."""
        assert self.record is not None
        state = self.trainer.state
        report = getattr(self.trainer, "packing_report", None)
        self.record = replace(
            self.record,
            path=self.path(),
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
        args = self.trainer.args
        if self.record is None or not self.trainer.is_world_process_zero():
            return False
        # A plain config that saves nothing expects an empty folder, as with TRL.
        is_expected = hasattr(args, "run_page") or args.save_strategy != "no"
        return is_expected and PackingOptions.of(args).run_page and Path(args.output_dir).is_dir()

    def _write(self, status: str | None = None) -> bool:
        """Write both files; return whether they were written."""
        began = time.monotonic()
        with self._guarded():
            if self._writes():
                folder = Path(self.trainer.args.output_dir)
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


# Values that TRL and transformers put in place of a default; no user has asked for them.
_TURNED_ON = ("bf16", "activation_checkpointing", "gradient_checkpointing", "do_eval")
_RESOLVED: dict[str, Any] = dict.fromkeys(_TURNED_ON, True) | {"pad_to_multiple_of": None}
_RESOLVED |= {"report_to": [], "debug": [], "dataloader_pin_memory": False}
_LEFT_OUT = {"output_dir", "logging_dir", "run_name", "disable_tqdm", "accelerator_config"}
_LEFT_OUT |= {"base_model_name_or_path", "peft_type", "peft_version", "task_type"}  # of an adapter

# Tokens of text are none.
_SECRET = re.compile(
    r"(?!(eos|pad|bos|unk)_token$)(.*_)?(tokens?|auth|password|passwd|secret|key)$", re.IGNORECASE
)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}")


def all_settings(args: Any) -> dict[str, Any]:
    """Return every setting of `args` as JSON; secrets are replaced by "…"."""
    plain = args.to_dict()  # hides every value whose name ends in _token
    plain |= {name: getattr(args, name) for name in ("eos_token", "pad_token") if name in plain}

    def hide(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        is_secret = {name for name, x in pairs if x and isinstance(x, str) and _SECRET.match(name)}
        return {name: "…" if name in is_secret else value for name, value in pairs}

    text = _SECRET_VALUE.sub("…", json.dumps(storable(plain)))
    return dict(json.loads(text, object_pairs_hook=hide))


def changed_settings(args: Any) -> list[str]:
    """Return the names of the settings of `args` that differ from their defaults."""
    left_out = _LEFT_OUT | {*["packing"] * getattr(args, "_packing_is_default", False)}
    left_out |= {*["bf16"] * getattr(args, "_leaves_bf16_out", False)}
    found = []
    for setting in fields(args):
        default = setting.default
        value = getattr(args, setting.name)
        if setting.default_factory is not MISSING:
            default = setting.default_factory()
        usual = default, _RESOLVED.get(setting.name, default)
        if setting.init and setting.name not in left_out and value not in usual:
            found.append(setting.name)
    return found


def facts_of_data(given: Any) -> dict[str, str]:
    """Return the facts by which data sets are told apart; of each, in a dictionary of them."""
    facts: dict[str, str] = {}
    if isinstance(given, dict):
        for source, dataset in given.items():
            facts |= {f"{name} of {source}": fact for name, fact in facts_of_data(dataset).items()}
        return facts
    if not isinstance(given, (Dataset, IterableDataset)):
        return {}
    known = {
        "data": given.info.dataset_name,
        "subset": given.info.config_name,
        "split": given.split,
        "rows": getattr(given, "num_rows", None),  # a stream has neither
        "fingerprint": getattr(given, "_fingerprint", None),
    }
    return {name: str(fact) for name, fact in known.items() if fact is not None}


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries below it."""
    names = ("trl-packing", *TESTED, "torch", "peft", "flash-attn", "deepspeed")
    found = {name: installed_version(name) for name in names}
    return {"python": python_version()} | {name: n for name, n in found.items() if n is not None}
