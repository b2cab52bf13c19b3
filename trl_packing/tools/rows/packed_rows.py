"""The packed rows of an epoch as the trainer's data loader yields them, before a run starts.

documents  →  the trainer's sampler  →  micro-batches  →  the trainer's collator  →  batches
                                          │
                                          └ rows: a bin each, or a whole micro-batch without bins

A row is a part of one batch: its token `i` is token ``start + i`` of the micro-batch. With shared
prefixes, all documents of a micro-batch are one row, and `segments.py` says who holds which token.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np

from trl_packing.data.eos import ends_in_stop_token
from trl_packing.data.whole_images import images_of
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
from trl_packing.packing.sampler import PackedBatchSampler
from trl_packing.packing.tree_row import tree_of_row
from trl_packing.tools.preview.preview import sampler_of
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.preview.row_of_document import TracedDocuments, trace_documents
from trl_packing.tools.preview.run_collator import collator_of
from trl_packing.tools.rows.packed_row import (
    CUT,
    NO_STOP_TOKEN,
    NOTHING_TRAINED,
    PROPERTIES,
    WEIGHTED,
    PackedRow,
    RowDocument,
)
from trl_packing.tools.rows.segments import segments_of
from trl_packing.training.columns import documents_of


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
        sampler = sampler_of(run, documents, ranks=ranks)
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
    ended = documents.in_order(ends_in_stop_token(documents.readers["labels"].chunks, eos))
    return ~ended & (documents.num_trained() > 0)
