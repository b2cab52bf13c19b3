"""How far an epoch has come, and what must be equal for another run to go on with it."""

import json
import zlib
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from trl_packing.documents.arrow import ArrowDocuments

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
