"""The packed rows of an epoch as the trainer's data loader yields them, before a run starts.

documents  →  the trainer's sampler  →  micro-batches  →  the trainer's collator  →  batches
                                          │
                                          └ rows: a bin each, or a whole micro-batch without bins

A row is a part of one batch: its token `i` is token ``start + i`` of the micro-batch. With shared
prefixes, all documents of a micro-batch are one row, and its segments say who holds which token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.data.stop_tokens import ends_in_stop_token
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import (
    DOCUMENT_WEIGHT,
    IGNORE_INDEX,
    IMAGE_IDS,
    SEQ_LENGTHS,
    TOKEN_WEIGHTS,
)
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.prefix_tree import PrefixTree
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.packing.tree_row import tree_of_row
from trl_packing.tools.preview.preview import collator_of
from trl_packing.tools.preview.previewed_run import PreviewedRun, TracedDocuments, trace_documents
from trl_packing.training.columns import documents_of
from trl_packing.vision.documents import ImageTokens, images_of


@dataclass(frozen=True)
class Segment:
    """Tokens ``[start, stop)`` of a row, which the same documents hold.

    Attributes:
        start: its first token in the row, a boundary of `cu_seqlens`.
        stop: the next boundary.
        position: of its first token in the documents.
        parent: the segment that the documents hold before it; None where they begin.
        holders: documents that hold it, as their places in the sorted order of the tree.
        repeats: Whether its first token is a copy of the last common token, which is a target
            in another branch.
    """

    start: int
    stop: int
    position: int
    parent: int | None
    holders: tuple[int, ...]
    repeats: bool


def segments_of(tree: PrefixTree) -> list[Segment]:
    """Return the segments of the row of `tree`, in its order.

    Examples:
        >>> from trl_packing.packing.prefix_tree import build_prefix_tree
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> [(s.start, s.stop, s.position, s.parent, s.holders) for s in segments_of(tree)]
        [(0, 2, 0, None, (0, 1)), (2, 4, 2, 0, (0,)), (4, 6, 2, 0, (1,))]
    """
    return [_segment(tree, *part) for part in enumerate(pairwise(tree.cu_seqlens.tolist()))]


def _segment(tree: PrefixTree, number: int, rows: tuple[int, int]) -> Segment:
    start, stop = rows
    position = int(tree.position_ids[start])
    run = int(np.searchsorted(tree.starts[:-1], start, side="right")) - 1
    parent, repeats = None, False
    if position:
        before = tree.key_index[tree.cu_seqlens_k[number] + position - 1]
        parent = int(np.searchsorted(tree.cu_seqlens, before, side="right")) - 1
    if position and start == tree.starts[run]:
        # The document before goes on with another token, or ends here.
        repeats = position < tree.depths[run - 1] + tree.starts[run] - tree.starts[run - 1]
    return Segment(
        start, stop, position, parent, _holders(tree.depths, run, position), bool(repeats)
    )


def _holders(depths: np.ndarray, run: int, position: int) -> tuple[int, ...]:
    """Return the documents that hold a position of `run`: itself, and those that go on from it."""
    behind = np.flatnonzero(depths[run + 1 :] <= position)
    return tuple(range(run, run + 1 + int(behind[0]) if len(behind) else len(depths)))


def levels_of(segments: Sequence[Segment]) -> list[int]:
    """Return how many segments stand before each in its documents."""
    levels: list[int] = []
    for segment in segments:
        levels.append(0 if segment.parent is None else levels[segment.parent] + 1)
    return levels


# Properties of documents that a reader looks for.
NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED = (
    "nothing trained",
    "no stop token",
    "cut",
    "weighted",
)
PROPERTIES = (NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED)


@dataclass(frozen=True)
class RowDocument:
    """One document of a packed row: tokens ``[start, stop)`` of its micro-batch.

    Where documents share prefixes, these are its tokens in the row of the documents apart.

    Attributes:
        start: its first token in the micro-batch, a boundary of `cu_seqlens`.
        stop: the next boundary.
        number: its number among the prepared documents; None for padding.
        row: the row of the user's data set that it comes from; None for padding.
        uncut: its tokens before it was cut to fit.
        properties: those of `PROPERTIES` that it has.
        images: the tokens of its images, counted from `start`.
    """

    start: int
    stop: int
    number: int | None = None
    row: int | None = None
    uncut: int = 0
    properties: tuple[str, ...] = ()
    images: tuple[ImageTokens, ...] = ()


@dataclass(frozen=True, eq=False)
class PackedRow:
    """A bin as it is trained, or a whole micro-batch where nothing is packed.

    Attributes:
        micro_batch: its number in the epoch, over all ranks.
        index: which row of the micro-batch it is.
        batch: the micro-batch as the data loader yields it.
        documents: in the order of their tokens, padding included.
        apart: the micro-batch of the documents without shared prefixes; may be `batch`.
        segments: of a row whose documents share prefixes, without padding; else empty.
        shared: tokens of each document that stand in the documents before it; empty without
            `segments`.
    """

    micro_batch: int
    index: int
    batch: Any = field(repr=False)
    documents: tuple[RowDocument, ...]
    apart: Any = field(repr=False)
    segments: tuple[Segment, ...] = ()
    shared: tuple[int, ...] = ()

    @property
    def start(self) -> int:
        """Return the first token in the micro-batch."""
        return 0 if self.segments else self.documents[0].start

    @property
    def stop(self) -> int:
        """Return the position after the last token in the micro-batch."""
        return self.batch["labels"].shape[1] if self.segments else self.documents[-1].stop

    @property
    def real_tokens(self) -> int:
        """Return the tokens of all documents, those that they share in each of them."""
        return sum(d.stop - d.start for d in self.documents if d.number is not None)

    @property
    def num_images(self) -> int:
        """Return the images of all documents."""
        return sum(len(document.images) for document in self.documents)

    def to_dict(self) -> dict[str, Any]:
        """Return the row for JSON: its documents, their images, and the tokens that they share."""
        real = [d for d in self.documents if d.number is not None]
        shared = self.shared or [0] * len(real)
        return {
            "micro_batch": self.micro_batch + 1,
            "tokens": self.stop - self.start,
            "documents": [
                {"number": d.number, "row": d.row, "tokens": d.stop - d.start, "shared": above}
                | ({"images": [[i.start, i.stop] for i in d.images]} if d.images else {})
                for d, above in zip(real, shared, strict=True)
            ],
        }

    def values(self, name: str) -> np.ndarray:
        """Return the row's part of a tensor of the batch, ``(tokens,)``."""
        return self.batch[name][0, self.start : self.stop].numpy()


