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
_PROGRESS = ("global_step", "epoch", "steps", "steps_per_epoch", "settings")
# Settings that cut documents into pieces.
_THAT_CUT = ("max_length", "overflow", "overlap_tokens", "packing_strategy", "packing")


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
        for at in np.flatnonzero(self.lengths != now.lengths):
            return f"document {at} had {self.lengths[at]} tokens, now {now.lengths[at]}"
        for at in _evenly_spread(len(now.lengths))[self.tails != now.tails]:
            return f"document {at} ended in other tokens (as long as now: {now.lengths[at]})"
        return None


def _evenly_spread(number: int) -> np.ndarray:
    """Return up to 1,024 of `number` documents, first and last among them."""
    return np.unique(np.linspace(0, number - 1, min(number, _NUM_TAILS)).astype(np.int64))


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
        lengths = self.marks.lengths
        arrays: dict[str, Any] = {
            "progress": np.array(json.dumps(progress | {"places": len(self.trained)})),
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
            if "checksum" not in found or found["checksum"] != _checksum(found):
                raise ValueError(
                    f"{path} is damaged (its checksum is another): documents would be lost or "
                    "trained again. Resume from another checkpoint, or set ignore_data_skip=True "
                    "and delete the file to restart the epoch"
                )
            progress = json.loads(str(found["progress"]))
            trained = np.unpackbits(found["trained"], count=progress.pop("places")).astype(bool)
            marks = DocumentMarks(found["lengths"].astype(np.int64), found["tails"])
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
        if then["mixture"] != settings["mixture"]:
            raise ValueError(
                "the checkpoint was saved within an epoch of another mixture (documents an epoch: "
                f"{_drawn(then)} then, {_drawn(settings)} now), so those left to train are "
                "unknown. Resume with the former mixture, or set ignore_data_skip=True to restart "
                "the epoch"
            )
        if difference := self.marks.difference(marks):
            cut = [f"{name}={then[name]}" for name in _THAT_CUT if then[name] != settings[name]]
            former = "the former data"
            if cut:
                former = ", ".join(cut) + " as then, by which documents are cut"
            raise ValueError(
                f"the checkpoint was saved within an epoch of other documents ({difference}), so "
                f"those left to train are unknown. Resume with {former}, or set "
                "ignore_data_skip=True to restart the epoch"
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
        unnamed = "a mixture of another number of epochs, or another version, planned them"
        raise ValueError(
            f"the checkpoint was saved within an epoch, after {self.steps:,} of its steps, and "
            f"these would hold other documents now ({self.changed(settings) or unnamed}). Resume "
            "with the former settings (per_device_train_batch_size × gradient_accumulation_steps × "
            f"ranks may divide its {product} otherwise), or set ignore_data_skip=True to restart "
            "the epoch with the new ones"
        )


def _checksum(arrays: Mapping[str, np.ndarray]) -> int:
    """Return a checksum of the arrays of a record, in the order of their names."""
    found = 0
    for name in sorted(set(arrays) - {"checksum"}):
        found = zlib.crc32(arrays[name].tobytes(), found)
    return found


def _drawn(settings: Mapping[str, Any]) -> str:
    """Return the documents that an epoch draws of each source, by `settings` of its plan."""
    found = settings["mixture"]
    if not found:
        return "all once"
    return ", ".join(f"{number:,} of {name}" for name, number in found["documents"].items())
