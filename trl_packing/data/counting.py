"""Counting what each stage of preparation lost, from pieces and Arrow columns.

documents      before: tokens, trained tokens, stop tokens
    │  overflow    cut or dropped for their length
    │  drop        dropped for having nothing to train
    ▼
fitted         after = before − the losses of both stages
"""

from collections.abc import Iterable, Iterator
from typing import NamedTuple

import datasets
import numpy as np

from trl_packing.data.counts import (
    Conversations,
    PreparationCounts,
    Stage,
    TokenCounts,
    quantity,
)
from trl_packing.data.fitting import fit_documents
from trl_packing.data.overflow import Overflow, Pieces, pieces_of, prompt_lengths
from trl_packing.data.whole_images import keep_images_whole
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IGNORE_INDEX, IMAGE_IDS, TOKEN_COLUMNS

_VERB = {
    "truncate": "cut at the end",
    "truncate_start": "cut at the start",
    "truncate_prompt": "prompt cut at the start",
    "drop": "dropped",
    "split": "split into pieces",
    "overlap": "split into pieces that overlap",
}


class _PieceCounts(NamedTuple):
    """Tokens, trained tokens and trained stop tokens of each piece, ``(pieces,)`` int64."""

    tokens: np.ndarray
    trained: np.ndarray
    stops: np.ndarray
    labelled: np.ndarray  # trained tokens and a labelled first token, which is never a target

    def sums(self, chosen: np.ndarray | None = None) -> TokenCounts:
        """Return the sums over all pieces, or over the `chosen` ones, ``(pieces,)`` bool."""
        counted = self.tokens, self.trained, self.stops
        sums = [values if chosen is None else values[chosen] for values in counted]
        return TokenCounts(len(sums[0]), *(int(values.sum()) for values in sums))


