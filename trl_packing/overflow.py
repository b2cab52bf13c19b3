"""Documents of any length → documents that fit, every loss counted.

    documents           input_ids, labels, any length       (TRL renders and tokenizes)
        │  pieces.py    which [start, stop) of which document survives the overflow policy
        │  drop         pieces without a trained token
        ▼
    documents           each ≤ capacity, each with something to train

A policy only decides on (document, start, stop) triples, from lengths alone. `pieces.gather` cuts
all of a batch at once, and what is lost is counted from the triples. A piece is a document from
then on.
"""

from collections.abc import Iterable
from typing import NamedTuple

import datasets
import numpy as np
import pyarrow as pa

from trl_packing.arrow_documents import ArrowDocuments
from trl_packing.labels import IGNORE_INDEX
from trl_packing.pieces import (
    Overflow,
    Pieces,
    gather,
    is_kept,
    pieces_of,
    prompt_lengths,
    too_long_error,
)
from trl_packing.report import Amount, PreparationCounts, Step
from trl_packing.token_columns import (
    TOKEN_COLUMNS,
    list_column,
    token_lists,
)


def fit_documents(
    dataset: datasets.Dataset,
    overflow: Overflow,
    *,
    stop_ids: Iterable[int] = (),
    num_proc: int | None = None,
    name: str = "train",
) -> tuple[datasets.Dataset, PreparationCounts]:
    """Return `dataset` with every document within capacity and something to train in each.

    `dataset` has `input_ids` and `labels`; other columns are kept (and repeated for pieces), and
    `loss_weights` are cut as the tokens are. Trained tokens in `stop_ids` are counted apart.
    Raises ValueError if a document is too long under ``"error"``, or if nothing is left.
    """
    documents = ArrowDocuments(dataset, TOKEN_COLUMNS)
    lengths = documents.lengths()
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
        fitted = dataset.with_format("arrow").map(
            fit_table,
            fn_kwargs={"overflow": overflow},
            batched=True,
            batch_size=len(dataset) if overflow.policy == "wrapped" else 1000,
            num_proc=None if overflow.policy == "wrapped" else num_proc,
            desc=f"Fitting {name} dataset to max_length",
        )
        fitted = fitted.with_format(None)
    else:
        stored = [is_kept(chunk, overflow) for chunk in documents.readers["labels"].chunks]
        mapped = documents.stored_rows(np.arange(len(documents)))
        kept = np.flatnonzero(np.concatenate([*stored, np.zeros(0, bool)])[mapped] & ~too_long)
        fitted = dataset if len(kept) == len(dataset) else dataset.select(kept)
    after = ArrowDocuments(fitted, TOKEN_COLUMNS)
    if not len(fitted) or not after.num_trained().any():
        raise ValueError(
            f"no document of the {name} dataset has a trained token left "
            f"({len(lengths)} read, {int(too_long.sum())} longer than max_length="
            f"{overflow.capacity}, overflow={overflow.policy!r}); raise max_length, or check the "
            "completion or assistant masks"
        )
    return fitted, count_losses(documents, after, overflow, stop_ids)


def fit_table(table: pa.Table, overflow: Overflow) -> pa.Table:
    """Apply `overflow` to a table of documents and drop pieces without a trained token."""
    tokens = token_lists(table)
    lengths = np.diff(tokens["input_ids"][1])
    pieces = pieces_of(lengths, overflow, prompt_lengths(*tokens["labels"]))
    cut = {name: gather(lists, pieces) for name, lists in tokens.items()}
    kept = pa.array(np.flatnonzero(is_kept(cut["labels"], overflow)))
    columns = [
        list_column(*cut[field.name], field).take(kept)
        if field.name in cut
        else table.column(field.name).take(pa.array(pieces.rows)).take(kept)
        for field in table.schema
    ]
    return pa.table(columns, names=table.column_names)


# --- counts ---------------------------------------------------------------------------------------

_VERB = {
    "truncate": "cut at the end",
    "truncate_start": "cut at the start",
    "truncate_prompt": "prompt cut at the start",
    "drop": "dropped",
    "split": "split into pieces",
}


class _Counted(NamedTuple):
    """Tokens, trained tokens and trained stop tokens of each piece, ``(pieces,)`` int64."""

    tokens: np.ndarray
    trained: np.ndarray
    stops: np.ndarray
    labelled: np.ndarray  # with the first token, which is never a target

    def amount(self, chosen: np.ndarray | None = None) -> Amount:
        """Return the sums over all pieces, or over those that are `chosen`."""
        counted = self.tokens, self.trained, self.stops
        sums = [values if chosen is None else values[chosen] for values in counted]
        return Amount(len(sums[0]), *(int(values.sum()) for values in sums))


