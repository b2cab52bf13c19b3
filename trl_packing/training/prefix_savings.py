"""The tokens that a run computes where its documents share prefixes, known before it starts.

    micro-batches of an epoch    some of them, evenly spread      4 million tokens at most
        │  their documents       in sorted order                  packing/prefix_index.py
    tokens of documents          8,000,000
    tokens computed              3,333,333                        2.4× fewer

The look takes about a tenth of a second on any data set. A run whose documents share nothing then
neither checks its model nor looks for prefixes in its rows.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from trl_packing.config import PackingOptions
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.documents.labels import IGNORE_INDEX, SEQ_LENGTHS
from trl_packing.packing.prefix_groups import group_documents
from trl_packing.packing.prefix_index import PrefixIndex, prefix_order_of_rows
from trl_packing.packing.sampler import PackedBatchSampler

_MOST_TOKENS = 4_000_000  # of the documents that are looked at
_FEWEST_BATCHES = 8

# A share of the tokens below which rows are not worth a check of the model.
_WORTH_SHARING = 0.005
# The report names another setting if that saves a larger share.
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
        per_step: mean number of different prefixes in an optimizer step, if they were grouped.
        saved_by_groups: share of the tokens that "group" would save at least, if that is clearly
            more than this run does; only `trl-packing plan` looks for it.
    """

    sharing: str
    tokens: int = 0
    computed: int = 0
    is_whole: bool = False
    reason: str | None = None
    per_step: float | None = None
    saved_by_groups: float | None = None

    @property
    def saved(self) -> float:
        """Return the share of the documents' tokens that is not computed."""
        return 1 - self.computed / self.tokens if self.tokens else 0.0

    @property
    def pays(self) -> bool:
        """Return whether sharing is worth its check; unknown savings may be."""
        return not self.tokens or self.saved >= _WORTH_SHARING

    @property
    def is_shared(self) -> bool:
        """Return whether the run shares prefixes, of which something is known."""
        return self.sharing != "off" and self.tokens > 0 and self.pays and not self.reason

    def __str__(self) -> str:
        """Return the line of the report; "" where there is nothing to say."""
        if not self.tokens:
            return f"not shared: {self.reason}" if self.reason else ""
        about = "" if self.is_whole else "about "
        groups = ""
        if self.saved_by_groups is not None:
            fewer = times_fewer(self.tokens, round(self.tokens * (1 - self.saved_by_groups)))
            groups = f"prefix_sharing='group' would compute {fewer} tokens"
        if self.sharing == "off":
            fewer = f"{about}{times_fewer(self.tokens, self.computed)} tokens"
            worth = self.saved >= _WORTH_A_LINE
            return groups or (f"prefix_sharing='bin' would compute {fewer}" if worth else "")
        if self.pays and self.reason:
            return f"not shared: {self.reason}"
        if self.is_shared:
            prefixes = "" if self.per_step is None else f" · {self.per_step:,.1f} prefixes a step"
            fewer = f"{about}{times_fewer(self.tokens, self.computed)} tokens computed{prefixes}"
            return f"{fewer} · {groups}" if groups else fewer
        if groups:
            return groups
        asked = self.sharing != PackingOptions.prefix_sharing
        return "nothing to share: documents of a row begin differently" * asked


def with_groups(
    found: PrefixSavings, index: PrefixIndex, lengths: np.ndarray, capacity: int | None, most: int
) -> PrefixSavings:
    """Return `found` with what groups of documents would save, if that is clearly more.

    Args:
        found: the savings of a run without groups.
        index: of its documents.
        lengths: tokens of each document.
        capacity: as for `group_documents`, and so is the next.
        most: documents of a group.
    """
    groups = group_documents(index, lengths, capacity, most)
    saved = 1 - float(groups.tokens.sum() / lengths.sum())
    return replace(found, saved_by_groups=saved) if saved > found.saved + _WORTH_A_LINE else found


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
    drawn, sizes = np.concatenate(batches).astype(np.int64), np.array([*map(len, batches)])
    if is_packed(documents):
        rows = documents.__getitems__(drawn)
        by_row = [row[SEQ_LENGTHS] for row in rows]
        lengths = np.concatenate(by_row).astype(np.int64)
        of_rows = np.cumsum([0, *map(len, by_row)])
        offsets = of_rows[np.cumsum([0, *sizes])]
        tokens = np.concatenate([row["input_ids"] for row in rows])
        chunks, stored = [(tokens, np.cumsum([0, *lengths]))], np.arange(len(lengths))
    else:
        lengths, offsets = sampler.lengths[drawn].astype(np.int64), np.cumsum([0, *sizes])
        chunks, stored = documents.readers["input_ids"].chunks, documents.stored_rows(drawn)
    order, common = prefix_order_of_rows(chunks, stored)
    index, every = PrefixIndex(order, common.astype(np.int32)), np.arange(len(lengths))
    computed = index.computed_tokens(lengths, every, offsets)
    is_whole = len(batches) == len(sampler) * sampler.num_ranks
    found = PrefixSavings(
        sharing,
        int(lengths.sum()),
        int(computed.sum()),
        is_whole,
        per_step=sampler.groups_per_step(),
    )
    if found.pays and (groups := _groups(documents.__getitems__(drawn), lengths)) is not None:
        computed = index.grouped(groups).computed_tokens(lengths, every, offsets)
        found = replace(found, computed=int(computed.sum()))
    return found


def _groups(rows: Sequence[Mapping[str, Any]], lengths: np.ndarray) -> np.ndarray | None:
    """Return a number for each document, as `tree_row` does; None if all may share.

    Args:
        rows: documents, or packed rows of several.
        lengths: tokens of each document.
    """
    if "labels" not in rows[0]:
        return None
    ids, labels = (np.concatenate([row[name] for row in rows]) for name in ("input_ids", "labels"))
    starts = np.cumsum(lengths) - lengths
    own = np.flatnonzero((labels != ids) & (labels != IGNORE_INDEX))
    document = np.searchsorted(starts, own, side="right") - 1
    document = np.unique(document[own > starts[document]])  # a first token is never a target
    groups = np.zeros(len(lengths), np.int64)
    groups[document] = -1 - np.arange(len(document))
    return groups if len(document) else None
