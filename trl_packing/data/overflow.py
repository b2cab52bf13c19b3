"""Documents of any length → documents that fit.

    documents           input_ids, labels, any length
        │  pieces_of    the tokens [start, stop) of each document that the policy keeps
        │  is_kept      drops pieces without a trained token
        ▼
    documents           each ≤ capacity, each with something to train

A policy computes pieces from lengths alone, for all documents at once. `gather` cuts a whole batch,
and losses are counted from the pieces (counting.py). A piece is a document from then on.

    lengths    3  6  4        capacity 4        policy "split"
    rows       0  1  1  2
    starts     0  0  4  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [4, 6)

                              policy "overlap" by 2 tokens
    starts     0  0  2  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [2, 6)
    contexts   0  0  2  0     whose first 2 tokens are context, trained in [0, 4) alone
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.whole_images import ImageSpans, split_around
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_IDS
from trl_packing.documents.list_columns import (
    FlatLists,
    count_after_first,
    list_column,
    token_lists,
)
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


def is_kept(labels: FlatLists, overflow: Overflow) -> np.ndarray:
    """Return which documents have something to train and are kept, ``(documents,)`` bool."""
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
    # split cuts each document at multiples of capacity, wrapped the documents laid end to end.
    first = zeros
    if overflow.policy == "wrapped":
        first = np.cumsum(lengths) - lengths if begins is None else begins
    first_cut, last_cut = first // capacity, (first + np.maximum(lengths, 1) - 1) // capacity
    per_row = last_cut - first_cut + 1
    piece_rows = np.repeat(rows, per_row)
    nth = np.arange(len(piece_rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    boundary = (first_cut[piece_rows] + nth) * capacity - first[piece_rows]
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


def keep_images_whole(pieces: Pieces, image_ids: FlatLists, overflow: Overflow) -> Pieces:
    """Return `pieces` that cut no image.

    Args:
        pieces: as `pieces_of` returns them.
        image_ids: image of each token of the documents, 0 on text.
        overflow: the policy.
    """
    images, capacity = ImageSpans(image_ids), overflow.capacity
    if capacity is None or not len(images.first):
        return pieces
    if overflow.policy == "overlap":
        running = np.concatenate([[0], np.cumsum(image_ids[0] > 0)])
        begins, ends = image_ids[1][:-1], image_ids[1][1:]
        if ((ends - begins > capacity) & (running[ends] > running[begins])).any():
            raise ValueError(
                "overflow='overlap' cannot cut a document with images: an overlap might begin in "
                "one; set overflow='split', or raise max_length"
            )
        return pieces
    if overflow.policy != "split":
        _, starts = images.around(pieces.rows, pieces.starts)
        stops, _ = images.around(pieces.rows, pieces.stops)
        return Pieces(pieces.rows, starts, np.maximum(starts, stops))
    lengths = np.diff(image_ids[1])
    through = np.zeros(len(lengths), bool)
    for cuts in (pieces.starts, pieces.stops):
        through[pieces.rows[images.around(pieces.rows, cuts)[0] != cuts]] = True
    whole = ~through[pieces.rows]
    again = [
        (row, start, stop)
        for row in np.flatnonzero(through).tolist()
        for start, stop in split_around(int(lengths[row]), capacity, images.of(row))
    ]
    rows, starts, stops = (
        np.concatenate([kept[whole], np.array(new, np.int64)])
        for kept, new in zip(
            pieces[:3], zip(*again, strict=True) if again else ((),) * 3, strict=True
        )
    )
    order = np.lexsort([starts, rows])
    return Pieces(rows[order], starts[order], stops[order])


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


def fit_documents(
    documents: ArrowDocuments,
    overflow: Overflow,
    *,
    num_proc: int | None = None,
    name: str = "train",
) -> ArrowDocuments:
    """Return documents within capacity, each with something to train.

    Args:
        documents: `input_ids` and `labels`. Other columns of the data set are kept (and repeated
            for pieces), and its `loss_weights` are cut with the tokens.
        overflow: policy for documents that are too long.
        num_proc: processes that cut.
        name: of the data set, for messages.

    Raises:
        ValueError: if a document is too long under ``"error"``, or if nothing is left.
    """
    dataset, lengths = documents.dataset, documents.lengths()
    too_long = np.zeros(len(lengths), bool)
    if overflow.capacity is not None:
        too_long = lengths > overflow.capacity
    if overflow.policy == "error" and too_long.any():
        row = int(np.argmax(too_long))
        raise too_long_error(
            f"document {row} of the {name} dataset", lengths[row], overflow.capacity
        )
    if overflow.policy == "wrapped" or (overflow.policy != "drop" and too_long.any()):
        # `map` caches by the function and its arguments, so a second run reads the result.
        cut = dataset.with_format("arrow").map(
            fit_table,
            **_arguments_of_fit(lengths, overflow),
            batched=True,
            num_proc=num_proc,
            desc=f"Fitting {name} dataset to max_length",
        )
        fitted = documents.with_dataset(cut.with_format(None))
    else:
        keeps = [is_kept(chunk, overflow) for chunk in documents.readers["labels"].chunks]
        kept = np.flatnonzero(documents.in_order(keeps) & ~too_long)
        fitted = documents
        if len(kept) < len(dataset):
            fitted = documents.with_dataset(dataset.select(kept))
    if not len(fitted) or not fitted.num_trained().any():
        raise ValueError(
            f"no document of the {name} dataset has a trained token left "
            f"({len(lengths)} read, {int(too_long.sum())} longer than max_length="
            f"{overflow.capacity}, overflow={overflow.policy!r}); raise max_length, or check the "
            "completion or assistant masks"
        )
    return fitted


def _arguments_of_fit(lengths: np.ndarray, overflow: Overflow) -> dict[str, Any]:
    """Return arguments of `map` that make it call `fit_table`."""
    if overflow.policy != "wrapped" or overflow.capacity is None:
        return {"fn_kwargs": {"overflow": overflow}}
    begins = (np.cumsum(lengths) - lengths) % overflow.capacity
    return {"with_indices": True, "fn_kwargs": {"overflow": overflow, "begins": begins}}


def fit_table(
    table: pa.Table,
    indices: Sequence[int] | None = None,
    *,
    overflow: Overflow,
    begins: np.ndarray | None = None,
) -> pa.Table:
    """Apply `overflow` to a table of documents and drop pieces without a trained token.

    Args:
        table: documents.
        indices: of these documents among all.
        overflow: the policy.
        begins: with ``"wrapped"``, tokens of the row before each document of all, ``(all,)`` int64.
    """
    tokens = token_lists(table)
    lengths = np.diff(tokens["input_ids"][1])
    before = None if begins is None else begins[indices]
    pieces = pieces_of(lengths, overflow, prompt_lengths(*tokens["labels"]), before)
    if IMAGE_IDS in tokens:
        pieces = keep_images_whole(pieces, tokens[IMAGE_IDS], overflow)
    cut = {name: gather(lists, pieces) for name, lists in tokens.items()}
    if pieces.contexts is not None:
        mask_contexts(*cut["labels"], pieces.contexts)
    kept = pa.array(np.flatnonzero(is_kept(cut["labels"], overflow)))
    columns = [
        list_column(*cut[field.name], field).take(kept)
        if field.name in cut
        else table.column(field.name).take(pa.array(pieces.rows)).take(kept)
        for field in table.schema
    ]
    return pa.table(columns, names=table.column_names)
