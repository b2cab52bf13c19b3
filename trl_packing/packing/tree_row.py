"""A packed row whose documents share prefixes, made from the row of the same documents apart.

    apart        input_ids, labels, loss_weights, ...      (1, T)    a document after another
    shared       the same keys, fewer tokens               (1, T')   `prefix_tree.py`
                 loss_weights                              sums over the documents at a position
                 target_counts                             documents that train a position
                 source_ids, _places, _weights             the targets of each source
                 cu_seq_lens_k, key_index                  the keys of each segment

Loss and gradients of both rows are the same.
"""

from collections.abc import Sequence
from dataclasses import replace
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
from trl_packing.packing.prefix_index import MIN_SHARED
from trl_packing.packing.prefix_tree import PrefixTree, build_prefix_tree


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
    row = _values(tree, flat, pad)
    tensors = {name: _padded(values, tail, fill) for name, (values, fill) in row.items()}
    total = len(tree.tokens) + tail
    cu_seqlens, cu_seqlens_k, key_index = tree.cu_seqlens, tree.cu_seqlens_k, tree.key_index
    if tail:
        cu_seqlens = np.append(cu_seqlens, np.int32(total))
        cu_seqlens_k = np.append(cu_seqlens_k, np.int32(len(key_index) + tail))
        key_index = np.append(key_index, np.arange(len(tree.tokens), total))
    segments = torch.from_numpy(np.diff(cu_seqlens).astype(np.int64))
    longest, most_keys = int(segments.max()), int(np.diff(cu_seqlens_k).max())
    batch = tensors | {
        "cu_seq_lens_q": torch.from_numpy(cu_seqlens),
        "cu_seq_lens_k": torch.from_numpy(cu_seqlens_k),
        "key_index": torch.from_numpy(key_index),
        "max_length_q": longest,
        "max_length_k": most_keys,
        "seq_idx": document_ids_from_lengths(segments).to(torch.int32)[None],
        "use_cache": False,
    }
    host = HostRow(
        cu_seqlens.astype(np.int64),
        tensors["labels"][0].numpy() != IGNORE_INDEX,
        tail,
        longest,
        TreeNumbers(
            np.asarray(lengths, np.int64),
            int(row[TARGET_COUNTS][0].sum()),
            most_keys,
            np.diff(tree.cu_seqlens_k).astype(np.int64),
        ),
    )
    return TreeRow(batch, host)


def _values(
    tree: PrefixTree, flat: dict[str, np.ndarray], pad: int
) -> dict[str, tuple[np.ndarray, int | None]]:
    """Return the values of the tokens of a row ``(T',)``, each with those of its padding."""
    counts = tree.sum_targets(flat["labels"] != IGNORE_INDEX)
    ids = tree.place(flat["input_ids"])
    # A document with labels of its own shares nothing, so its labels are on its path.
    labels = np.where(counts > 0, tree.place(flat["labels"]), IGNORE_INDEX)
    labels = np.where((counts > 0) & (labels == IGNORE_INDEX), ids, labels)
    weights = flat.get(TOKEN_WEIGHTS)
    sums = counts if weights is None else tree.sum_targets(weights)
    return {
        "input_ids": (ids, pad),
        "labels": (labels, IGNORE_INDEX),
        TOKEN_WEIGHTS: (sums.astype(np.float32), 0),
        TARGET_COUNTS: (counts.astype(np.int64), 0),
        "position_ids": (tree.position_ids, None),
    }


def _padded(values: np.ndarray, tail: int, fill: int | None) -> torch.Tensor:
    """Return values as ``(1, T')``; without `fill`, the padding counts from 0."""
    behind = np.arange(tail) if fill is None else np.full(tail, fill)
    return torch.from_numpy(np.concatenate([values, behind.astype(values.dtype)]))[None]


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
