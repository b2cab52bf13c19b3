"""One row of documents in which the tokens that they begin with stand once.

    documents       A: S S S Q Q a a a      B: S S S Q Q b b      C: S S S R R c
    row             S S S Q Q a a a | Q b b | S R R c
    position_ids    0 1 2 3 4 5 6 7   4 5 6   2 3 4 5
    C sees          S S _ _ _ _ _ _   _ _ _   S R R c

Documents are sorted, and each adds to the row the tokens that it does not share with the document
before it. A position has one label, the next token. Documents that differ in their next token do
not share a position, so the last common token stands in the row once for each branch; only its
first copy is a target. The weight of a target is the sum of its weights in all documents.

The row is the depth-first order of the prefix tree of the documents. "Tree Training" (arXiv
2511.00413) computes agent trajectories this way.

A packed row of such documents is made from the row of the same documents apart:

    apart        input_ids, labels, loss_weights, ...      (1, T)    a document after another
    shared       the same keys, fewer tokens               (1, T')
                 loss_weights                              sums over the documents at a position
                 target_counts                             documents that train a position
                 source_ids, _places, _weights             the targets of each source
                 cu_seq_lens_k, key_index                  the keys of each segment

Loss and gradients of both rows are the same.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any, NamedTuple

import numpy as np
import torch

from trl_packing.documents.boundaries import document_ids_from_lengths
from trl_packing.documents.host_row import HostRow, TreeNumbers
from trl_packing.documents.labels import (
    IGNORE_INDEX,
    SOURCE_IDS,
    SOURCE_PLACES,
    SOURCE_WEIGHTS,
    TARGET_COUNTS,
    TOKEN_WEIGHTS,
)
from trl_packing.packing.bins import ranges
from trl_packing.packing.prefix_index import MIN_SHARED


@dataclass(frozen=True, eq=False)
class PrefixTree:
    """The row of N documents with shared prefixes: T tokens of documents, T' in the row.

    Tokens of documents are counted through all of them, as given.

    Attributes:
        order: document of each run of the row, ``(N,)``: the documents in sorted order.
        starts: rows at which the runs start, ``(N + 1,)``; a document may have an empty run.
        depths: tokens that each run shares with those before it, ``(N,)``.
        offsets: tokens before each document, ``(N + 1,)``.
        tokens: the token of the documents that stands in each row, ``(T',)`` int64.
        targets: the row of each token of the documents as a target, ``(T,)`` int64.
        cu_seqlens: boundaries of the segments, ``(S + 1,)`` int32.
        cu_seqlens_k: boundaries of the keys of each segment, ``(S + 1,)`` int32.
        key_index: rows of all keys, segment by segment, ``(K,)`` int64.
        position_ids: ``(T',)`` int64.
    """

    order: np.ndarray
    starts: np.ndarray
    depths: np.ndarray
    offsets: np.ndarray
    tokens: np.ndarray
    targets: np.ndarray
    cu_seqlens: np.ndarray
    cu_seqlens_k: np.ndarray
    key_index: np.ndarray
    position_ids: np.ndarray

    def place(self, values: np.ndarray) -> np.ndarray:
        """Return values ``(T,)`` of the documents' tokens as a row ``(T',)``."""
        return values[self.tokens]

    def sum_targets(self, weights: np.ndarray) -> np.ndarray:
        """Return the sum ``(T',)`` float64 of the weights ``(T,)`` of each row as a target."""
        weights = weights.astype(np.float64)
        # The first token of a document is no target.
        weights[self.offsets[:-1][np.diff(self.offsets) > 0]] = 0
        return np.bincount(self.targets, weights, minlength=len(self.tokens))


def build_prefix_tree(
    documents: Sequence[np.ndarray], *, groups: Sequence[int] | None = None, min_shared: int = 1
) -> PrefixTree:
    """Return the row of `documents`.

    Args:
        documents: token ids of each document, 1-D integers.
        groups: a number for each document, ``(N,)``; only documents of one group share.
        min_shared: documents share at least so many tokens, or none.

    Examples:
        >>> tree = build_prefix_tree([np.array([7, 8, 9, 1]), np.array([7, 8, 9, 2])])
        >>> tree.place(np.array([7, 8, 9, 1, 7, 8, 9, 2])).tolist()
        [7, 8, 9, 1, 9, 2]
        >>> tree.position_ids.tolist()
        [0, 1, 2, 3, 2, 3]
    """
    order, depths = _sort(documents, [0] * len(documents) if groups is None else groups, min_shared)
    sizes = np.fromiter(map(len, documents), np.int64, len(documents))
    offsets = np.concatenate([[0], np.cumsum(sizes)])
    lengths = sizes[order]
    starts = np.concatenate([[0], np.cumsum(lengths - depths)])
    # A branch repeats its first token, which is a target where it stood first.
    before = np.concatenate([[0], lengths[:-1]])
    repeats = (lengths > depths) & (depths > 0) & (depths < before)
    cu_seqlens, cu_seqlens_k, key_index = _segments(starts, depths)
    run_of = np.argsort(order)  # of each document
    return PrefixTree(
        order=order,
        starts=starts,
        depths=depths,
        offsets=offsets,
        tokens=ranges(offsets[order] + depths, lengths - depths),
        targets=_Paths(starts, depths, depths + repeats).rows(run_of, sizes),
        cu_seqlens=cu_seqlens.astype(np.int32),
        cu_seqlens_k=cu_seqlens_k.astype(np.int32),
        key_index=key_index,
        position_ids=ranges(depths, lengths - depths),
    )


def _sort(
    documents: Sequence[np.ndarray], groups: Sequence[int], min_shared: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the order of documents, and how many tokens each takes from the path before it."""
    keys = [document.astype(">i8").tobytes() for document in documents]
    order = sorted(range(len(documents)), key=lambda d: (groups[d], keys[d]))
    depths = np.zeros(len(documents), np.int64)
    first = 8 * min_shared  # bytes
    for i, (before, document) in enumerate(pairwise(order), 1):
        if groups[document] == groups[before] and keys[document][:first] == keys[before][:first]:
            common = common_length(documents[before], documents[document])
            # A document that ends has no next token to disagree about.
            depth = common if common == len(documents[before]) else common - 1
            depths[i] = depth if depth >= min_shared else 0
    return np.array(order, np.int64), depths


def common_length(a: np.ndarray, b: np.ndarray) -> int:
    """Return the number of tokens with which both begin."""
    length = min(len(a), len(b))
    differ = a[:length] != b[:length]
    first = int(differ.argmax()) if length else 0
    return first if length and differ[first] else length


class _Paths:
    """The rows of each run's document, in pieces of consecutive rows.

    A run stands at the end of its path, behind the first tokens of the path before it.

    Args:
        starts: rows at which the runs start, ``(N + 1,)``.
        depths: the depth of each run's first row, ``(N,)``.
        begins: the depth from which a run replaces the path before it, ``(N,)``.
    """

    def __init__(self, starts: np.ndarray, depths: np.ndarray, begins: np.ndarray):
        stack: list[tuple[int, int]] = []  # depth at which a piece begins, row minus depth
        pieces: list[tuple[int, int]] = []
        numbers = [0]
        for begin, shift in zip(begins.tolist(), (starts[:-1] - depths).tolist(), strict=True):
            while stack and stack[-1][0] >= begin:
                stack.pop()
            if not stack or stack[-1][1] != shift:
                stack.append((begin, shift))
            pieces += stack
            numbers.append(len(pieces))
        self.begins, self.shifts = np.array(pieces, np.int64).reshape(-1, 2).T
        self.first = np.array(numbers)  # piece of each run

    def rows(self, runs: np.ndarray, lengths: np.ndarray) -> np.ndarray:
        """Return the rows of the first `lengths` tokens of the paths of `runs`, one by one."""
        numbers = self.first[runs + 1] - self.first[runs]
        at = ranges(self.first[runs], numbers)
        ends = np.append(self.begins[1:], 0)
        ends[self.first[1:] - 1] = np.iinfo(np.int64).max
        begins = self.begins[at]
        sizes = np.maximum(np.minimum(ends[at], np.repeat(lengths, numbers)) - begins, 0)
        return ranges(self.shifts[at] + begins, sizes)

    def row(self, runs: np.ndarray, depths: np.ndarray) -> np.ndarray:
        """Return the row at a depth of the path of each of `runs`."""
        run_of = np.repeat(np.arange(len(self.first) - 1), np.diff(self.first))
        scale = 1 + max(self.begins.max(initial=0), depths.max(initial=0))
        at = np.searchsorted(run_of * scale + self.begins, runs * scale + depths, side="right") - 1
        return self.shifts[at] + depths


def _segments(starts: np.ndarray, depths: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return boundaries of segments and of their keys, and the rows of the keys.

    Segments start at runs, and behind rows where a run branches.
    """
    paths = _Paths(starts, depths, depths)
    inner = np.flatnonzero(depths)
    cuts = np.unique(np.concatenate([starts, paths.row(inner, depths[inner] - 1) + 1]))
    runs = np.searchsorted(starts, cuts[:-1], side="right") - 1
    sizes = depths[runs] + cuts[1:] - starts[runs]
    return cuts, np.concatenate([[0], np.cumsum(sizes)]), paths.rows(runs, sizes)


# --- rows -------------------------------------------------------------------------------------


class TreeRow(NamedTuple):
    """Tensors of a row with shared prefixes by name, and its numbers."""

    batch: dict[str, Any]
    host: HostRow


def share_prefixes(
    batch: dict[str, Any],
    lengths: Sequence[int],
    padding: int,
    pad_token_id: int,
    sources: np.ndarray | None = None,
) -> TreeRow | None:
    """Return the row of `batch` with its common prefixes once; None if there are none.

    Args:
        batch: a row of documents, and no padding: `input_ids`, `labels` and maybe `loss_weights`,
            ``(1, T)``.
        lengths: tokens of each document, all above 0.
        padding: T' is a multiple of it.
        pad_token_id: token id of the padding.
        sources: the source of each document, ``(N,)`` int64; None if they are not told apart.
    """
    tree = tree_of_row(batch, lengths)
    if tree is None:
        return None
    flat, tail = _flat(batch), -int(tree.starts[-1]) % padding
    row = _row(tree, flat, lengths, tail, pad_token_id)
    if sources is None:
        return row
    of_tokens = np.repeat(sources, lengths)
    by_source = _targets_by_source(tree, flat, of_tokens)
    return TreeRow(row.batch | by_source, replace(row.host, sources=sources))


def tree_of_row(batch: dict[str, Any], lengths: Sequence[int]) -> PrefixTree | None:
    """Return the tree of the documents of `batch`; arguments and None as of `share_prefixes`."""
    flat, bounds = _flat(batch), np.cumsum([0, *lengths])
    ids = [flat["input_ids"][a:b] for a, b in pairwise(bounds.tolist())]
    groups = _groups(flat, bounds[:-1])
    # A quick look: rows without common prefixes end here.
    begins = {(group, x[:MIN_SHARED].tobytes()) for group, x in zip(groups, ids, strict=True)}
    if len(begins) == len(ids):
        return None
    tree = build_prefix_tree(ids, groups=groups, min_shared=MIN_SHARED)
    return None if tree.starts[-1] == bounds[-1] else tree


def _flat(batch: dict[str, Any]) -> dict[str, np.ndarray]:
    """Return the tensors of a row that have a value for each token, ``(T,)``."""
    return {name: x[0].numpy() for name, x in batch.items() if torch.is_tensor(x) and x.ndim == 2}


def _groups(flat: dict[str, np.ndarray], starts: np.ndarray) -> list[int]:
    """Return a number for each document; documents with the same number may share."""
    labels = flat["labels"]
    is_plain = (labels == flat["input_ids"]) | (labels == IGNORE_INDEX)
    may_share = np.logical_and.reduceat(is_plain, starts)
    return np.where(may_share, 0, -1 - np.arange(len(starts))).tolist()


def _row(
    tree: PrefixTree, flat: dict[str, np.ndarray], lengths: Sequence[int], tail: int, pad: int
) -> TreeRow:
    counts = tree.sum_targets(flat["labels"] != IGNORE_INDEX)
    ids = tree.place(flat["input_ids"])
    # A document with labels of its own shares nothing, so its labels are on its path.
    labels = np.where(counts > 0, tree.place(flat["labels"]), IGNORE_INDEX)
    labels = np.where((counts > 0) & (labels == IGNORE_INDEX), ids, labels)
    weights = flat.get(TOKEN_WEIGHTS)
    sums = counts if weights is None else tree.sum_targets(weights)
    values = {  # each with that of the padding
        "input_ids": (ids, np.full(tail, pad)),
        "labels": (labels, np.full(tail, IGNORE_INDEX)),
        TOKEN_WEIGHTS: (sums.astype(np.float32), np.zeros(tail)),
        TARGET_COUNTS: (counts.astype(np.int64), np.zeros(tail)),
        "position_ids": (tree.position_ids, np.arange(tail)),
    }
    batch: dict[str, Any] = {
        name: torch.from_numpy(np.concatenate([real, behind.astype(real.dtype)]))[None]
        for name, (real, behind) in values.items()
    }
    cu_seqlens, cu_seqlens_k, key_index = tree.cu_seqlens, tree.cu_seqlens_k, tree.key_index
    if tail:
        total = len(ids) + tail
        cu_seqlens = np.append(cu_seqlens, np.int32(total))
        cu_seqlens_k = np.append(cu_seqlens_k, np.int32(len(key_index) + tail))
        key_index = np.append(key_index, np.arange(len(ids), total))
    segments = torch.from_numpy(np.diff(cu_seqlens).astype(np.int64))
    longest, most_keys = int(segments.max()), int(np.diff(cu_seqlens_k).max())
    batch |= {
        "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
        "cu_seq_lens_k": torch.from_numpy(cu_seqlens_k),
        "key_index": torch.from_numpy(key_index),
        "max_length_q": longest,
        "max_length_k": most_keys,
        "seq_idx": document_ids_from_lengths(segments).to(torch.int32)[None],
        "use_cache": False,
    }
    keys = np.diff(tree.cu_seqlens_k).astype(np.int64)
    documents = np.asarray(lengths, np.int64)
    numbers = TreeNumbers(documents, int(counts.sum()), most_keys, keys)
    is_trained = batch["labels"][0].numpy() != IGNORE_INDEX
    return TreeRow(batch, HostRow(cu_seqlens.astype(np.int64), is_trained, tail, longest, numbers))


def _targets_by_source(
    tree: PrefixTree, flat: dict[str, np.ndarray], sources: np.ndarray
) -> dict[str, torch.Tensor]:
    """Return the K targets of each source: documents of several may train one position.

    Args:
        tree: the row.
        flat: the tokens of its documents, ``(T,)`` each.
        sources: of each token, ``(T,)`` int64.
    """
    trained = np.flatnonzero(flat["labels"] != IGNORE_INDEX)
    number = 1 + int(sources.max())
    keys = tree.targets[trained] * number + sources[trained]
    keys, found = np.unique(keys, return_inverse=True)
    places, ids = np.divmod(keys, number)
    weights = flat[TOKEN_WEIGHTS][trained] if TOKEN_WEIGHTS in flat else None
    sums = [np.bincount(found, w, minlength=len(ids)) for w in (weights, None)]
    return {
        SOURCE_IDS: torch.from_numpy(ids)[None],
        SOURCE_PLACES: torch.from_numpy(places)[None],
        SOURCE_WEIGHTS: torch.from_numpy(np.stack(sums).astype(np.float32)),
    }
