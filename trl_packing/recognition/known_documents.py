"""Finds the documents of this process's packed data sets in the tokens of a call.

    a data set    [5 6 7] [8 9] [4 4 4 4]
    a call        4 4 4 4 8 9         documents of 4 and 2 tokens
                  4 4 4 4 8           the same row, cut at the end
                  4 4 4 4             one document: not packed

A plain trainer does not announce its row, and a worker may have collated it, so the model sees only
its tokens. Documents are looked up by their hash, starting at every end of an earlier document.
"""

import weakref
from dataclasses import dataclass
from typing import Any

import numpy as np

_datasets: "weakref.WeakSet[Any]" = weakref.WeakSet()
_indexes: "weakref.WeakKeyDictionary[Any, _Index]" = weakref.WeakKeyDictionary()

_FACTOR = np.uint64(0x9E3779B97F4A7C15)  # odd, so that it has an inverse modulo 2**64
_INVERSE = np.uint64(pow(0x9E3779B97F4A7C15, -1, 2**64))
_HEAD = 8  # first tokens, by which a cut document is looked up
_MOST_COMPARED = 64  # documents of one length that are compared without an index


@dataclass(frozen=True)
class Found:
    """Documents found at the start of a row.

    Attributes:
        lengths: tokens of each document. The last one may be cut, and includes padding after it
            (a repeated token).
        rest: number of tokens after them that belong to no known document.
    """

    lengths: list[int]
    rest: int = 0


def remember_documents(dataset: Any) -> None:
    """Recognize the documents of `dataset` in calls for as long as it exists.

    Args:
        dataset: a `PackedDataset`, with `lengths`, `token_ids` and `filler_ids`.
    """
    _datasets.add(dataset)


def has_known_documents() -> bool:
    """Whether a packed data set exists in this process."""
    return len(_datasets) > 0


def find_documents(ids: np.ndarray) -> Found:
    """Return the known documents at the start of the row `ids` ``(T,)``.

    Raises:
        ValueError: the row can be divided into documents in two ways.
    """
    datasets = list(_datasets)
    if any(_is_document(dataset, ids) for dataset in datasets):
        return Found([len(ids)])
    found = [_find(_index(dataset), ids) for dataset in datasets]
    return max(found, key=lambda f: (-f.rest, -len(f.lengths)), default=Found([], len(ids)))


def _is_document(dataset: Any, ids: np.ndarray) -> bool:
    """Whether `ids` is a document; False, without comparing, if many documents have its length."""
    same = np.flatnonzero(dataset.lengths == len(ids))
    return len(same) <= _MOST_COMPARED and any(
        np.array_equal(dataset.token_ids(int(i)), ids) for i in same
    )


# --- the index of a data set ----------------------------------------------------------------------


class _Index:
    """Sorted hashes of all documents of a data set, and the first tokens of each document."""

    def __init__(self, dataset: Any):
        self.dataset = weakref.ref(dataset)
        number = len(dataset.lengths)
        self.hashes = np.empty(number + 1, dtype=np.uint64)
        self.heads = np.full((number, _HEAD), -1, dtype=np.int64)
        self.hashes[number] = _prefix_hashes(dataset.filler_ids)[-1]
        for i in range(number):
            ids = dataset.token_ids(i)
            self.hashes[i] = _prefix_hashes(ids)[-1]
            self.heads[i, : len(ids)] = ids[:_HEAD]
        self.hashes.sort()

    def ends(self, prefixes: np.ndarray, start: int) -> list[int]:
        """Return the ends of documents that start at `start`.

        Args:
            prefixes: prefix hashes of the row, ``(T + 1,)`` uint64.
            start: position in the row.
        """
        back = _powers(_INVERSE, start + 1)[-1]
        hashes = (prefixes[start + 1 :] - prefixes[start]) * back
        at = np.searchsorted(self.hashes, hashes).clip(max=len(self.hashes) - 1)
        return (np.flatnonzero(self.hashes[at] == hashes) + start + 1).tolist()

    def is_cut(self, ids: np.ndarray) -> bool:
        """Whether any document starts with `ids`."""
        head = ids[:_HEAD]
        dataset: Any = self.dataset()
        candidates = np.flatnonzero((self.heads[:, : len(head)] == head).all(1))
        return any(np.array_equal(dataset.token_ids(int(i))[: len(ids)], ids) for i in candidates)


def _index(dataset: Any) -> _Index:
    if dataset not in _indexes:
        _indexes[dataset] = _Index(dataset)
    return _indexes[dataset]


def _powers(base: np.uint64, number: int) -> np.ndarray:
    powers = np.full(number, base, dtype=np.uint64)
    powers[:1] = 1
    return np.cumprod(powers, dtype=np.uint64)  # modulo 2**64


def _prefix_hashes(ids: np.ndarray) -> np.ndarray:
    """Return Σ f(id) · factorⁱ over each prefix of `ids`, ``(T + 1,)`` uint64, modulo 2⁶⁴."""
    mixed = (ids.astype(np.uint64) + np.uint64(1)) * np.uint64(0xBF58476D1CE4E5B9)
    mixed ^= mixed >> np.uint64(31)
    mixed *= np.uint64(0x94D049BB133111EB)
    terms = (mixed ^ (mixed >> np.uint64(29))) * _powers(_FACTOR, len(ids))
    return np.concatenate([np.zeros(1, np.uint64), np.cumsum(terms, dtype=np.uint64)])


# --- the documents of a row -----------------------------------------------------------------------


def _find(index: _Index, ids: np.ndarray) -> Found:
    prefixes, total = _prefix_hashes(ids), len(ids)
    # By end of a document: number of ways to divide the row up to it, and start of the document.
    ways, before = {0: 1}, {0: 0}
    for start in range(total):
        if start not in ways:
            continue
        for end in index.ends(prefixes, start):
            ways[end] = ways.get(end, 0) + ways[start]
            before[end] = start
            if start == 0 and end == total:
                return Found([total])
    if total in ways:
        return Found(_lengths(ways, before, total))
    if index.is_cut(ids):
        return Found([total])
    cuts = [start for start in sorted(ways) if start and index.is_cut(ids[start:])]
    last = max(ways)
    if cuts:
        if len(cuts) > 1:
            raise ValueError(_TWO_WAYS)
        return Found([*_lengths(ways, before, cuts[0]), total - cuts[0]])
    if last and (ids[last:] == ids[last]).all():
        *lengths, longest = _lengths(ways, before, last)
        return Found([*lengths, longest + total - last])
    return Found(_lengths(ways, before, last), total - last)


_TWO_WAYS = (
    "the tokens of a call can be divided into documents of the PackedDataset in two ways; call the "
    "model with the attention_mask of the batch, which numbers the documents"
)


def _lengths(ways: dict[int, int], before: dict[int, int], end: int) -> list[int]:
    if ways[end] > 1:
        raise ValueError(_TWO_WAYS)
    lengths: list[int] = []
    while end:
        lengths.insert(0, end - before[end])
        end = before[end]
    return lengths
