"""The packed rows of an epoch as the trainer's data loader yields them, before a run starts.

documents  →  the trainer's sampler  →  micro-batches  →  the trainer's collator  →  batches
                                          │
                                          └ rows: a bin each, or a whole micro-batch without bins

A row is a part of one batch: its token `i` is token ``start + i`` of the micro-batch. With shared
prefixes, all documents of a micro-batch are one row, and its segments say who holds which token.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.attention.backends import NATIVE_ATTENTION
from trl_packing.data.stop_tokens import ends_in_stop_token
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import DOCUMENT_WEIGHT, IMAGE_IDS, TOKEN_WEIGHTS
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_tree import PrefixTree, tree_of_row
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.run.columns import documents_of
from trl_packing.run.run import Run
from trl_packing.run.sampling import Sampling
from trl_packing.tools.preview import TracedDocuments, trace_documents
from trl_packing.vision.documents import ImageTokens, images_of

# Properties of documents that a reader looks for.
PROPERTIES = ("nothing trained", "no stop token", "cut", "weighted")
NOTHING_TRAINED, NO_STOP_TOKEN, CUT, WEIGHTED = PROPERTIES


@dataclass(frozen=True)
class RowDocument:
    """One document of a packed row: tokens ``[start, stop)`` of the micro-batch without prefixes.

    Attributes:
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
        start: its first token in the micro-batch.
        stop: the position after its last token.
        batch: the micro-batch as the data loader yields it.
        documents: in the order of their tokens, padding included.
        apart: the micro-batch without shared prefixes; may be `batch`.
        segments: of a row whose documents share prefixes, without padding; else empty.
    """

    micro_batch: int
    index: int
    start: int
    stop: int
    batch: Any = field(repr=False)
    documents: tuple[RowDocument, ...]
    apart: Any = field(repr=False)
    segments: Sequence[dict[str, Any]] = ()

    def values(self, name: str) -> np.ndarray:
        """Return the row's part of a tensor of the batch, ``(tokens,)``."""
        return self.batch[name][0, self.start : self.stop].numpy()


def segments_of(tree: PrefixTree) -> list[dict[str, Any]]:
    """Return the segments of the row of `tree`, in its order: tokens that the same documents hold.

        start, stop    boundaries of `cu_seqlens`
        position       of its first token in the documents
        parent         number of the segment that the documents hold before it; None at their start
        level          number of segments before it in its documents
        documents      that hold it, as their places in the sorted order of the tree
        repeats        its first token is a copy of the last common token, which is a target in
                       another branch

    Examples:
        >>> from trl_packing.packing.prefix_tree import build_prefix_tree
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> [(s["start"], s["stop"], s["parent"], s["documents"]) for s in segments_of(tree)]
        [(0, 2, None, [0, 1]), (2, 4, 0, [0]), (4, 6, 0, [1])]
    """
    found: list[dict[str, Any]] = []
    deepest: dict[int, int] = {}  # of each document, the last segment so far
    own = np.diff(tree.starts)
    for number, (start, stop) in enumerate(pairwise(tree.cu_seqlens.tolist())):
        position = int(tree.position_ids[start])
        first = int(np.searchsorted(tree.starts[:-1], start, side="right")) - 1
        # The documents behind the first one hold the segment until one leaves its path above it.
        leaves = np.flatnonzero(np.append(tree.depths[first + 1 :], 0) <= position)
        documents = list(range(first, first + 1 + int(leaves[0])))
        parent = deepest.get(first) if position else None
        # The document before goes on with another token, or ends here.
        begins = position > 0 and start == int(tree.starts[first])
        repeats = begins and position < int(tree.depths[first - 1] + own[first - 1])
        level = 0 if parent is None else found[parent]["level"] + 1
        place = {"start": start, "stop": stop, "position": position, "parent": parent}
        found.append(place | {"level": level, "documents": documents, "repeats": repeats})
        deepest.update(dict.fromkeys(documents, number))
    return found


