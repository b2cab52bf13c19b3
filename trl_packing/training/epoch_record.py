"""A checkpoint's record of its epoch: the trained documents, and marks that identify all documents.

    epoch.npz    progress          the epoch, its optimizer steps so far, the user's settings
                 lengths, tails    tokens of every document; checksums of the last tokens of some
                 before            documents that the epoch trained under earlier settings
                 trained           documents that it has trained in all; a bit each

An epoch of a mixture draws some documents more than once, others not. Its bits are then those of
its places (packing/draw.py).

The record holds documents, not the plan, so the documents left to train are known under any plan.
"""

import json
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_packing.documents.arrow import ArrowDocuments

FILE = "epoch.npz"

_NUM_TAILS = 1024  # documents whose last tokens are compared: enough to notice another order
_TAIL_TOKENS = 32
_TRUNCATING = ("truncate", "truncate_start", "truncate_prompt")


@dataclass(frozen=True, eq=False)
class DocumentMarks:
    """Marks that identify documents: their order and lengths, and the ends of some of them.

    Attributes:
        lengths: tokens of every document, ``(documents,)``.
        tails: checksums of the last tokens of up to 1,024 documents, evenly spread. The first
            tokens may differ: a chat template may write the date there.
    """

    lengths: np.ndarray
    tails: np.ndarray

    @classmethod
    def of(cls, documents: ArrowDocuments) -> "DocumentMarks":
        lengths = documents.lengths()
        chosen = documents.__getitems__(_evenly_spread(len(lengths)))
        tails = [document["input_ids"][-_TAIL_TOKENS:].astype(np.int64) for document in chosen]
        return cls(lengths, np.array([zlib.crc32(tail.tobytes()) for tail in tails], np.int64))

    def difference(self, now: "DocumentMarks", *, clipped_to: int | None = None) -> str | None:
        """Return in words how the documents of `now` differ; None if they are the same.

        Args:
            now: marks of the current documents.
            clipped_to: compare lengths only up to this one, because longer documents were
                truncated.
        """
        if len(self.lengths) != len(now.lengths):
            return f"{len(self.lengths)} documents then, {len(now.lengths)} now"
        then_lengths, now_lengths = self.lengths, now.lengths
        if clipped_to is not None:
            then_lengths, now_lengths = (
                np.minimum(n, clipped_to) for n in (then_lengths, now_lengths)
            )
        other = np.flatnonzero(then_lengths != now_lengths)
        if len(other):
            first = other[0]
            return f"document {first} had {self.lengths[first]} tokens, now {now.lengths[first]}"
        looked_at = _evenly_spread(len(now.lengths))
        other = self.tails != now.tails
        if clipped_to is not None:
            other &= (now_lengths < clipped_to)[looked_at]
        if other.any():
            first = looked_at[int(np.argmax(other))]
            return f"document {first} ended in other tokens (as long as now: {now.lengths[first]})"
        return None


