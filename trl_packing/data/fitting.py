"""Documents of any length → documents that fit, with every loss counted.

    lengths    3  6  4        capacity 4        policy "split"        "overlap", by 2 tokens
    rows       0  1  1  2                                             0  1  1  2
    starts     0  0  4  0                                             0  0  2  0
    stops      3  4  6  4     document 1 becomes [0, 4) and [4, 6)    3  4  6  4
    contexts   0  0  0  0                                             0  0  2  0    not trained

The pieces of all documents are counted at once, those without a trained token go, and the table is
cut along them. A piece is a document from then on. Streams pass the same functions.
"""

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import pyarrow as pa
from datasets import Dataset
from trl import SFTConfig

from trl_packing.config import PackingOptions
from trl_packing.data.counts import PreparationCounts, Stage, TokenCounts, quantity
from trl_packing.documents.arrow import ArrowDocuments, flat_lists, list_column
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_IDS, row_name, token_columns
from trl_packing.packing.bins import find_strategy

_WHY = {
    "truncate": "longer than max_length={}: cut at the end",
    "truncate_start": "longer than max_length={}: cut at the start",
    "truncate_prompt": "longer than max_length={}: prompt cut at the start",
    "drop": "longer than max_length={}: dropped",
    "split": "longer than max_length={}: split into pieces",
    "overlap": "longer than max_length={}: split into pieces that overlap",
    "wrapped": "cut where rows of max_length={} end",
}
_IN_PIECES = ("split", "overlap", "wrapped")  # more than one piece of a document may survive


@dataclass(frozen=True)
class Overflow:
    """Policy for documents that are longer than `capacity` tokens.

    One of `config.OVERFLOWS`, ``"truncate_start"`` (TRL's truncation_mode="keep_end") or
    ``"wrapped"`` (documents laid end to end and cut at every multiple of `capacity`). With
    `drops_as_padded`, a label on the first token alone keeps a document, as in TRL's padded run.
    """

    policy: str
    capacity: int | None
    drops_as_padded: bool = False

    @classmethod
    def from_args(cls, args: SFTConfig, packing: bool) -> "Overflow":
        """Return the policy set by `args`, through TRL's settings or ours."""
        if args.truncation_mode not in ("keep_start", "keep_end"):
            mode = args.truncation_mode
            raise ValueError(f"truncation_mode={mode!r} must be 'keep_start' or 'keep_end'")
        implied = find_strategy(args.packing_strategy).overflow if packing else None
        given = None if implied == "wrapped" else PackingOptions.of(args).overflow
        policy = given or implied or "truncate"
        if policy == "truncate" and args.truncation_mode == "keep_end":
            policy = "truncate_start"
        # With another policy the documents differ from TRL's anyway.
        as_padded = not packing and policy in ("truncate", "truncate_start")
        return cls(policy, args.max_length, as_padded)


class Pieces(NamedTuple):
    """Piece i is tokens ``[starts[i], stops[i])`` of document ``rows[i]``; ``(pieces,)`` int64.

    Its first ``contexts[i]`` tokens are not trained. Pieces are in the order of the documents.
    """

    rows: np.ndarray
    starts: np.ndarray
    stops: np.ndarray
    contexts: np.ndarray

    @classmethod
    def of(cls, stops: np.ndarray, starts: np.ndarray | None = None) -> "Pieces":
        """Return one piece of each document, from its first token on unless `starts` are given."""
        none = np.zeros(len(stops), np.int64)  # takes no memory until it is written
        return cls(np.arange(len(stops)), none if starts is None else starts, stops, none)

    @property
    def sizes(self) -> np.ndarray:
        return self.stops - self.starts

    def where(self, chosen: np.ndarray | slice) -> "Pieces":
        """Return the pieces that are `chosen`, ``(pieces,)`` bool or a slice."""
        return Pieces(*(values[chosen] for values in self))


