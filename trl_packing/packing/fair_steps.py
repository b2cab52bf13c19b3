"""Make every optimizer step a fair mixture: steps exchange bins, or documents, of several sources.

    bins of 4 tokens       step 0        step 1        step 2        tokens of b
    at random              aaab aaaa     abbb aabb     aaaa aaaa     1 5 0
    exchanged              aaab aaaa     abbb aaaa     aabb aaaa     1 3 2

Two steps exchange a bin of each if that brings both closer to the shares that sources have of the
tokens of the epoch, and to its mean document length. Only bins of about equal cost change places,
so ranks wait no longer than before. Every document remains equally likely in every full step,
because the rule does not depend on the number of a step.

All numbers are whole, and are added in one order, so every machine finds the same steps.
"""

import numpy as np

_ROUNDS = 48  # in each, a step exchanges at most once
_CANDIDATES = 8  # bins of a step that are compared in a round
_PAIRS_AT_ONCE = 1024  # their comparisons stay in the processor's cache
_MOST_SOURCES = 8  # beside them, all smaller ones count as one source
_MOST_NUMBERS = 1 << 25  # of sources × documents, 256 MiB; above, fewer sources


def excess_of_bins(
    sources: np.ndarray, lengths: np.ndarray, bin_of: np.ndarray, num_bins: int
) -> np.ndarray:
    """Return how far each bin is from a fair one: in the tokens of sources, and in documents.

    A step is fair where the sums of its bins are 0. In the first row are the tokens beyond those of
    as many documents of mean length. The others have the tokens of sources beyond their share of
    the bin, ÷ √share: a small source varies as much as a large one in random steps. The largest
    source is left out, because it has the remaining tokens.

    Args:
        sources: source of each document, ``(documents,)`` integers from 0.
        lengths: tokens of each, ``(documents,)`` integers.
        bin_of: bin of each, ``(documents,)`` integers from 0.
        num_bins: number of bins.

    Returns:
        Whole numbers, (1 + sources, bins) float64, none with a single source.

    Examples:
        >>> sources, lengths = np.array([0, 0, 0, 1]), np.array([4, 1, 4, 3])
        >>> excess_of_bins(sources, lengths, np.array([0, 1, 2, 1]), 3).tolist()
        [[1.0, -2.0, 1.0], [-2.0, 4.0, -2.0]]
    """
    tokens, shares = _tokens_of_sources(sources, lengths, bin_of, num_bins)
    of_bins = tokens.sum(0)
    of_sources = (tokens - shares * of_bins) / np.sqrt(shares)
    mean = lengths.sum(dtype=np.int64) // len(lengths)
    of_documents = of_bins - mean * np.bincount(bin_of, minlength=num_bins)
    return np.rint([of_documents, *of_sources[1:]])[: None if len(shares) > 1 else 0]


