"""An overflow policy as arithmetic: which tokens of which document survive, as pieces.

    lengths    3  6  4        capacity 4        policy "split"
    rows       0  1  1  2
    starts     0  0  4  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [4, 6)

Everything is decided from lengths, for all documents at once.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np

from trl_packing.arrow_documents import count_after_first
from trl_packing.labels import IGNORE_INDEX
from trl_packing.token_columns import FlatLists


@dataclass(frozen=True)
class Overflow:
    """What happens to documents longer than `capacity` tokens (None: nothing is too long).

    `policy` is one of `config.OVERFLOWS`, ``"truncate_start"`` (TRL's truncation_mode="keep_end")
    or ``"wrapped"`` (documents laid end to end and cut at every multiple of `capacity`).
    `drops_as_padded` leaves out what TRL's padded run does: documents without any label, if there
    is a capacity. A label on the first token alone trains nothing, but takes a place in a step.
    """

    policy: str
    capacity: int | None
    drops_as_padded: bool = False

    @property
    def makes_pieces(self) -> bool:
        """Whether more than one piece of a document may survive."""
        return self.policy in ("split", "wrapped")


class Pieces(NamedTuple):
    """Piece i is tokens ``[starts[i], stops[i])`` of document ``rows[i]``; ``(pieces,)`` int64."""

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray


def is_kept(labels: FlatLists, overflow: Overflow) -> np.ndarray:
    """Return which documents are not dropped for having nothing to train, ``(documents,)`` bool."""
    values, offsets = labels
    if not overflow.drops_as_padded:
        return count_after_first(values, offsets, IGNORE_INDEX) > 0
    if overflow.capacity is None:
        return np.diff(offsets) > 0
    running = np.concatenate([[0], np.cumsum(values != IGNORE_INDEX)])
    return running[offsets[1:]] > running[offsets[:-1]]


def prompt_lengths(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return how many tokens of each document come before its first trained one."""
    trained = np.append(np.flatnonzero(labels != IGNORE_INDEX), len(labels))
    first = trained[np.searchsorted(trained, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]


def pieces_of(lengths: np.ndarray, overflow: Overflow, prompts: np.ndarray) -> Pieces:
    """Return the pieces that survive, in the order of the documents.

    `lengths` and `prompts` are ``(documents,)`` int64: tokens, and those before the first trained
    one. Raises ValueError if a document is too long under ``"error"``.

    >>> pieces_of(np.array([3, 6]), Overflow("split", 4), np.zeros(2, int)).stops.tolist()
    [3, 4, 6]
    """
    rows, capacity = np.arange(len(lengths)), overflow.capacity
    zeros = np.zeros_like(lengths)
    if capacity is None:
        return Pieces(rows, zeros, lengths)
    if overflow.policy == "drop":
        kept = rows[lengths <= capacity]
        return Pieces(kept, zeros[kept], lengths[kept])
    if overflow.policy == "error":
        if lengths.max(initial=0) > capacity:
            raise too_long_error("a document of the stream", lengths.max(), capacity)
        return Pieces(rows, zeros, lengths)
    if overflow.policy == "truncate":
        return Pieces(rows, zeros, np.minimum(lengths, capacity))
    if overflow.policy == "truncate_start":
        return Pieces(rows, np.maximum(lengths - capacity, 0), lengths)
    if overflow.policy == "truncate_prompt":
        # The last token of the prompt stays: a document's first token is never a target.
        excess = np.maximum(lengths - capacity, 0)
        starts = np.minimum(excess, np.maximum(prompts - 1, 0))
        return Pieces(rows, starts, np.minimum(starts + capacity, lengths))
    # split cuts each document at multiples of capacity, wrapped the documents laid end to end.
    first = (
        np.concatenate([[0], np.cumsum(lengths)[:-1]]) if overflow.policy == "wrapped" else zeros
    )
    first_cut, last_cut = first // capacity, (first + np.maximum(lengths, 1) - 1) // capacity
    per_row = last_cut - first_cut + 1
    piece_rows = np.repeat(rows, per_row)
    nth = np.arange(len(piece_rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    boundary = (first_cut[piece_rows] + nth) * capacity - first[piece_rows]
    starts = np.maximum(boundary, 0)
    return Pieces(piece_rows, starts, np.minimum(boundary + capacity, lengths[piece_rows]))


def gather(lists: FlatLists, pieces: Pieces) -> FlatLists:
    """Return values and offsets of the pieces, given those of the documents."""
    values, offsets = lists
    sizes = pieces.stops - pieces.starts
    ends = np.concatenate([[0], np.cumsum(sizes)])
    first = offsets[pieces.rows] + pieces.starts
    return values[np.arange(ends[-1]) + np.repeat(first - ends[:-1], sizes)], ends


def too_long_error(which: str, length: int, capacity: int | None) -> ValueError:
    """Return the error for a document that the policy refuses."""
    return ValueError(
        f"{which} has {length} tokens but max_length is {capacity}; raise max_length or set "
        "overflow='truncate', 'split' or 'drop'"
    )
