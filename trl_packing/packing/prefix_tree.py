"""One row of documents in which the tokens that they begin with stand once.

    documents       A: S S S Q Q a a a      B: S S S Q Q b b      C: S S S R R c
    row             S S S Q Q a a a | Q b b | S R R c
    position_ids    0 1 2 3 4 5 6 7   4 5 6   2 3 4 5
    C sees          S S _ _ _ _ _ _   _ _ _   S R R c

The row is the depth-first order of the prefix tree of the documents ("Tree Training", arXiv
2511.00413). A position has one label, the next token, so the last common token stands in the row
once for each branch; only its first copy is a target. The weight of a target is the sum of its
weights in all documents. Loss and gradients are those of the documents apart.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Any

import numpy as np
import torch

from trl_packing.documents.boundaries import document_ids_from_lengths
from trl_packing.documents.host_row import HostRow
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
    TARGET_COUNTS,
    TOKEN_WEIGHTS,
)
from trl_packing.packing.bins import ranges
from trl_packing.packing.prefix_index import MIN_SHARED, shared_depths


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The row of N documents with shared prefixes: T tokens of documents, T' in the row."""

    order: np.ndarray  # document of each run of the row, (N,): the documents in sorted order
    starts: np.ndarray  # rows at which the runs start, (N + 1,); a document may have an empty run
    depths: np.ndarray  # tokens that each run shares with those before it, (N,)
    offsets: np.ndarray  # tokens before each document, (N + 1,)
    tokens: np.ndarray  # the token of the documents that stands in each row, (T',) int64
    targets: np.ndarray  # the row of each token of the documents as a target, (T,) int64
    cu_seqlens: np.ndarray  # boundaries of the segments, (S + 1,) int32
    cu_seqlens_k: np.ndarray  # boundaries of the keys of each segment, (S + 1,) int32
    key_index: np.ndarray  # rows of all keys, segment by segment, (K,) int64
    position_ids: np.ndarray  # (T',) int64

    def as_row(self, values: np.ndarray) -> np.ndarray:
        """Return values ``(T,)`` of the documents' tokens as a row ``(T',)``."""
        return values[self.tokens]

    def sum_targets(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum ``(T',)`` float64 of the weights ``(T,)`` of each row as a target."""
        weights = weights.astype(np.float64)
        # The first token of a document is no target.
        weights[self.offsets[:-1][np.diff(self.offsets) > 0]] = 0
        return np.bincount(self.targets, weights, minlength=len(self.tokens))


def build_prefix_tree(documents: Sequence[np.ndarray], *, min_shared: int = 1) -> PrefixTree:
    """Return the row of `documents`.

    Args:
        documents: token ids of each document, 1-D integers.
        min_shared: documents share at least so many tokens, or none.

    Examples:
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> tree.as_row(np.array([7, 8, 9, 1, 7, 8, 9, 2])).tolist()
        [7, 8, 9, 1, 9, 2]
        >>> tree.position_ids.tolist()
        [0, 1, 2, 3, 2, 3]
    """
    keys = [document.astype(">i8").tobytes() for document in documents]
    order = np.array(sorted(range(len(documents)), key=keys.__getitem__), np.int64)
    offsets = np.cumsum([0, *map(len, documents)])
    lengths = np.diff(offsets)[order]
    common = [0]
    for before, document in pairwise(documents[i] for i in order):
        length = min(len(before), len(document))
        common.append(int(np.append(before[:length] != document[:length], True).argmax()))
    depths = shared_depths(np.array(common), np.append(0, lengths[:-1]), min_shared)
    starts = np.append(0, np.cumsum(lengths - depths))
    # The rows of each document, run by run, and those of its tokens as targets.
    path = np.zeros(lengths.max(initial=0), np.int64)
    target = path.copy()
    targets = np.empty(offsets[-1], np.int64)
    paths = []
    branches = []
    before = 0
    runs = zip(order.tolist(), lengths.tolist(), depths.tolist(), starts.tolist(), strict=False)
    for document, length, depth, start in runs:
        if depth:
            branches.append(path[depth - 1] + 1)
        path[depth:length] = np.arange(start, start + length - depth)
        # A branch repeats its first token, which is a target where it stood first.
        own = depth + (0 < depth < before)
        target[own:length] = path[own:length]
        targets[offsets[document] : offsets[document] + length] = target[:length]
        paths.append(path[:length].copy())
        before = length
    # Segments start at runs, and behind rows where a run branches.
    cuts = np.unique(np.concatenate([starts, np.array(branches, np.int64)]))
    run = np.searchsorted(starts, cuts[:-1], side="right") - 1
    num_keys = depths[run] + cuts[1:] - starts[run]
    keys = [paths[i][:number] for i, number in zip(run.tolist(), num_keys.tolist(), strict=True)]
    return PrefixTree(
        order=order,
        starts=starts,
        depths=depths,
        offsets=offsets,
        tokens=ranges(offsets[order] + depths, lengths - depths),
        targets=targets,
        cu_seqlens=cuts.astype(np.int32),
        cu_seqlens_k=np.append(0, np.cumsum(num_keys)).astype(np.int32),
        key_index=np.concatenate([*keys, path[:0]]),
        position_ids=ranges(depths, lengths - depths),
    )


def share_prefixes(
    flat: Mapping[str, np.ndarray], lengths: Sequence[int], sources: np.ndarray | None = None
) -> tuple[dict[str, Any], HostRow] | None:
    """Return the batch of a row with common prefixes once, and its numbers; None without any.

    Args:
        flat: `input_ids`, `labels` and maybe `loss_weights` of the documents, ``(T,)`` each.
        lengths: tokens of each document, all above 0.
        sources: the source of each document, ``(N,)`` int64; None if they are not told apart.
    """
    tree = tree_of_row(flat, lengths)
    if tree is None:
        return None
    ids = tree.as_row(flat["input_ids"])
    counts = tree.sum_targets(flat["labels"] != IGNORE_INDEX)
    weights = tree.sum_targets(flat[TOKEN_WEIGHTS]) if TOKEN_WEIGHTS in flat else counts
    segments = torch.from_numpy(np.diff(tree.cu_seqlens).astype(np.int64))
    longest = int(segments.max())
    values = {
        "input_ids": ids,
        "labels": np.where(counts > 0, ids, IGNORE_INDEX),
        TOKEN_WEIGHTS: weights.astype(np.float32),
        TARGET_COUNTS: counts.astype(np.int64),
        "position_ids": tree.position_ids,
    }
    batch: dict[str, Any] = {name: torch.from_numpy(of)[None] for name, of in values.items()} | {
        "cu_seq_lens_q": torch.from_numpy(tree.cu_seqlens),
        "cu_seq_lens_k": torch.from_numpy(tree.cu_seqlens_k),
        "key_index": torch.from_numpy(tree.key_index),
        "max_length_q": longest,
        "max_length_k": int(np.diff(tree.cu_seqlens_k).max()),
        "seq_idx": document_ids_from_lengths(segments).to(torch.int32)[None],
        "use_cache": False,
    }
    if sources is not None:
        batch |= _targets_by_source(tree, flat, np.repeat(sources, lengths))
    return batch, HostRow(
        tree.cu_seqlens.astype(np.int64),
        counts > 0,
        padding=0,
        lengths=np.asarray(lengths, np.int64),
        num_trained=int(counts.sum()),
        max_length=longest,
        sources=sources,
    )


def tree_of_row(flat: Mapping[str, np.ndarray], lengths: Sequence[int]) -> PrefixTree | None:
    """Return the tree of the documents of a row; arguments and None as of `share_prefixes`."""
    labels = flat["labels"]
    ids = np.split(flat["input_ids"], np.cumsum(lengths)[:-1])
    # A quick look: rows without common prefixes end here.
    if len({document[:MIN_SHARED].tobytes() for document in ids}) == len(ids):
        return None
    if ((labels != IGNORE_INDEX) & (labels != flat["input_ids"])).any():  # targets would be merged
        return None
    tree = build_prefix_tree(ids, min_shared=MIN_SHARED)
    return tree if tree.depths.any() else None


def _targets_by_source(
    tree: PrefixTree, flat: Mapping[str, np.ndarray], sources: np.ndarray
) -> dict[str, torch.Tensor]:
    """Return the K targets of each source: documents of several may train one position.

    `sources` are those of the tokens of documents, ``(T,)`` int64.
    """
    trained = np.flatnonzero(flat["labels"] != IGNORE_INDEX)
    number = 1 + int(sources.max())
    keys = tree.targets[trained] * number + sources[trained]
    keys, found = np.unique(keys, return_inverse=True)
    places, ids = np.divmod(keys, number)
    weights = flat[TOKEN_WEIGHTS][trained] if TOKEN_WEIGHTS in flat else None
    sums = [np.bincount(found, each) for each in (weights, None)]
    return {
        SOURCE_IDS: torch.from_numpy(ids)[None],
        SOURCE_PLACES: torch.from_numpy(places)[None],
        SOURCE_WEIGHTS: torch.from_numpy(np.stack(sums).astype(np.float32)),
    }