def excess_of_documents(sources: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the same of documents: tokens of each source beyond those of a mean document.

    Args:
        sources: source of each document, ``(documents,)`` integers from 0.
        lengths: tokens of each, ``(documents,)`` integers.

    Returns:
        Whole numbers, (sources, documents) float64, none with a single source.
    """
    number = len(lengths)
    tokens, shares = _tokens_of_sources(sources, lengths, np.arange(number), number)
    mean = lengths.sum(dtype=np.int64) / number
    excess = np.rint((tokens - shares * mean) / np.sqrt(shares))
    return excess[: None if len(shares) > 1 else 0]


def _tokens_of_sources(
    sources: np.ndarray, lengths: np.ndarray, parts: np.ndarray, number: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return the tokens of sources, the largest first, in each part, and their shares of all.

    Returns:
        (sources, parts) float64, and (sources, 1) float64. If there are many sources, the smallest
        are one.
    """
    by_size = np.argsort(-np.bincount(sources, lengths), kind="stable")
    rank = np.empty_like(by_size)
    rank[by_size] = np.arange(len(by_size))
    most = min(_MOST_SOURCES, max(_MOST_NUMBERS // number, 1))
    groups = np.minimum(rank, most)[sources]
    num_groups = int(groups.max()) + 1
    tokens = np.bincount(groups * number + parts, lengths, num_groups * number)
    shares = np.bincount(groups, lengths) / lengths.sum(dtype=np.int64)
    return tokens.reshape(num_groups, number), shares[:, None]


def exchange_between_steps(
    order: np.ndarray,
    size: int,
    *,
    excess: np.ndarray,
    keys: np.ndarray,
    rng: np.random.Generator,
) -> np.ndarray:
    """Return `order` with elements exchanged until steps are as fair as they can be made.

    Those of a step are then in the order of their keys. O(rounds × candidates² × steps).

    Args:
        order: bins or documents in the order of training, ``(N,)`` integers.
        size: of them in a step; the last step may have fewer.
        excess: of all bins or documents, as the functions above return it.
        keys: integers; two of equal keys may change places. Each step keeps as many of each key.
        rng: draws the steps and elements that are compared.
    """
    num_steps, nobody = -(-len(order) // size), len(keys)
    if min(num_steps, size) < 2 or not len(excess):
        return order
    # The last step may be shorter; the places that it lacks are filled, and never exchanged.
    steps = np.full(num_steps * size, nobody, order.dtype)
    steps[: len(order)] = order
    steps = steps.reshape(num_steps, size)
    excess = np.pad(excess, ((0, 0), (0, 1)))
    keys = np.append(keys, keys.max() + 1)
    steps = np.take_along_axis(steps, np.argsort(keys[steps], axis=1, kind="stable"), 1)
    sums, half = excess[:, steps].sum(2), num_steps // 2
    for turn in range(_ROUNDS):
        # Steps with too little of a source exchange with those that have too much.
        by_sum = np.argsort(sums[turn % len(sums)], kind="stable")
        pairs = np.stack([rng.permutation(by_sum[:half]), rng.permutation(by_sum[-half:])])
        columns = rng.permutation(size)[:_CANDIDATES]
        for at in range(0, half, _PAIRS_AT_ONCE):
            some = pairs[:, at : at + _PAIRS_AT_ONCE]
            _exchange(steps, sums, some, columns, excess, keys)
    return steps.ravel()[: len(order)]


def _exchange(
    steps: np.ndarray,
    sums: np.ndarray,
    pairs: np.ndarray,
    columns: np.ndarray,
    excess: np.ndarray,
    keys: np.ndarray,
) -> None:
    """Make the best exchange of each pair of steps, in place, if one makes them fairer.

    Args:
        steps: elements of each step, (steps, size).
        sums: their excess, (sources, steps).
        pairs: steps, each at most once, (2, pairs).
        columns: those of `steps` that are compared.
        excess: of all elements, (sources, elements).
        keys: of all elements.
    """
    one, other = pairs
    mine, yours = steps[one][:, columns, None], steps[other][:, None, columns]
    change = np.zeros((len(one), len(columns), len(columns)))  # of Σ excess² of both steps, ÷ 2
    for values, of_steps in zip(excess, sums, strict=True):
        moved = values[yours] - values[mine]
        change += moved * (moved + (of_steps[one] - of_steps[other])[:, None, None])
    change[keys[yours] != keys[mine]] = 0
    changes = change.reshape(len(one), -1)
    best = changes.argmin(1)
    better = np.flatnonzero(changes[np.arange(len(one)), best] < 0)
    one, other, best = one[better], other[better], best[better]
    at_one, at_other = columns[best // len(columns)], columns[best % len(columns)]
    given, taken = steps[one, at_one], steps[other, at_other]
    steps[one, at_one], steps[other, at_other] = taken, given
    moved = excess[:, taken] - excess[:, given]
    sums[:, one] += moved
    sums[:, other] -= moved
