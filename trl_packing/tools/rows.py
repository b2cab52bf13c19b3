"""The packed rows of an epoch as the trainer's data loader yields them, before a run starts.

documents  →  the trainer's sampler  →  micro-batches  →  the trainer's collator  →  batches
                                          │
                                          └ rows: a bin each, or a whole micro-batch without bins

A row is a part of one batch: its token `i` is token ``start + i`` of the micro-batch. With shared
prefixes, all documents of a micro-batch are one row, and its segments say who holds which token.
"""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.attention.backends import NATIVE_ATTENTION
from trl_packing.data.stop_tokens import ends_in_stop_token
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import DOCUMENT_WEIGHT, IMAGE_IDS, TOKEN_WEIGHTS
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.prefix_tree import tree_of_row
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.pages.rows import PROPERTIES, PackedRow, RowDocument, segments_of
from trl_packing.run.run import Run
from trl_packing.run.sampling import Sampling
from trl_packing.run.sources import documents_of
from trl_packing.tools.preview import TracedDocuments, trace_documents
from trl_packing.vision.documents import images_of


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
        if self.collator.shares_prefixes:
            tokens = {k: x[0, : real[-1].stop].numpy() for k, x in apart.items() if x.ndim == 2}
            tree = tree_of_row(tokens, [document.stop - document.start for document in real])
            if tree is not None:
                held = tuple(real[at] for at in tree.order)
                batch = self.collator(documents)
                stop = batch["labels"].shape[1]
                yield PackedRow(number, 0, 0, stop, batch, held, apart, segments_of(tree))
                return
        of_row = [-1 if d.number is None else int(bins[d.number]) for d in found]
        changes = [i for i in range(1, len(found)) if of_row[i] not in (-1, of_row[i - 1])]
        for index, (first, end) in enumerate(pairwise([0, *changes, len(found)])):
            held = tuple(found[first:end])
            yield PackedRow(number, index, held[0].start, held[-1].stop, apart, held, apart)

    def _document(self, start: int, stop: int, number: int | None) -> RowDocument:
        if number is None:
            return RowDocument(start, stop)
        has_images = IMAGE_IDS in self.documents.columns
        return RowDocument(
            start,
            stop,
            number,
            row=int(self.traced.rows[number]),
            uncut=int(self.traced.uncut[number]),
            properties=tuple(name for name, has in self.with_property.items() if has[number]),
            images=tuple(images_of(self.documents[number])) if has_images else (),
        )


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