def count_losses(
    documents: ArrowDocuments,
    fitted: ArrowDocuments,
    overflow: Overflow,
    stop_ids: Iterable[int] = (),
) -> PreparationCounts:
    """Count what went in, what came out, and what each step between them lost.

    The steps are counted from the pieces and not while `map` cuts, which a cache may answer for.
    """
    stops = np.array(sorted(stop_ids), np.int64)
    whole = _whole(documents)
    prompts = np.zeros_like(whole.rows)
    if overflow.policy == "truncate_prompt":
        prompts = _prompts(documents)
    pieces = pieces_of(whole.stops, overflow, prompts)
    before = cut = _count(documents, whole, stops)
    if not np.array_equal(pieces, whole):
        cut = _count(documents, pieces, stops)
    steps = [
        _overflow_step(overflow, before, cut, pieces),
        *_drop_steps(overflow, before, cut, pieces),
    ]
    counts = PreparationCounts(
        before=before.amount(),
        after=_count(fitted, _whole(fitted), stops).amount(),
        steps=tuple(step for step in steps if step.concerned),
    )
    assert counts.adds_up(), f"the steps do not explain what came out: {counts!r}"
    return counts


def _whole(documents: ArrowDocuments) -> Pieces:
    lengths = documents.lengths()
    return Pieces(np.arange(len(lengths)), np.zeros_like(lengths), lengths)


def _prompts(documents: ArrowDocuments) -> np.ndarray:
    chunks = [prompt_lengths(*chunk) for chunk in documents.readers["labels"].chunks]
    stored = documents.stored_rows(np.arange(len(documents)))
    return np.concatenate([*chunks, np.zeros(0, np.int64)])[stored]


def _count(documents: ArrowDocuments, pieces: Pieces, stop_ids: np.ndarray) -> _Counted:
    """Count the tokens of every piece, one chunk of the Arrow table at a time."""
    labels = documents.readers["labels"]
    stored = documents.stored_rows(pieces.rows)
    order = np.argsort(stored, kind="stable")
    groups = np.split(order, np.searchsorted(stored[order], labels.first_row[1:-1]))
    counted = _Counted(pieces.stops - pieces.starts, *np.zeros((3, len(stored)), np.int64))
    for (values, offsets), first, chosen in zip(
        labels.chunks, labels.first_row[:-1], groups, strict=False
    ):
        start = offsets[stored[chosen] - first] + pieces.starts[chosen]
        stop = start + counted.tokens[chosen]
        begin = np.minimum(start + 1, stop)  # the first token of a piece is never a target
        masks = values != IGNORE_INDEX, np.isin(values, stop_ids)
        for result, mask in zip(counted[1:3], masks, strict=True):
            at = np.flatnonzero(mask)  # a search costs less than a running sum over all tokens
            result[chosen] = np.searchsorted(at, stop) - np.searchsorted(at, begin)
            if result is counted.trained:
                counted.labelled[chosen] = np.searchsorted(at, stop) - np.searchsorted(at, start)
    return counted


def _overflow_step(overflow: Overflow, before: _Counted, cut: _Counted, pieces: Pieces) -> Step:
    number = len(before.tokens)
    intact = int((cut.tokens == before.tokens[pieces.rows]).sum())
    stops_left = np.bincount(pieces.rows, cut.stops, minlength=number)
    why = f"longer than max_length={overflow.capacity}: {_VERB.get(overflow.policy)}"
    if overflow.policy == "wrapped":
        why = f"cut where rows of max_length={overflow.capacity} end"
    return Step(
        number - intact,
        why,
        before.amount() - cut.amount(),
        lost_a_stop=int((stops_left < before.stops).sum()),
        way_out="raise max_length" + " or set overflow='split'" * (not overflow.makes_pieces),
    )


def _drop_steps(
    overflow: Overflow, before: _Counted, cut: _Counted, pieces: Pieces
) -> tuple[Step, Step]:
    """Return what went for having nothing to train: from the beginning, and because of the cut."""
    untrained = cut.trained == 0
    if overflow.drops_as_padded:
        untrained = cut.tokens == 0 if overflow.capacity is None else cut.labelled == 0
    never = untrained & (before.trained[pieces.rows] == 0)
    documents = np.unique(pieces.rows[never])
    empty = int((before.tokens[documents] == 0).sum())
    return (
        Step(
            len(documents),
            "without a trained token: dropped",
            cut.amount(never),
            empty=empty,
        ),
        Step(
            int((untrained & ~never).sum()),
            "with no trained token left: dropped",
            cut.amount(untrained & ~never),
            unit="piece" if overflow.makes_pieces else "document",
        ),
    )