@dataclass(frozen=True, eq=False)
class EpochRecord:
    """The progress of an epoch when a checkpoint was written.

    Attributes:
        global_step: optimizer steps of the whole run.
        epoch: its number; the next one where an epoch had just ended.
        steps: its optimizer steps since the last change of settings.
        steps_per_epoch: of a whole epoch under these settings.
        settings: the settings on which the plan of an epoch depends.
        marks: of all documents.
        before: documents that the epoch trained under earlier settings, ``(documents,)`` bool; of
            a mixture ``(places,)``.
        trained: all documents that the epoch has trained, likewise.
    """

    global_step: int
    epoch: int
    steps: int
    steps_per_epoch: int
    settings: Mapping[str, Any]
    marks: DocumentMarks
    before: np.ndarray
    trained: np.ndarray

    def save(self, path: Path) -> None:
        """Write the record to `path`."""
        progress = {name: getattr(self, name) for name in _PROGRESS}
        progress |= {"places": len(self.trained), "settings": dict(self.settings)}
        lengths = self.marks.lengths
        arrays: dict[str, Any] = {
            "progress": np.array(json.dumps(progress)),
            "lengths": lengths.astype(np.min_scalar_type(int(lengths.max(initial=0)))),
            "tails": self.marks.tails,
            "before": np.packbits(self.before),
            "trained": np.packbits(self.trained),
        }
        # Not compressed: that takes 1.5 s for a million lengths.
        np.savez(path, checksum=_checksum(arrays), **arrays)

    @classmethod
    def load(cls, path: Path) -> "EpochRecord":
        """Read the record that `save` has written.

        Raises:
            ValueError: it holds other numbers.
        """
        with np.load(path, allow_pickle=False) as found:
            # Earlier versions wrote no checksum.
            if "checksum" in found and found["checksum"] != _checksum(found):
                raise ValueError(
                    f"{path} is damaged (its checksum is another): documents would be lost or "
                    "trained again. Resume from another checkpoint, or set ignore_data_skip=True "
                    "and delete the file to restart the epoch"
                )
            progress = json.loads(str(found["progress"]))
            lengths = found["lengths"].astype(np.int64)
            places = progress.pop("places", len(lengths))  # earlier versions had no mixtures
            before, trained = (
                np.unpackbits(found[name], count=places).astype(bool)
                for name in ("before", "trained")
            )
            marks = DocumentMarks(lengths, found["tails"])
        return cls(**progress, marks=marks, before=before, trained=trained)

    def changed(self, settings: Mapping[str, Any]) -> str:
        """Return in words which of `settings` differ from the recorded ones; "" if none does."""
        return ", ".join(
            f"{name}={value} instead of {self.settings.get(name)}"
            for name, value in settings.items()
            if self.settings.get(name) != value
        )

    def check(self, settings: Mapping[str, Any], marks: DocumentMarks) -> None:
        """Raise ValueError if the epoch cannot continue with these documents or this seed."""
        then = self.settings
        strategies = {of_run["train_sampling_strategy"] for of_run in (then, settings)}
        if strategies != {"sequential"} and then["seed"] != settings["seed"]:
            raise ValueError(
                f"the checkpoint was saved within an epoch with seed={then['seed']}, and now it is "
                f"seed={settings['seed']}: another seed is another run. Set "
                f"data_seed={then['seed']} to continue that one, or ignore_data_skip=True to "
                "restart the epoch"
            )
        if then.get("mixture") != settings.get("mixture"):
            raise ValueError(
                "the checkpoint was saved within an epoch of another mixture (documents an epoch: "
                f"{_mixture_in_words(then)} then, {_mixture_in_words(settings)} now), so those "
                "left to train are unknown. Resume with the former mixture, or set "
                "ignore_data_skip=True to restart the epoch"
            )
        difference = self.marks.difference(marks, clipped_to=self._clipped_to(settings))
        if difference is None:
            return
        cut = {name: then.get(name) for name in _THAT_CUT if then.get(name) != settings[name]}
        words = ", ".join(f"{name}={value}" for name, value in cut.items())
        raise ValueError(
            f"the checkpoint was saved within an epoch of other documents ({difference}), so those "
            "left to train are unknown. Resume with "
            + (f"{words} as then, by which documents are cut" if cut else "the former data")
            + ", or set ignore_data_skip=True to restart the epoch"
        )

    def _clipped_to(self, settings: Mapping[str, Any]) -> int | None:
        """Return the length up to which documents must agree if both runs truncate, else None."""
        both = (self.settings, settings)
        if all(self.settings[name] == settings[name] for name in ("max_length", "overflow")):
            return None
        if not all(of_run["overflow"] in _TRUNCATING for of_run in both):
            return None
        return min((n["max_length"] for n in both if n["max_length"] is not None), default=None)


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Return a checksum of the arrays of a record, in the order of their names."""
    found = 0
    for name in sorted(set(arrays) - {"checksum"}):
        found = zlib.crc32(arrays[name].tobytes(), found)
    return found


def _mixture_in_words(settings: Mapping[str, Any]) -> str:
    """Return the documents that an epoch draws of each source, by `settings` of its plan."""
    found = settings.get("mixture")
    if not found:
        return "all once"
    return ", ".join(f"{number:,} of {name}" for name, number in found["documents"].items())


_PROGRESS = ("global_step", "epoch", "steps", "steps_per_epoch")
# Settings that cut documents into pieces.
_THAT_CUT = ("max_length", "overflow", "overlap_tokens", "packing_strategy", "packing")


def _evenly_spread(number: int) -> np.ndarray:
    """Return up to 1,024 of `number` documents, first and last among them."""
    return np.unique(np.linspace(0, number - 1, min(number, _NUM_TAILS)).astype(np.int64))