@dataclass(frozen=True, eq=False)
class PackedEpoch:
    """The packed rows of the epochs of a run.

    Attributes:
        run: the run.
        traced: its documents, and where they come from.
        sampler: the trainer's, of rank 0.
        documents: what the collator reads.
        collator: the trainer's.
        without_stop: documents that do not end in a trained stop token, ``(documents,)`` bool.
    """

    run: PreviewedRun
    traced: TracedDocuments
    sampler: PackedBatchSampler
    documents: ArrowDocuments
    collator: PackedCollator
    without_stop: np.ndarray

    @classmethod
    def of(cls, run: PreviewedRun, *, ranks: int = 1) -> "PackedEpoch":
        """Return the rows of `run`.

        Args:
            run: the run.
            ranks: data-parallel processes.

        Raises:
            ValueError: preparation refuses the data, or they are a stream or a mixture.
        """
        if run.is_stream:
            raise ValueError(
                "a stream is packed while it is read, so its rows are not known before; only a "
                "data set with a length has a page of rows"
            )
        traced = trace_documents(run)
        documents = documents_of(traced.dataset, None)
        sampler = run.sampling(ranks).for_training(documents)
        if sampler.draw is not None:
            raise ValueError(
                "an epoch of a mixture draws some documents several times, which the page of rows "
                "cannot show; leave mixture out to see the rows of all documents"
            )
        collator = collator_of(run, sampler)
        return cls(run, traced, sampler, documents, collator, _without_stop(documents, run))

    @property
    def capacity(self) -> int | None:
        """Return the tokens that a bin may hold; None where nothing is packed."""
        return None if self.sampler.documents_per_step else self.sampler.capacity

    @property
    def has_images(self) -> bool:
        """Whether the documents have images, which the tokens name."""
        return IMAGE_IDS in self.documents.columns

    def rows(self, micro_batches: Sequence[int]) -> Iterator[PackedRow]:
        """Yield the rows of micro-batches of the sampler's epoch, in order."""
        of_epoch = self.sampler.micro_batches()
        bins = self.bins()
        for number in micro_batches:
            yield from self._rows_of(number, of_epoch[number], bins)

    @property
    def unit(self) -> str:
        """Return the word for a row: "bin", or "micro-batch" where nothing is packed."""
        return "micro-batch" if self.sampler.documents_per_step else "bin"

    def groups(self) -> Any:
        """Return the documents of each row of the epoch, in any order."""
        return self.sampler.plan() or self.sampler.micro_batches()

    def computed_tokens(self) -> int | None:
        """Return the tokens of all rows, prefixes once in each; None if none can be shared."""
        if not self.collator.shares_prefixes or is_packed(self.documents):
            return None
        micro_batches = [*self.sampler.micro_batches()]
        offsets = np.cumsum([0, *map(len, micro_batches)])
        index, chosen = PrefixIndex.of(self.documents), np.concatenate(micro_batches)
        computed = index.computed_tokens(self.documents.lengths(), chosen, offsets)
        return int(computed.sum())

    def bins(self) -> np.ndarray:
        """Return a number for every document, equal for those that share a row of the epoch."""
        return self._group_of_documents(self.groups())

    def micro_batch_of_documents(self) -> np.ndarray:
        """Return the micro-batch of every document, ``(documents,)``; -1 if it is left out."""
        return self._group_of_documents(self.sampler.micro_batches())

    def _group_of_documents(self, groups: Any) -> np.ndarray:
        numbers = np.full(len(self.documents), -1)
        for number, documents in enumerate(groups):
            numbers[documents] = number
        return numbers

    def with_property(self) -> dict[str, np.ndarray]:
        """Return which documents of the whole set have each of `PROPERTIES`, ``(documents,)`` bool.

        Of packed rows nothing is known before they are drawn. A document counts as weighted if any
        of its tokens has a weight other than 1, or its length enters its weight.
        """
        documents, none = self.documents, np.zeros(len(self.documents), bool)
        if is_packed(documents):
            return dict.fromkeys(PROPERTIES, none)
        weighted = none | (self.collator.loss_weighting != "token")
        if TOKEN_WEIGHTS in documents.columns:
            weighted[documents.rows_where(TOKEN_WEIGHTS, lambda weights: weights != 1)] = True
        weighted |= documents.scalars.get(DOCUMENT_WEIGHT, 1) != 1
        return {
            NOTHING_TRAINED: documents.num_trained() == 0,
            NO_STOP_TOKEN: self.without_stop,
            CUT: self.traced.uncut > documents.lengths(),
            WEIGHTED: weighted,
        }

    def _rows_of(self, number: int, chosen: np.ndarray, bins: np.ndarray) -> Iterator[PackedRow]:
        documents = self.documents.__getitems__(chosen.tolist())
        apart = self.collator.replaced(shares_prefixes=False)(documents)
        found = self._documents_of(chosen, apart)
        if self.collator.shares_prefixes and (row := self._shared(number, documents, found, apart)):
            yield row
            return
        of_row = [-1 if d.number is None else int(bins[d.number]) for d in found]
        changes = [i for i in range(1, len(found)) if of_row[i] not in (-1, of_row[i - 1])]
        parts = zip([0, *changes], [*changes, len(found)], strict=True)
        for index, (first, end) in enumerate(parts):
            yield PackedRow(number, index, apart, tuple(found[first:end]), apart)

    def _shared(
        self, number: int, documents: Any, found: list[RowDocument], apart: Any
    ) -> PackedRow | None:
        """Return the row in which `documents` share prefixes; None if they share nothing."""
        real = [d for d in found if d.number is not None]
        tokens = {k: x[:, : real[-1].stop] for k, x in apart.items() if x.ndim == 2}
        tree = tree_of_row(tokens, [d.stop - d.start for d in real])
        if tree is None:
            return None
        batch = self.collator(documents)
        segments, shared = tuple(segments_of(tree)), tuple(tree.depths.tolist())
        in_order = [real[place] for place in tree.order]
        return PackedRow(number, 0, batch, tuple(in_order), apart, segments, shared)

    def _documents_of(self, chosen: np.ndarray, batch: Any) -> list[RowDocument]:
        boundaries = batch["cu_seq_lens_q"].tolist()
        numbers = self._repeat_packed(chosen)
        found = []
        for start, stop in pairwise(boundaries):
            number = next(numbers, None) if start < stop else None
            if number is not None:
                found.append(self._document(number, start, stop, batch))
            elif start < stop:
                found.append(RowDocument(start, stop))
        return found

    def _repeat_packed(self, chosen: np.ndarray) -> Iterator[int]:
        """Yield the number of each document with tokens; that of its row where rows are packed."""
        for number in chosen.tolist():
            lengths = [1]
            if is_packed(self.documents):
                lengths = self.documents[number][SEQ_LENGTHS].tolist()
            yield from [number] * sum(length > 0 for length in lengths)

    def _document(self, number: int, start: int, stop: int, batch: Any) -> RowDocument:
        labels = batch["labels"][0, start:stop].numpy()
        is_trained = labels != IGNORE_INDEX
        weights = np.ones(stop - start)
        if TOKEN_WEIGHTS in batch:
            weights = batch[TOKEN_WEIGHTS][0, start:stop].numpy()
        holds = {
            NOTHING_TRAINED: not (weights[is_trained] > 0).any(),
            NO_STOP_TOKEN: self.without_stop[number],
            CUT: self.traced.uncut[number] > stop - start and not is_packed(self.documents),
            WEIGHTED: (weights[is_trained] != 1).any(),
        }
        return RowDocument(
            start,
            stop,
            number,
            int(self.traced.rows[number]),
            int(self.traced.uncut[number]),
            tuple(name for name in PROPERTIES if holds[name]),
            tuple(images_of(self.documents[number])) if self.has_images else (),
        )


def _without_stop(documents: ArrowDocuments, run: PreviewedRun) -> np.ndarray:
    """Return which documents do not end in a trained stop token; none where rows are packed."""
    eos = run.preparation.eos
    if not eos.stop_ids or is_packed(documents) or "labels" not in documents.columns:
        return np.zeros(len(documents), bool)
    ended = ends_in_stop_token(documents, eos)
    return ~ended & (documents.num_trained() > 0)