def pieces_of(documents: ArrowDocuments, overflow: Overflow) -> Pieces:
    """Return the pieces that the policy keeps; a document with images is kept whole, or dropped."""
    lengths = documents.lengths()
    capacity = overflow.capacity
    policy = overflow.policy
    if capacity is None or policy == "error":
        return Pieces.of(lengths)
    if policy != "wrapped" and lengths.max(initial=0) <= capacity:
        return Pieces.of(lengths)
    starts = np.zeros_like(lengths)
    drops = np.full(len(lengths), policy == "drop")
    if IMAGE_IDS in documents.columns:
        drops[documents.rows_where(IMAGE_IDS, lambda ids: ids > 0)] = True
    drops &= lengths > capacity
    if policy in _IN_PIECES:
        used = (np.cumsum(lengths) - lengths) % capacity if policy == "wrapped" else starts
        eighth = min(max(capacity // 8, 1), capacity // 2)
        overlap = eighth if policy == "overlap" else 0
        pieces = _cut_at_strides(lengths, capacity, overlap, used)
    else:
        if policy in ("truncate_start", "truncate_prompt"):
            starts = np.maximum(lengths - capacity, 0)
        if policy == "truncate_prompt":
            # The last token of the prompt stays: a document's first token is never a target.
            prompts = documents.by_document("labels", _prompts)
            starts = np.minimum(starts, np.maximum(prompts - 1, 0))
        pieces = Pieces.of(np.minimum(starts + capacity, lengths), starts)
    return pieces.where(~drops[pieces.rows])


def _prompts(labels: np.ndarray, offsets: np.ndarray) -> np.ndarray:
    """Return how many tokens of each document come before its first trained one."""
    trained = np.append(np.flatnonzero(labels != IGNORE_INDEX), len(labels))
    first = trained[np.searchsorted(trained, offsets[:-1])]
    return np.minimum(first, offsets[1:]) - offsets[:-1]


def _cut_at_strides(lengths: np.ndarray, capacity: int, overlap: int, used: np.ndarray) -> Pieces:
    """Return pieces of up to `capacity` tokens that begin with the last `overlap` before them.

    `used` are the tokens of the row before each document; 0 if each has a row of its own.
    """
    stride = capacity - overlap
    per_row = 1 + np.maximum(-(-(used + lengths - capacity) // stride), 0)
    rows = np.repeat(np.arange(len(lengths)), per_row)
    nth = np.arange(len(rows)) - np.repeat(np.cumsum(per_row) - per_row, per_row)
    starts = nth * stride - used[rows]
    stops = np.minimum(starts + capacity, lengths[rows])
    return Pieces(rows, np.maximum(starts, 0), stops, np.where(nth > 0, overlap, 0))


def fit_and_count(
    dataset: Dataset,
    overflow: Overflow,
    *,
    stop_ids: Iterable[int] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[Dataset, PreparationCounts]:
    """Return documents within capacity, each with something to train, and the losses.

    Raises ValueError if nothing is left, or if a document is too long under ``"error"``.
    """
    documents = ArrowDocuments(dataset, token_columns(dataset.column_names))
    named = partial(row_name, name=name, unit="document")
    pieces, counts = fit(documents, overflow, stop_ids, named=named)
    lengths = documents.lengths()
    if not counts.after.trained:
        raise ValueError(
            f"no document of the {name} dataset has a trained token left ({len(lengths)} read, the "
            f"longest has {lengths.max(initial=0)}, max_length={overflow.capacity}, "
            f"{overflow.policy!r}); raise max_length, or check the completion or assistant masks"
        )
    if not np.array_equal(pieces.sizes, lengths[pieces.rows]):
        # `map` caches by the function and its arguments, so a second run reads the result.
        dataset = dataset.with_format("arrow").map(
            cut_table,
            with_indices=True,
            fn_kwargs={"pieces": pieces, "by_token": documents.columns},
            batched=True,
            num_proc=num_proc,
            desc=f"Fitting {name} dataset to max_length",
        )
        dataset = dataset.with_format(None)
    elif len(pieces.rows) < len(lengths):  # no table is written
        dataset = dataset.select(pieces.rows)
    return dataset, counts


def cut_table(
    table: pa.Table, numbers: Sequence[int], pieces: Pieces, by_token: Sequence[str]
) -> pa.Table:
    """Return those of `pieces` of documents `numbers`, in `table`, with their other columns."""
    first, last = np.searchsorted(pieces.rows, [numbers[0], numbers[-1] + 1])
    pieces = pieces.where(slice(first, last))
    pieces = pieces._replace(rows=pieces.rows - numbers[0])
    columns = []
    sizes = pieces.sizes
    ends = np.concatenate([[0], np.cumsum(sizes)])
    place = np.arange(ends[-1]) - np.repeat(ends[:-1], sizes)  # of each token in its piece
    for field in table.schema:
        column = table.column(field.name)
        if field.name not in by_token:
            columns.append(column.take(pa.array(pieces.rows)))
            continue
        values, offsets = flat_lists(field.name, column)
        values = values[place + np.repeat(offsets[pieces.rows] + pieces.starts, sizes)]
        if field.name == "labels" and pieces.contexts.any():
            values[place < np.repeat(pieces.contexts, sizes)] = IGNORE_INDEX
        columns.append(list_column(values, ends, field))
    return pa.table(columns, names=table.column_names)


class Counted(NamedTuple):
    """Tokens, int64, and trained tokens and stop tokens, int32, of each piece, ``(pieces,)``."""

    tokens: np.ndarray
    trained: np.ndarray
    stops: np.ndarray
    labelled: np.ndarray  # trained tokens and a labelled first token, which is never a target

    def sums(self, chosen: np.ndarray | slice = slice(None)) -> TokenCounts:
        """Return the sums over the `chosen` pieces."""
        tokens, trained, stops = (values[chosen] for values in self[:3])
        return TokenCounts(len(tokens), int(tokens.sum()), int(trained.sum()), int(stops.sum()))


def fit(
    documents: ArrowDocuments,
    overflow: Overflow,
    stop_ids: Iterable[int] = (),
    before: Counted | None = None,
    *,
    named: Callable[[int], str] = str,
) -> tuple[Pieces, PreparationCounts]:
    """Return the pieces that are trained, and what came in, what came out, and the losses between.

    `before` is what `count_whole` has returned, if several policies are compared; `named` returns
    the name of a document by its number, for messages.
    """
    lengths = documents.lengths()
    capacity = overflow.capacity
    if overflow.policy == "error" and capacity is not None and lengths.max(initial=0) > capacity:
        wrong = int(np.argmax(lengths > capacity))
        raise ValueError(
            f"{named(wrong)} has {lengths[wrong]} tokens but max_length is {capacity}; raise "
            "max_length"
        )
    before = cut = before or count_whole(documents, stop_ids)
    pieces = pieces_of(documents, overflow)
    if not np.array_equal(pieces.sizes, lengths):
        cut = _count(documents, pieces, stop_ids)
    kept = cut.trained > 0
    if overflow.drops_as_padded:
        kept = cut.tokens > 0 if capacity is None else cut.labelled > 0

    stages = []
    if cut is not before:
        why = _WHY.get(overflow.policy, "").format(capacity)
        dropped = len(lengths) - len(np.unique(pieces.rows))
        if dropped and overflow.policy != "drop":
            why += f" ({quantity(dropped, 'document')} with images dropped)"
        stops_left = np.bincount(pieces.rows, cut.stops, minlength=len(lengths))
        stages.append(
            Stage(
                len(lengths) - int((cut.tokens == lengths[pieces.rows]).sum()),
                why,
                before.sums() - cut.sums(),
                lost_eos=int((stops_left < before.stops).sum()),
                repeated=int(pieces.contexts[kept].sum()),
            )
        )
    never = ~kept & (before.trained[pieces.rows] == 0)
    since_cut = ~kept & ~never
    untrained = np.unique(pieces.rows[never])
    for affected, why, chosen in (
        (len(untrained), "without a trained token: dropped", never),
        (int(since_cut.sum()), "with no trained token left: dropped", since_cut),
    ):
        stages.append(Stage(affected, why, cut.sums(chosen), is_untrained=True))
    found = tuple(stage for stage in stages if stage.affected)
    left = slice(None) if kept.all() else kept  # a mask copies
    return pieces.where(left), PreparationCounts(before.sums(), cut.sums(left), found)


def count_whole(documents: ArrowDocuments, stop_ids: Iterable[int] = ()) -> Counted:
    """Count the tokens of every document."""
    return _count(documents, Pieces.of(documents.lengths()), stop_ids)


def _count(documents: ArrowDocuments, pieces: Pieces, stop_ids: Iterable[int]) -> Counted:
    """Count the tokens of every piece, one chunk of the Arrow table at a time."""
    stops = np.array(sorted(stop_ids), np.int64)
    labels = documents.readers["labels"]
    stored, order = pieces.rows, None
    if documents.mapping is not None:
        stored = documents.mapping[stored]
        order = np.argsort(stored, kind="stable")
    bounds = np.searchsorted(stored, labels.first_row, sorter=order)
    counted = np.zeros((3, len(stored)), np.int32)
    chunks = zip(labels.chunks, labels.first_row, pairwise(bounds), strict=False)
    for (values, offsets), first, places_of_chunk in chunks:
        chosen: Any = slice(*places_of_chunk)
        if order is not None:
            chosen = order[chosen]
        starts, ends, contexts = (part[chosen] for part in pieces[1:])
        zero = offsets[stored[chosen] - first]
        stop = zero + ends
        start = np.minimum(zero + starts + contexts, stop)
        # The first token of a piece is never a target; behind a context, it is.
        begin = np.minimum(np.maximum(start, zero + starts + 1), stop)
        # A search costs less than a running sum over all tokens.
        trained = np.flatnonzero(values != IGNORE_INDEX)
        stopping = np.flatnonzero(np.isin(values, stops))
        ways = ((trained, begin), (stopping, begin), (trained, start))
        for result, (places, since) in zip(counted, ways, strict=True):
            result[chosen] = np.searchsorted(places, stop) - np.searchsorted(places, since)
    return Counted(pieces.sizes, *counted)