@dataclass(frozen=True, eq=False)
class PackedEpoch:
    """The packed rows of the epochs of a run.

    Attributes:
        traced: its documents, and where they come from.
        sampler: the trainer's.
        documents: what the collator reads.
        collator: the trainer's.
        with_property: which documents have each of `PROPERTIES`, ``(documents,)`` bool each. A
            document is weighted if any of its tokens has a weight other than 1, or its length
            enters its weight.
    """

    run: Run
    traced: TracedDocuments
    sampler: PackedBatchSampler
    documents: ArrowDocuments
    collator: PackedCollator
    with_property: dict[str, np.ndarray]

    @classmethod
    def of(cls, run: Run) -> "PackedEpoch":
        """Return the rows of `run` on one process.

        Raises:
            ValueError: preparation refuses the data, or they are a stream, a mixture or packed.
        """
        traced = trace_documents(run)
        documents = documents_of(traced.dataset, None)
        sampler = Sampling.before(run).for_training(documents)
        if run.is_stream or is_packed(documents) or sampler.draw is not None:
            raise ValueError(
                "a page shows the rows of documents that an epoch packs once: of no stream, no "
                "mixture, and no packed rows; leave --html out"
            )
        collator = collator_of(run)
        eos = run.rules.eos
        trains = documents.num_trained() > 0
        of_document = documents.scalars.get(DOCUMENT_WEIGHT, np.ones(len(documents)))
        has_weight = of_document > 0
        weighted = (of_document != 1) | (collator.loss_weighting != "token")
        if TOKEN_WEIGHTS in documents.columns:
            weighted[documents.rows_where(TOKEN_WEIGHTS, lambda weights: weights != 1)] = True
            some = documents.rows_where(TOKEN_WEIGHTS, lambda weights: weights > 0)
            has_weight &= np.isin(np.arange(len(documents)), some)
        no_stop = np.zeros(len(documents), bool)
        if eos.stop_ids and "labels" in documents.columns:
            no_stop = trains & ~ends_in_stop_token(documents, eos)
        cut = traced.uncut > documents.lengths()
        has = dict(zip(PROPERTIES, (~trains | ~has_weight, no_stop, cut, weighted), strict=True))
        return cls(run, traced, sampler, documents, collator, has)

    @property
    def capacity(self) -> int | None:
        """Return the tokens that a bin may hold; None where nothing is packed."""
        return None if self.sampler.documents_per_step else self.sampler.capacity

    def bins(self) -> Any:
        """Return the documents of each row of the epoch, in any order."""
        return self.sampler.plan() or self.sampler.micro_batches()

    def group_of_documents(self, groups: Iterable[Any]) -> np.ndarray:
        """Return the number of the group of every document, ``(documents,)``; -1 without one."""
        numbers = np.full(len(self.documents), -1)
        for number, documents in enumerate(groups):
            numbers[documents] = number
        return numbers

    def rows(self, micro_batches: Iterable[int]) -> Iterator[PackedRow]:
        """Yield the rows of micro-batches of the sampler's epoch, in order."""
        of_epoch = self.sampler.micro_batches()
        bins = self.group_of_documents(self.bins())
        for number in micro_batches:
            yield from self._rows_of(number, of_epoch[number], bins)

    def _rows_of(self, number: int, chosen: np.ndarray, bins: np.ndarray) -> Iterator[PackedRow]:
        documents = self.documents.__getitems__(chosen.tolist())
        apart = self.collator.replaced(shares_prefixes=False)(documents)
        numbers = iter(chosen.tolist())
        found = [
            self._document(start, stop, next(numbers, None))
            for start, stop in pairwise(apart["cu_seq_lens_q"].tolist())
            if start < stop
        ]
        real = [document for document in found if document.number is not None]
        tree = None
        if self.collator.shares_prefixes:
            tokens = {k: x[0, : real[-1].stop].numpy() for k, x in apart.items() if x.ndim == 2}
            tree = tree_of_row(tokens, [document.stop - document.start for document in real])
        if tree is not None:
            found = [real[at] for at in tree.order]
            batch = self.collator(documents)
            stop = batch["labels"].shape[1]
            yield PackedRow(number, 0, 0, stop, batch, tuple(found), apart, segments_of(tree))
            return
        of_row = [-1 if d.number is None else int(bins[d.number]) for d in found]
        changes = [i for i in range(1, len(found)) if of_row[i] not in (-1, of_row[i - 1])]
        for index, (first, end) in enumerate(pairwise([0, *changes, len(found)])):
            held = tuple(found[first:end])
            yield PackedRow(number, index, held[0].start, held[-1].stop, apart, held, apart)

    def _document(self, start: int, stop: int, number: int | None) -> RowDocument:
        if number is None:
            return RowDocument(start, stop)
        row, uncut = int(self.traced.rows[number]), int(self.traced.uncut[number])
        properties = tuple(name for name, has in self.with_property.items() if has[number])
        has_images = IMAGE_IDS in self.documents.columns
        images = tuple(images_of(self.documents[number])) if has_images else ()
        return RowDocument(start, stop, number, row, uncut, properties, images)


def collator_of(run: Run) -> PackedCollator:
    """Return the collator of a run, without the pixels of its images."""
    options = run.options
    collator = run.collator(run.rules.eos.tokenizer.pad_token_id)
    if options.static_shapes:
        raise ValueError("static_shapes=True pads rows when training starts; leave it out")
    # As far as it is known without the model.
    is_ours = type(collator).__call__ is PackedCollator.__call__ and not run.images.packs
    may_share = options.prefix_sharing != "off" and options.attention not in NATIVE_ATTENTION
    return collator.replaced(
        loss_weighting=options.loss_weighting,
        tensors_only=True,
        shares_prefixes=may_share and is_ours,
    )
