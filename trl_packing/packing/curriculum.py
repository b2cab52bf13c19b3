"""An epoch in stages: documents in the order of a number, such as their length.

    numbers        3  9  4  1  8  5         length, difficulty, ...
    stages         0  2  1  0  2  1         of about equally many tokens
    an epoch       3 1 | 4 5 | 9 8          stage after stage, each in a random order

Within a stage, documents are drawn, packed and balanced as in an epoch without stages. A document
is in the same stage in every epoch; which of several documents with equal numbers come first is
drawn once, from the seed. So all epochs have equally many bins.
"""

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.packing.bins import PackingPlan

#: The value of the setting `curriculum` that orders by tokens.
LENGTH = "length"

# More stages are closer to a sorted epoch. Fewer have fuller bins: one of a stage may stay half
# empty.
_MOST_STAGES, _BINS_OF_A_STAGE = 64, 64


def column_of(curriculum: str) -> str:
    """Return the column, or "length", that a curriculum names; a minus before it may turn it."""
    return curriculum.removeprefix("-")


def numbers_of(documents: ArrowDocuments, curriculum: str) -> np.ndarray:
    """Return the number of each document, ``(documents,)``.

    Args:
        documents: the training set.
        curriculum: "length", or a column of `documents.dataset` with a number for each; a minus
            before it says that the largest come first.

    Raises:
        ValueError: there is no such column, or it does not hold numbers.
    """
    name = column_of(curriculum)
    if name == LENGTH:
        return documents.lengths()
    dataset = documents.dataset
    if name not in dataset.column_names:
        raise ValueError(
            f"curriculum={curriculum!r}, but the training set has no such column: it has "
            f"{dataset.column_names}; name one of them, or set curriculum='length'"
        )
    column: Any = dataset.data.column(name)
    stored = column.to_numpy()
    if stored.dtype.kind not in "iufb":
        raise ValueError(
            f"curriculum={curriculum!r} holds {column.type}, but documents are ordered by numbers; "
            "name another column, or set curriculum='length'"
        )
    numbers = stored[documents.stored_rows(np.arange(len(documents)))]
    if np.isnan(numbers).any():
        row = int(np.argmax(np.isnan(numbers)))
        raise ValueError(
            f"document {row} of the training set has no {name!r} (it is null or NaN), which "
            "curriculum names; fill it in, or drop the row"
        )
    return numbers


def stages_of(
    numbers: np.ndarray,
    lengths: np.ndarray,
    *,
    capacity: int | None,
    descending: bool = False,
    seed: int = 0,
) -> np.ndarray:
    """Return the stage of each document, ``(documents,)`` int64 from 0.

    Args:
        numbers: by which documents are ordered, ``(documents,)``.
        lengths: tokens of each, ``(documents,)`` integers.
        capacity: tokens that a bin may hold; None where nothing is packed into bins.
        descending: the largest number comes first.
        seed: draws the order of documents with equal numbers.

    Examples:
        >>> stages_of(np.array([3, 9, 4, 1]), np.array([5, 5, 5, 5]), capacity=None).tolist()
        [16, 48, 32, 0]
    """
    tokens, most = int(lengths.sum()), _MOST_STAGES
    if capacity is not None:
        most = min(most, max(tokens // (capacity * _BINS_OF_A_STAGE), 2))
    drawn = np.random.default_rng(seed).permutation(len(numbers))
    ranked = np.unique(numbers, return_inverse=True)[1].ravel()  # also of infinite numbers
    order = drawn[np.argsort((-ranked if descending else ranked)[drawn], kind="stable")]
    before = np.cumsum(lengths[order], dtype=np.int64) - lengths[order]
    stages = np.empty(len(numbers), np.int64)
    stages[order] = before * most // max(tokens, 1)
    return stages


def pack_stages(
    stages: np.ndarray,
    pack_part: Callable[[np.ndarray, Sequence[int] | None], PackingPlan],
    seed: tuple[int, int] | None,
) -> PackingPlan:
    """Return a plan whose bins hold documents of one stage, stage after stage.

    Args:
        stages: of each document, ``(documents,)`` integers.
        pack_part: returns the bins of some documents, counted from 0, given their numbers and a
            seed.
        seed: of the epoch; None keeps the order of the data set.
    """
    indices, sizes, tokens = [], [], []
    for stage in np.unique(stages).tolist():
        members = np.flatnonzero(stages == stage)
        plan = pack_part(members, None if seed is None else (*seed, stage))
        indices.append(members[plan.indices])
        sizes.append(np.diff(plan.offsets))
        tokens.append(plan.tokens)
    offsets = np.concatenate([[0], np.cumsum(np.concatenate(sizes))])
    return PackingPlan(np.concatenate(indices), offsets, np.concatenate(tokens), plan.capacity)
