"""A checkpoint's record of its epoch: the trained documents, and marks that identify all documents.

    epoch.npz    progress          the epoch, its optimizer steps so far, the settings of its plan
                 lengths, tails    tokens of every document; checksums of the last tokens of some
                 trained           documents that the epoch has trained; a bit each

An epoch of a mixture draws some documents more than once, others not. Its bits are then those of
its places (packing/draw.py).
"""

import json
import math
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

    def difference(self, now: "DocumentMarks") -> str | None:
        """Return in words how the documents of `now` differ; None if they are the same."""
        if len(self.lengths) != len(now.lengths):
            return f"{len(self.lengths)} documents then, {len(now.lengths)} now"
        other = np.flatnonzero(self.lengths != now.lengths)
        if len(other):
            first = other[0]
            return f"document {first} had {self.lengths[first]} tokens, now {now.lengths[first]}"
        other = np.flatnonzero(self.tails != now.tails)
        if len(other):
            first = _evenly_spread(len(now.lengths))[other[0]]
            return f"document {first} ended in other tokens (as long as now: {now.lengths[first]})"
        return None


@dataclass(frozen=True, eq=False)
class EpochRecord:
    """The progress of an epoch when a checkpoint was written.

    Attributes:
        global_step: optimizer steps of the whole run.
        epoch: its number; the next one where an epoch had just ended.
        steps: its optimizer steps.
        steps_per_epoch: of a whole epoch under these settings.
        settings: the settings on which the plan of an epoch depends.
        marks: of all documents.
        trained: documents that the epoch has trained, ``(documents,)`` bool; of a mixture
            ``(places,)``.
    """

    global_step: int
    epoch: int
    steps: int
    steps_per_epoch: int
    settings: Mapping[str, Any]
    marks: DocumentMarks
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
            trained = np.unpackbits(found["trained"], count=places).astype(bool)
            marks = DocumentMarks(lengths, found["tails"])
        return cls(**progress, marks=marks, trained=trained)

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
        difference = self.marks.difference(marks)
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

    def check_steps(self, holds: bool, settings: Mapping[str, Any]) -> None:
        """Raise ValueError unless the first steps of the epoch hold the trained documents.

        Args:
            holds: whether they do.
            settings: of now.
        """
        if holds:
            return
        names = ("per_device_train_batch_size", "gradient_accumulation_steps", "ranks")
        product = math.prod(self.settings[name] for name in names)
        raise ValueError(
            f"the checkpoint was saved within an epoch, after {self.steps:,} of its steps, and "
            "these would hold other documents now "
            f"({self.changed(settings) or _UNNAMED}). Resume with the "
            f"former settings (per_device_train_batch_size × gradient_accumulation_steps × ranks "
            f"may divide its {product} otherwise), or set ignore_data_skip=True to restart the "
            "epoch with the new ones"
        )


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


_UNNAMED = "a mixture of another number of epochs, or another version, planned them"
_PROGRESS = ("global_step", "epoch", "steps", "steps_per_epoch")
# Settings that cut documents into pieces.
_THAT_CUT = ("max_length", "overflow", "overlap_tokens", "packing_strategy", "packing")


def _evenly_spread(number: int) -> np.ndarray:
    """Return up to 1,024 of `number` documents, first and last among them."""
    return np.unique(np.linspace(0, number - 1, min(number, _NUM_TAILS)).astype(np.int64))