def fit_and_count(
    dataset: datasets.Dataset,
    overflow: Overflow,
    *,
    stop_ids: Iterable[int] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[datasets.Dataset, PreparationCounts]:
    """Return the documents of `dataset` that fit, and the losses; see the two functions called."""
    images = [IMAGE_IDS] if IMAGE_IDS in dataset.column_names else []
    documents = ArrowDocuments(dataset, [*TOKEN_COLUMNS, *images])
    fitted = fit_documents(documents, overflow, num_proc=num_proc, name=name)
    return fitted.dataset, count_losses(documents, fitted, overflow, stop_ids)


def count_losses(
    documents: ArrowDocuments,
    fitted: ArrowDocuments,
    overflow: Overflow,
    stop_ids: Iterable[int] = (),
) -> PreparationCounts:
    """Return what came in, what came out, and the losses of each stage between.

    Stages are counted from the pieces, not while `map` cuts: its result may come from a cache.

    Args:
        documents: before the overflow policy.
        fitted: after it, as `fit_documents` or `fit_table` returns them.
        overflow: the policy that was applied.
        stop_ids: trained tokens with these ids are counted as stop tokens.
    """
    stops = np.array(sorted(stop_ids), np.int64)
    before = _count(documents, _whole(documents), stops)
    after = before if fitted is documents else _count(fitted, _whole(fitted), stops)
    counts = _losses(overflow, before, *_cut(documents, overflow, before, stops), after.sums())
    assert counts.adds_up(), f"the stages do not explain what came out: {counts!r}"
    return counts


def count_conversations(turns: np.ndarray, *, names_row: bool = True) -> Conversations:
    """Return the conversations whose documents have these numbers.

    Args:
        turns: values of the column `TURN`, ``(documents,)``.
        names_row: The documents are those of a whole data set, in its order.
    """
    starts = turns <= 0  # the first turn of a conversation, or a conversation without one
    silent = turns < 0
    first = None
    if names_row and silent.any():
        first = int(starts[: int(np.argmax(silent))].sum())
    return Conversations(int(starts.sum()), int((~silent).sum()), int(silent.sum()), first)


def count_without_cutting(
    documents: ArrowDocuments, policies: Iterable[Overflow], stop_ids: Iterable[int] = ()
) -> Iterator[tuple[np.ndarray, PreparationCounts]]:
    """Yield, for each policy, the lengths of the documents that it would leave, and its losses.

    Args:
        documents: before the overflow policy.
        policies: none of them `"error"` with a document that is too long.
        stop_ids: as for `count_losses`.
    """
    stops = np.array(sorted(stop_ids), np.int64)
    before = _count(documents, _whole(documents), stops)
    for overflow in policies:
        cut, pieces = _cut(documents, overflow, before, stops)
        kept = ~_is_dropped(overflow, cut)
        yield cut.tokens[kept], _losses(overflow, before, cut, pieces, cut.sums(kept))


def _cut(
    documents: ArrowDocuments, overflow: Overflow, before: _PieceCounts, stop_ids: np.ndarray
) -> tuple[_PieceCounts, Pieces]:
    """Return the pieces of the documents under a policy, and their counts."""
    pieces = pieces_of_documents(documents, overflow)
    if all(map(np.array_equal, pieces[:3], _whole(documents)[:3])):
        return before, pieces
    return _count(documents, pieces, stop_ids), pieces


def pieces_of_documents(documents: ArrowDocuments, overflow: Overflow) -> Pieces:
    """Return the pieces that a policy keeps of `documents`; no document with images is cut."""
    lengths = documents.lengths()
    prompts = np.zeros_like(lengths)
    if overflow.policy == "truncate_prompt":
        prompts = _prompts(documents)
    pieces = pieces_of(lengths, overflow, prompts)
    if IMAGE_IDS not in documents.columns or overflow.capacity is None:
        return pieces
    drops = np.zeros(len(lengths), bool)
    drops[documents.rows_where(IMAGE_IDS, lambda ids: ids > 0)] = True
    return keep_images_whole(pieces, drops & (lengths > overflow.capacity))


def _losses(
    overflow: Overflow,
    before: _PieceCounts,
    cut: _PieceCounts,
    pieces: Pieces,
    after: TokenCounts,
) -> PreparationCounts:
    stages = [
        _overflow_stage(overflow, before, cut, pieces),
        *_drop_stages(overflow, before, cut, pieces),
    ]
    return PreparationCounts(
        before=before.sums(), after=after, stages=tuple(stage for stage in stages if stage.affected)
    )


def _whole(documents: ArrowDocuments) -> Pieces:
    lengths = documents.lengths()
    return Pieces(np.arange(len(lengths)), np.zeros_like(lengths), lengths)


def _prompts(documents: ArrowDocuments) -> np.ndarray:
    chunks = documents.readers["labels"].chunks
    return documents.in_order([prompt_lengths(*chunk) for chunk in chunks])


def _count(documents: ArrowDocuments, pieces: Pieces, stop_ids: np.ndarray) -> _PieceCounts:
    """Count the tokens of every piece, one chunk of the Arrow table at a time."""
    labels = documents.readers["labels"]
    stored = documents.stored_rows(pieces.rows)
    order = np.argsort(stored, kind="stable")
    groups = np.split(order, np.searchsorted(stored[order], labels.first_row[1:-1]))
    counted = _PieceCounts(pieces.stops - pieces.starts, *np.zeros((3, len(stored)), np.int64))
    for (values, offsets), first, chosen in zip(
        labels.chunks, labels.first_row[:-1], groups, strict=False
    ):
        zero = offsets[stored[chosen] - first]
        stop = zero + pieces.stops[chosen]
        start = np.minimum(zero + pieces.trained_from[chosen], stop)
        # The first token of a piece is never a target; behind a context, it is.
        begin = np.minimum(np.maximum(start, zero + pieces.starts[chosen] + 1), stop)
        masks = values != IGNORE_INDEX, np.isin(values, stop_ids)
        for result, mask in zip(counted[1:3], masks, strict=True):
            at = np.flatnonzero(mask)  # a search costs less than a running sum over all tokens
            result[chosen] = np.searchsorted(at, stop) - np.searchsorted(at, begin)
            if result is counted.trained:
                counted.labelled[chosen] = np.searchsorted(at, stop) - np.searchsorted(at, start)
    return counted


def _overflow_stage(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> Stage:
    number = len(before.tokens)
    intact = int((cut.tokens == before.tokens[pieces.rows]).sum())
    stops_left = np.bincount(pieces.rows, cut.stops, minlength=number)
    why = f"longer than max_length={overflow.capacity}: {_VERB.get(overflow.policy)}"
    if overflow.policy == "wrapped":
        why = f"cut where rows of max_length={overflow.capacity} end"
    dropped = number - len(np.unique(pieces.rows))
    if dropped and overflow.policy != "drop":
        why += f" ({quantity(dropped, 'document')} with images dropped)"
    contexts = np.zeros_like(pieces.rows) if pieces.contexts is None else pieces.contexts
    suggests_split = not overflow.makes_pieces and _are_running_text(overflow, before, cut, pieces)
    return Stage(
        number - intact,
        why,
        before.sums() - cut.sums(),
        lost_eos=int((stops_left < before.stops).sum()),
        remedy="raise max_length" + " or set overflow='split'" * suggests_split,
        repeated=int(contexts[~_is_dropped(overflow, cut)].sum()),
    )


def _are_running_text(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> bool:
    """Return whether pieces of the cut documents would make sense alone.

    Pieces of a conversation, or of an answer without its prompt, would not. Such documents have
    untrained tokens, or stop tokens between their turns.
    """
    is_cut = np.ones(len(before.tokens), bool)
    is_cut[pieces.rows[cut.tokens == before.tokens[pieces.rows]]] = False
    trained = before.trained[is_cut] >= before.tokens[is_cut] - 1
    return overflow.running_text and bool(trained.all() and (before.stops[is_cut] < 2).all())


def _drop_stages(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> tuple[Stage, Stage]:
    """Return losses of pieces with nothing to train: from the beginning, and because of the cut."""
    untrained = _is_dropped(overflow, cut)
    never = untrained & (before.trained[pieces.rows] == 0)
    documents = np.unique(pieces.rows[never])
    empty = int((before.tokens[documents] == 0).sum())
    return (
        Stage(
            len(documents),
            "without a trained token: dropped",
            cut.sums(never),
            empty=empty,
        ),
        Stage(
            int((untrained & ~never).sum()),
            "with no trained token left: dropped",
            cut.sums(untrained & ~never),
            unit="piece" if overflow.makes_pieces else "document",
        ),
    )


def _is_dropped(overflow: Overflow, cut: _PieceCounts) -> np.ndarray:
    """Return which pieces have nothing to train, as `fitting.is_kept` decides it from labels."""
    if overflow.drops_as_padded:
        return cut.tokens == 0 if overflow.capacity is None else cut.labelled == 0
    return cut.trained == 0
