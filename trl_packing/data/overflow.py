"""Policies for documents longer than the capacity, as arithmetic on lengths.

    lengths    3  6  4        capacity 4        policy "split"
    rows       0  1  1  2
    starts     0  0  4  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [4, 6)

                              policy "overlap" by 2 tokens
    starts     0  0  2  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [2, 6)
    contexts   0  0  2  0     whose first 2 tokens are context, trained in [0, 4) alone

A policy computes the pieces of all documents at once. `fitting.py` cuts them, and `counting.py`
counts losses from the pieces. A piece is a document from then on.
"""

from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import FlatLists
from trl_packing.documents.labels import IGNORE_INDEX
from trl_packing.packing.bins import find_strategy


@dataclass(frozen=True)
class Overflow:
    """Policy for documents that are longer than `capacity` tokens.

    Attributes:
        policy: one of `config.OVERFLOWS`, ``"truncate_start"`` (TRL's truncation_mode="keep_end")
            or ``"wrapped"`` (documents laid end to end and cut at every multiple of `capacity`).
        capacity: most tokens of a document; None without a limit.
        running_text: pieces of a document may make sense alone, unlike those of an answer.
        drops_as_padded: drop the documents that TRL's padded run drops: those without any label, if
            there is a capacity. A label on the first token trains nothing, but such a document
            takes a place in a step.
        overlap_tokens: the setting; None for an eighth of `capacity`.
    """

    policy: str
    capacity: int | None
    running_text: bool = True
    drops_as_padded: bool = False
    overlap_tokens: int | None = None

    @classmethod
    def from_args(cls, args: SFTConfig, packing: bool) -> "Overflow":
        """Return the policy set by `args`, through TRL's settings or ours.

        Raises:
            ValueError: for a truncation_mode that does not exist.
        """
        if args.truncation_mode not in ("keep_start", "keep_end"):
            raise ValueError(
                f"Unsupported truncation mode: {args.truncation_mode}, expected 'keep_start' or "
                "'keep_end'"
            )
        implied = find_strategy(args.packing_strategy).overflow if packing else None
        options = PackingOptions.of(args)
        policy = options.overflow or implied or "truncate"
        if implied == "wrapped":
            policy = implied
        if policy == "truncate" and args.truncation_mode == "keep_end":
            policy = "truncate_start"
        # With another policy the documents differ from TRL's anyway.
        as_padded = not packing and policy in ("truncate", "truncate_start")
        return cls(
            policy,
            args.max_length,
            drops_as_padded=as_padded,
            overlap_tokens=options.overlap_tokens,
        )

    @property
    def makes_pieces(self) -> bool:
        """Whether more than one piece of a document may survive."""
        return self.policy in ("split", "overlap", "wrapped")

    @property
    def overlap(self) -> int | None:
        """Return the tokens that a piece repeats of the one before it; None if none does."""
        if self.policy != "overlap" or self.capacity is None:
            return None
        return min(self.overlap_tokens or max(self.capacity // 8, 1), self.capacity // 2)


class Pieces(NamedTuple):
    """Piece i is tokens ``[starts[i], stops[i])`` of document ``rows[i]``; ``(pieces,)`` int64.

    Its first ``contexts[i]`` tokens are not trained; None if all pieces have 0 of them.
    """

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    contexts: np.ndarray | None = None

    @property
    def trained_from(self) -> np.ndarray:
        """Return the first tokens that may be trained, ``(pieces,)`` int64."""
        return self.starts if self.contexts is None else self.starts + self.contexts


def prompt_lengths(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return how many tokens of each document come before its first trained one."""
    trained = np.append(np.flatnonzero(labels != IGNORE_INDEX), len(labels))
    first = trained[np.searchsorted(trained, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]


def pieces_of(
    lengths: np.ndarray,
    overflow: Overflow,
    prompts: np.ndarray,
    begins: np.ndarray | None = None,
) -> Pieces:
    """Return the pieces that the policy keeps, in the order of the documents.

    Args:
        lengths: tokens of each document, ``(documents,)`` int64.
        overflow: the policy.
        prompts: tokens before the first trained one, ``(documents,)`` int64.
        begins: with ``"wrapped"``, tokens of the row before each document, ``(documents,)`` int64;
            None if these are all documents.

    Raises:
        ValueError: if a document is too long under ``"error"``.

    Example:
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
    if overflow.overlap is not None:
        return _overlapping(lengths, capacity, overflow.overlap)
    if overflow.policy == "split":
        return _cut_at_multiples(lengths, capacity, zeros)
    assert overflow.policy == "wrapped"
    return _cut_at_multiples(
        lengths, capacity, np.cumsum(lengths) - lengths if begins is None else begins
    )


def _cut_at_multiples(lengths: np.ndarray, capacity: int, begins: np.ndarray) -> Pieces:
    """Return pieces that end at every multiple of `capacity` in a row of documents.

    Args:
        lengths: tokens of each document, ``(documents,)`` int64.
        capacity: most tokens of a piece.
        begins: tokens of the row before each document; 0 if each has a row of its own.
    """
    rows = np.arange(len(lengths))
    first_cut, last_cut = begins // capacity, (begins + np.maximum(lengths, 1) - 1) // capacity
    per_row = last_cut - first_cut + 1
    piece_rows = np.repeat(rows, per_row)
    nth = np.arange(len(piece_rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    boundary = (first_cut[piece_rows] + nth) * capacity - begins[piece_rows]
    starts = np.maximum(boundary, 0)
    return Pieces(piece_rows, starts, np.minimum(boundary + capacity, lengths[piece_rows]))


def _overlapping(lengths: np.ndarray, capacity: int, overlap: int) -> Pieces:
    """Return pieces of up to `capacity` tokens that begin with the last `overlap` before them."""
    stride = capacity - overlap
    per_row = 1 + np.maximum(-(-(lengths - capacity) // stride), 0)
    rows = np.repeat(np.arange(len(lengths)), per_row)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    starts = nth * stride
    stops = np.minimum(starts + capacity, lengths[rows])
    return Pieces(rows, starts, stops, np.where(nth > 0, overlap, 0))


def gather(lists: FlatLists, pieces: Pieces) -> FlatLists:
    """Return values and offsets of the pieces, given those of the documents."""
    values, offsets = lists
    sizes = pieces.stops - pieces.starts
    ends = np.concatenate([[0], np.cumsum(sizes)])
    first = offsets[pieces.rows] + pieces.starts
    return values[np.arange(ends[-1]) + np.repeat(first - ends[:-1], sizes)], ends


def mask_contexts(labels: np.ndarray, offsets: np.ndarray, contexts: np.ndarray) -> None:
    """Set the first labels of each piece, its context, to `IGNORE_INDEX`, in place."""
    begins, ends = np.repeat(offsets[:-1], contexts), np.cumsum(contexts)
    labels[begins + np.arange(len(begins)) - np.repeat(ends - contexts, contexts)] = IGNORE_INDEX


def too_long_error(which: str, length: int, capacity: int | None) -> ValueError:
    """Return the error for a document that the policy refuses."""
    return ValueError(
        f"{which} has {length} tokens but max_length is {capacity}; raise max_length or set "
        "overflow='truncate' or 'drop'"
    )
