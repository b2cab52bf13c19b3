"""The record of a run, `run.json`: what was logged and trained, its settings, versions and facts.

    log        entries of `state.log_history`, unchanged
    totals     what was trained up to an optimizer step      {200: Totals(documents=1612, ...)}

JSON has no NaN and no infinity, so they are stored as texts: "NaN", "Infinity".
"""

import json
import re
from dataclasses import MISSING, dataclass, field, fields
from functools import cached_property
from pathlib import Path
from platform import python_version
from typing import Any, NamedTuple, TypeGuard

from datasets import Dataset, IterableDataset

from trl_packing.data.printable import SECRET_VALUE, is_secret
from trl_packing.pages.page import storable
from trl_packing.versions import TESTED, installed_version

FILE, PAGE = "run.json", "run.html"

_FORMAT = 1


class Totals(NamedTuple):
    """What was trained up to an optimizer step, by all ranks; None: unknown.

    `tokens` are without padding, `computed_tokens` with it, `seconds` without evaluations.
    """

    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    computed_tokens: int | None = None
    seconds: float | None = None


NOTHING = Totals(0, 0, 0, 0, 0.0)
UNKNOWN = Totals()


class Point(NamedTuple):
    """A logged number, and what was trained when it was logged; None: unknown."""

    step: int
    documents: int | None
    tokens: int | None
    seconds: float | None
    value: float


@dataclass
class RunRecord:
    """A run as far as it was trained.

    Attributes:
        name: the output folder, or the name that the user gave the run.
        path: "packed", "padding-free" or "TRL's path"; `trl_path` is the reason for that.
        log: entries of `state.log_history`.
        totals: by optimizer step.
        status: "running", "finished", or the reason why the run stopped.
        step: optimizer steps so far; `max_steps` of the whole run, 0: unknown.
        written: time of the last change, in UTC.
        report: lines of the packing report; empty on TRL's path.
        verdict: of the isolation check: "isolated", "leaks", ...; "" without a report.
        settings: all settings, as JSON; `changed` names those that differ from their defaults.
        facts: model, device and number of ranks, in words.
        resumed: steps at which the run was resumed.
        notes: sentences about what is unknown.
    """

    name: str
    path: str = ""
    trl_path: str = ""
    log: list[dict[str, Any]] = field(default_factory=list)
    totals: dict[int, Totals] = field(default_factory=dict)
    status: str = "running"
    step: int = 0
    max_steps: int = 0
    written: str = ""
    report: list[Any] = field(default_factory=list)
    verdict: str = ""
    settings: dict[str, Any] = field(default_factory=dict)
    changed: list[str] = field(default_factory=list)
    versions: dict[str, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    resumed: list[int] = field(default_factory=list)
    notes: list[str] = field(default_factory=list)

    @cached_property
    def series(self) -> dict[str, list[Point]]:
        """The logged numbers by name, in the order of the log."""
        found: dict[str, list[Point]] = {}
        for entry in self.log:
            if _is_number(step := entry.get("step")):
                place = self.place(int(step))
                for name, value in entry.items():
                    if _is_number(value):
                        found.setdefault(name, []).append(Point(*place, float(value)))
        return found

    def place(self, step: int) -> tuple[int, int | None, int | None, float | None]:
        """Return the step, and the documents, tokens and seconds trained by then."""
        at = self.totals.get(step, UNKNOWN)
        return step, at.documents, at.tokens, at.seconds

    @property
    def total(self) -> Totals:
        """The totals that the run has trained."""
        return self.totals.get(self.step, UNKNOWN)

    def to_json(self) -> str:
        """Return the record as JSON."""
        plain = {each.name: getattr(self, each.name) for each in fields(self)}
        return json.dumps(storable({"format": _FORMAT, **plain}), allow_nan=False)

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read the record that `to_json` has written to `path`; ValueError: it holds none."""
        try:
            found = json.loads(path.read_text(encoding="utf-8"))
            if found.pop("format") != _FORMAT:
                raise ValueError("written by another version of trl_packing")
            found["totals"] = {int(s): Totals(*t) for s, t in found["totals"].items()}
            texts = ("NaN", "Infinity", "-Infinity")
            for entry in found["log"]:
                for name, value in entry.items():
                    if value in texts:
                        entry[name] = float(value)
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"not the record of a run ({problem!r})") from problem


def _is_number(value: Any) -> TypeGuard[float]:
    """Return whether a logged value is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


# A machine without a GPU accepts these settings. None of them affects the data.
_OFF = ("bf16", "fp16", "bf16_full_eval", "fp16_full_eval", "push_to_hub")
ON_ANY_MACHINE: dict[str, Any] = {
    **dict.fromkeys(_OFF, False),
    "use_cpu": True,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "report_to": "none",
}

# Values that TRL and transformers put in place of a default; no user has asked for them.
_TURNED_ON = ("bf16", "activation_checkpointing", "gradient_checkpointing", "do_eval")
_RESOLVED: dict[str, Any] = {
    **dict.fromkeys(_TURNED_ON, True),
    "pad_to_multiple_of": None,
    "report_to": [],
    "debug": [],
    "dataloader_pin_memory": False,
}
_LEFT_OUT = {
    "output_dir",
    "logging_dir",
    "run_name",
    "disable_tqdm",
    "accelerator_config",
    # Of an adapter.
    "base_model_name_or_path",
    "peft_type",
    "peft_version",
    "task_type",
}


def all_settings(args: Any) -> dict[str, Any]:
    """Return every setting of `args` as JSON; secrets are replaced by "…"."""
    plain = args.to_dict()  # hides every value whose name ends in _token
    plain |= {name: getattr(args, name) for name in ("eos_token", "pad_token") if name in plain}

    def hide(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        shown = dict(pairs)
        for name, value in pairs:
            if value and isinstance(value, str) and is_secret(name):
                shown[name] = "…"
        return shown

    text = re.sub(SECRET_VALUE, "…", json.dumps(storable(plain)))
    return dict(json.loads(text, object_pairs_hook=hide))


def changed_settings(args: Any) -> list[str]:
    """Return the names of the settings of `args` that differ from their defaults."""
    left_out = set(_LEFT_OUT)
    if getattr(args, "_packing_is_default", False):
        left_out.add("packing")
    if getattr(args, "_leaves_bf16_out", False):
        left_out.add("bf16")
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
    if isinstance(given, dict):
        return {
            f"{name} of {source}": fact
            for source, dataset in given.items()
            for name, fact in facts_of_data(dataset).items()
        }
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
    found = {"python": python_version()}
    for name in ("trl-packing", *TESTED, "torch", "peft", "flash-attn", "deepspeed"):
        if version := installed_version(name):
            found[name] = version
    return found
