"""The record of a run: `run.json` in its output folder, from which pages and comparisons are made.

    log        entries of `state.log_history`, unchanged
    totals     what was trained up to an optimizer step      {200: Totals(documents=1612, ...)}

A log entry and the totals of its step make a point of a curve, over steps, documents, tokens or
seconds. JSON has no NaN and no infinity, so they are stored as texts: "NaN", "Infinity".
"""

import json
import math
from dataclasses import dataclass, field, fields
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

FILE = "run.json"

_FORMAT = 1


class Totals(NamedTuple):
    """Documents, tokens and seconds trained up to an optimizer step, by all ranks; None: unknown.

    Attributes:
        documents: number of documents; each piece of a split document counts.
        tokens: of documents, without padding.
        trained_tokens: targets of the loss.
        computed_tokens: tokens of the rows, with their padding.
        seconds: of training, without evaluation and saving.
    """

    documents: int | None = None
    tokens: int | None = None
    trained_tokens: int | None = None
    computed_tokens: int | None = None
    seconds: float | None = None

    def plus(self, other: "Totals") -> "Totals":
        """Return the sum; a number that is unknown in either stays unknown."""
        pairs = zip(self, other, strict=True)
        sums: list[Any] = [None if a is None or b is None else a + b for a, b in pairs]
        return Totals(*sums)


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
        path: "packed", "padding-free" or "TRL's path", with the reason.
        log: entries of `state.log_history`.
        totals: by optimizer step.
        status: "running", "finished", or the reason why the run stopped.
        step: optimizer steps so far.
        max_steps: optimizer steps of the whole run; 0: unknown.
        written: time of the last change, in UTC.
        report: lines of the packing report, label and text; empty on TRL's path.
        verdict: of the isolation check: "isolated", "leaks", ...; "" without a report.
        settings: all settings, as JSON.
        changed: names of the settings that differ from their defaults.
        versions: installed versions, by package.
        facts: model, device and number of ranks, in words.
        resumed: steps at which the run was resumed.
        notes: sentences about what is unknown.
    """

    name: str
    path: str = ""
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
    # Made from entries of the log, each once: a long run writes its record many times.
    _points: dict[str, list[Point]] = field(default_factory=dict, init=False, compare=False)
    _texts: list[str] = field(default_factory=list, init=False, compare=False)
    _num_read: int = field(default=0, init=False, compare=False)

    def points(self, name: str) -> list[Point]:
        """Return the logged numbers of this name, in the order of the log."""
        return self._series().get(name, [])

    def names(self) -> list[str]:
        """Return the names under which numbers were logged, in the order of the log."""
        return list(self._series())

    def _series(self) -> dict[str, list[Point]]:
        for entry in self.log[self._num_read :]:
            if not is_number(step := entry.get("step")):
                continue
            at = self.totals.get(int(step), UNKNOWN)
            place = int(step), at.documents, at.tokens, at.seconds
            for name, value in entry.items():
                if is_number(value):
                    self._points.setdefault(name, []).append(Point(*place, float(value)))
        self._num_read = len(self.log)
        return self._points

    def last(self, name: str) -> float | None:
        """Return the last logged number of this name; None if there is none."""
        points = self.points(name)
        return points[-1].value if points else None

    @property
    def total(self) -> Totals:
        """Return the totals that the run has trained."""
        known = [step for step in self.totals if step <= self.step]
        return self.totals[max(known)] if known and max(known) == self.step else UNKNOWN

    def to_json(self) -> str:
        """Return the record as JSON."""
        plain = {f.name: getattr(self, f.name) for f in fields(self) if f.init and f.name != "log"}
        start = json.dumps({"format": _FORMAT, **storable(plain)}, allow_nan=False)
        new = self.log[len(self._texts) :]
        self._texts += [json.dumps(storable(entry), allow_nan=False) for entry in new]
        return f'{start[:-1]}, "log": [{", ".join(self._texts)}]}}'

    @classmethod
    def from_json(cls, text: str) -> "RunRecord":
        """Return the record that `to_json` has written.

        Raises:
            ValueError: the text is not such a record.
        """
        try:
            found = json.loads(text)
            if found.pop("format") != _FORMAT:
                raise ValueError("written by another version of trl_packing")
            found["totals"] = {int(s): _totals(t) for s, t in found["totals"].items()}
            found["log"] = [{n: _restored(v) for n, v in entry.items()} for entry in found["log"]]
            return cls(**found)
        except (KeyError, TypeError, AttributeError) as problem:
            raise ValueError(f"not the record of a run ({problem!r})") from problem

    @classmethod
    def load(cls, path: Path) -> "RunRecord":
        """Read the record that `to_json` has written to `path`."""
        return cls.from_json(path.read_text(encoding="utf-8"))


def is_number(value: Any) -> TypeGuard[float]:
    """Return whether a logged value is a number; True and False are not."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def storable(value: Any) -> Any:
    """Return `value` as JSON; numbers that JSON lacks, and other objects, become texts."""
    if isinstance(value, dict):
        return {str(name): storable(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [storable(inner) for inner in value]
    if isinstance(value, float) and not math.isfinite(value):
        return json.dumps(value)  # "NaN", "Infinity", "-Infinity"
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    return str(value)


def _totals(found: Any) -> Totals:
    if not all(value is None or is_number(value) for value in found):
        raise ValueError("its totals are not numbers")
    return Totals(*found)


def _restored(value: Any) -> Any:
    return float(value) if value in ("NaN", "Infinity", "-Infinity") else value
