"""What preparation kept and lost, as numbers and as words.

Everything here is a value object. `overflow` and the trainer fill it in; `str()` is what a user
reads.
"""

from collections.abc import Iterable
from dataclasses import astuple, dataclass, field, replace
from typing import NamedTuple

import datasets
import numpy as np

from trl_packing.data.overflow import Overflow, Pieces, fit_documents, pieces_of, prompt_lengths
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IGNORE_INDEX, TOKEN_COLUMNS

# Above this share of lost trained tokens, or of documents that lost a stop token, it warns.
WARN_LOST_SHARE = 0.01


@dataclass(frozen=True)
class TokenCounts:
    """Documents, their tokens, the trained ones of these, and the stop tokens of the trained."""

    documents: int = 0
    tokens: int = 0
    trained: int = 0
    stops: int = 0

    def __add__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(a + b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __sub__(self, other: "TokenCounts") -> "TokenCounts":
        return TokenCounts(*(a - b for a, b in zip(astuple(self), astuple(other), strict=True)))

    def __str__(self) -> str:
        trained = f", {self.trained:,} trained" * bool(self.trained)
        stops = f", {quantity(self.stops, 'stop token')}" * bool(self.stops)
        return quantity(self.tokens, "token") + trained + stops


@dataclass(frozen=True)
class Stage:
    """Losses of one stage of preparation: how many documents were affected, and why.

    Attributes:
        affected: documents (or pieces, by `unit`) that the stage changed or dropped.
        why: the reason, as a predicate of the affected documents.
        lost: counts before the stage minus counts after it. A piece counts as a document, so a
            stage that splits documents loses a negative number of them.
        lost_eos: documents that have fewer trained stop tokens than before.
        remedy: the setting that avoids the loss.
        empty: affected documents without any token.
    """

    affected: int
    why: str
    lost: TokenCounts = field(default_factory=TokenCounts)
    lost_eos: int = 0
    remedy: str = ""
    unit: str = "document"
    empty: int = 0

    def __add__(self, other: "Stage") -> "Stage":
        """Return the same stage on the documents of both."""
        return replace(
            self,
            affected=self.affected + other.affected,
            lost=self.lost + other.lost,
            lost_eos=self.lost_eos + other.lost_eos,
            empty=self.empty + other.empty,
            remedy=min(self.remedy, other.remedy, key=len),  # what helps the documents of both
        )

    def __str__(self) -> str:
        empty = f" ({self.empty:,} of them empty)" * bool(self.empty)
        lost = f"; lost {self.lost}" * (self.lost.tokens > 0 or self.lost.trained > 0)
        return f"{quantity(self.affected, self.unit)} {self.why}{empty}{lost}"


@dataclass(frozen=True)
class PreparationCounts:
    """What came into the preparation of one data set, what came out, and each stage between them.

    `notes` are sentences on the documents that are no loss.
    """

    before: TokenCounts = field(default_factory=TokenCounts)
    after: TokenCounts = field(default_factory=TokenCounts)
    stages: tuple[Stage, ...] = ()
    notes: tuple[str, ...] = ()

    def adds_up(self) -> bool:
        """Whether the stages lost exactly what came in and did not come out."""
        return self.before - sum((stage.lost for stage in self.stages), TokenCounts()) == self.after

    def __add__(self, other: "PreparationCounts") -> "PreparationCounts":
        """Return the counts of two parts of a data set; of notes, those of the first with any."""
        stages = {stage.why: stage for stage in self.stages}
        for stage in other.stages:
            stages[stage.why] = stages[stage.why] + stage if stage.why in stages else stage
        return PreparationCounts(
            self.before + other.before,
            self.after + other.after,
            tuple(stages.values()),
            self.notes or other.notes,
        )

    def with_note(self, note: str) -> "PreparationCounts":
        return replace(self, notes=(*self.notes, note))

    def __str__(self) -> str:
        lines = [str(stage) for stage in self.stages]
        if sum(stage.lost.tokens > 0 or stage.lost.trained > 0 for stage in self.stages) > 1:
            lines.append(f"lost in all: {self.before - self.after}")
        return "\n".join(filter(None, [*lines, self._warning(), *self.notes]))

    def _warning(self) -> str:
        """Return a sentence if more than `WARN_LOST_SHARE` is lost, with the way out of most."""
        shares = {
            "{:.1%} of the trained tokens are lost": _share(
                self.before.trained - self.after.trained, self.before.trained
            ),
            "{:.1%} of the documents lost a stop token": _share(
                sum(stage.lost_eos for stage in self.stages), self.before.documents
            ),
        }
        words = [text.format(n) for text, n in shares.items() if n > WARN_LOST_SHARE]
        if not words:
            return ""
        most = max(self.stages, key=lambda stage: (stage.lost.trained, stage.lost_eos))
        return f"warning: {' and '.join(words)}{'; ' * bool(most.remedy)}{most.remedy}"


def _share(part: int, whole: int) -> float:
    return part / whole if whole else 0.0


def quantity(number: int, unit: str) -> str:
    return f"{number:,} {unit}{'s' * (number != 1)}"


# --- counts ---------------------------------------------------------------------------------------
_VERB = {
    "truncate": "cut at the end",
    "truncate_start": "cut at the start",
    "truncate_prompt": "prompt cut at the start",
    "drop": "dropped",
    "split": "split into pieces",
}


class _PieceCounts(NamedTuple):
    """Tokens, trained tokens and trained stop tokens of each piece, ``(pieces,)`` int64."""

    tokens: np.ndarray
    trained: np.ndarray
    stops: np.ndarray
    labelled: np.ndarray  # with the first token, which is never a target

    def sums(self, chosen: np.ndarray | None = None) -> TokenCounts:
        """Return the sums over all pieces, or over those that are `chosen`."""
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
    documents = ArrowDocuments(dataset, TOKEN_COLUMNS)
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
    whole = _whole(documents)
    prompts = np.zeros_like(whole.rows)
    if overflow.policy == "truncate_prompt":
        prompts = _prompts(documents)
    pieces = pieces_of(whole.stops, overflow, prompts)
    before = cut = _count(documents, whole, stops)
    if not np.array_equal(pieces, whole):
        cut = _count(documents, pieces, stops)
    stages = [
        _overflow_stage(overflow, before, cut, pieces),
        *_drop_stages(overflow, before, cut, pieces),
    ]
    after = before if fitted is documents else _count(fitted, _whole(fitted), stops)
    counts = PreparationCounts(
        before=before.sums(),
        after=after.sums(),
        stages=tuple(stage for stage in stages if stage.affected),
    )
    assert counts.adds_up(), f"the stages do not explain what came out: {counts!r}"
    return counts


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


def _overflow_stage(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> Stage:
    number = len(before.tokens)
    intact = int((cut.tokens == before.tokens[pieces.rows]).sum())
    stops_left = np.bincount(pieces.rows, cut.stops, minlength=number)
    why = f"longer than max_length={overflow.capacity}: {_VERB.get(overflow.policy)}"
    if overflow.policy == "wrapped":
        why = f"cut where rows of max_length={overflow.capacity} end"
    suggests_split = not overflow.makes_pieces and _are_running_text(overflow, before, cut, pieces)
    return Stage(
        number - intact,
        why,
        before.sums() - cut.sums(),
        lost_eos=int((stops_left < before.stops).sum()),
        remedy="raise max_length" + " or set overflow='split'" * suggests_split,
    )


def _are_running_text(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> bool:
    """Return whether pieces of the documents that are cut would make sense alone.

    Those of a conversation, or of an answer without its prompt, would not: these have tokens that
    are not trained, or stop tokens between their turns.
    """
    is_cut = np.ones(len(before.tokens), bool)
    is_cut[pieces.rows[cut.tokens == before.tokens[pieces.rows]]] = False
    trained = before.trained[is_cut] >= before.tokens[is_cut] - 1
    return overflow.running_text and bool(trained.all() and (before.stops[is_cut] < 2).all())


def _drop_stages(
    overflow: Overflow, before: _PieceCounts, cut: _PieceCounts, pieces: Pieces
) -> tuple[Stage, Stage]:
    """Return what went for having nothing to train: from the beginning, and because of the cut."""
    untrained = cut.trained == 0
    if overflow.drops_as_padded:
        untrained = cut.tokens == 0 if overflow.capacity is None else cut.labelled == 0
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
