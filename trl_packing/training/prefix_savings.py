"""The tokens that a run computes where its documents share prefixes, known before it starts.

    micro-batches of an epoch    some of them, evenly spread      4 million tokens at most
        │  their documents       in sorted order                  packing/prefix_order.py
    tokens of documents          8,000,000
    tokens computed              3,333,333                        2.4× fewer

The look takes less than 0.2 seconds on any data set, so a run whose documents share nothing learns
it at once, and then neither checks its model nor looks for prefixes in its rows.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS, SOURCE_IDS
from trl_packing.packing.prefix_index import PrefixIndex
from trl_packing.packing.prefix_order import prefix_order
from trl_packing.packing.sampler import PackedBatchSampler

_MOST_TOKENS = 4_000_000  # of the documents that are looked at
_FEWEST_BATCHES = 8

# A share of the tokens below which rows are not worth a check of the model.
_WORTH_SHARING = 0.005
# The report of a run that does not share names the setting above this share.
_WORTH_A_LINE = 0.05


@dataclass(frozen=True)
class PrefixSavings:
    """Tokens of micro-batches: those of their documents, and those computed where these share.

    Attributes:
        sharing: `prefix_sharing` of the run: "off", "bin", ...
        tokens: of the documents looked at; 0 if none were.
        computed: tokens of their rows with shared prefixes, without padding.
        is_whole: whether all micro-batches of the epoch were looked at.
        reason: why the run does not share; None if it does, or if it was not asked to.
    """

    sharing: str
    tokens: int = 0
    computed: int = 0
    is_whole: bool = False
    reason: str | None = None

    @property
    def saved(self) -> float:
        """Return the share of the documents' tokens that is not computed."""
        return 1 - self.computed / self.tokens if self.tokens else 0.0

    @property
    def pays(self) -> bool:
        """Return whether sharing is worth its check; unknown savings may be."""
        return not self.tokens or self.saved >= _WORTH_SHARING

    def __str__(self) -> str:
        """Return the line of the report; "" where there is nothing to say."""
        if not self.tokens:
            return f"not shared: {self.reason}" if self.reason else ""
        about = "" if self.is_whole else "about "
        if self.sharing == "off":
            fewer = f"{about}{times_fewer(self.tokens, self.computed)} tokens"
            worth = self.saved >= _WORTH_A_LINE
            return f"prefix_sharing='bin' would compute {fewer}" if worth else ""
        if self.pays and self.reason:
            return f"not shared: {self.reason}"
        if self.pays:
            return f"{about}{times_fewer(self.tokens, self.computed)} tokens computed"
        asked = self.sharing != PackingOptions.prefix_sharing
        return "nothing to share: documents of a row begin differently" * asked


def times_fewer(tokens: int, computed: int) -> str:
    """Return by how much `computed` tokens are fewer.

    Examples:
        >>> times_fewer(1130, 1000), times_fewer(2400, 1000)
        ('1.13× fewer', '2.4× fewer')
    """
    ratio = tokens / max(computed, 1)
    return f"{ratio:.{2 if ratio < 2 else 1}f}× fewer"


def prefix_savings(
    documents: ArrowDocuments, sampler: PackedBatchSampler, sharing: str
) -> PrefixSavings:
    """Return what sharing saves in the sampler's epoch.

    Args:
        documents: that the sampler draws.
        sampler: of any rank.
        sharing: `prefix_sharing` of the run.
    """
    tokens_per_batch = int(sampler.lengths.sum()) // max(len(sampler) * sampler.num_ranks, 1)
    number = max(_MOST_TOKENS // max(tokens_per_batch, 1), _FEWEST_BATCHES)
    batches = sampler.some_micro_batches(number)
    rows = [documents.__getitems__(batch) for batch in batches]
    tokens, computed = _shared_tokens([d for row in rows for d in row], [*map(len, rows)])
    is_whole = len(batches) == len(sampler) * sampler.num_ranks
    return PrefixSavings(sharing, tokens, computed, is_whole)


def _shared_tokens(documents: Sequence[dict[str, Any]], sizes: Sequence[int]) -> tuple[int, int]:
    """Return the tokens of documents, and those that their rows compute.

    Args:
        documents: documents, or packed rows of several, as `ArrowDocuments` returns them.
        sizes: number of documents in each micro-batch.
    """
    if not documents:
        return 0, 0
    ids = np.concatenate([document["input_ids"] for document in documents])
    per_item = [np.atleast_1d(d.get(SEQ_LENGTHS, len(d["input_ids"]))) for d in documents]
    lengths = np.concatenate(per_item).astype(np.int64)
    counts = np.array([len(lengths_of_item) for lengths_of_item in per_item])
    offsets = np.concatenate([[0], np.cumsum(lengths)])
    order, common = prefix_order(ids, offsets)
    index = PrefixIndex(order, common.astype(np.int32))
    groups = _groups(documents, ids, counts, offsets)
    index = index if groups is None else index.grouped(groups)
    ends_of_items = np.concatenate([[0], np.cumsum(counts)])
    rows = ends_of_items[np.concatenate([[0], np.cumsum(sizes)])]
    computed = index.computed_tokens(lengths, np.arange(len(lengths)), rows)
    return len(ids), int(computed.sum())


def _groups(
    documents: Sequence[dict[str, Any]], ids: np.ndarray, counts: np.ndarray, offsets: np.ndarray
) -> np.ndarray | None:
    """Return a number for each document, as `tree_row` does; None if all may share."""
    groups = None
    if SOURCE_IDS in documents[0]:
        groups = np.repeat([int(document[SOURCE_IDS]) for document in documents], counts)
    if "labels" in documents[0]:
        labels = np.concatenate([document["labels"] for document in documents])
        own = np.flatnonzero((labels != ids) & (labels != IGNORE_INDEX))
        document = np.searchsorted(offsets, own, side="right") - 1
        document = np.unique(document[own > offsets[document]])  # a first token is never a target
        if len(document):
            groups = np.zeros(counts.sum(), np.int64) if groups is None else groups
            groups[document] = -1 - np.arange(len(document))
    return groups
