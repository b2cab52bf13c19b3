"""Exchange documents between bins, so that two seeds share no more pairs than chance would give.

If few documents have equal lengths, best-fit decreasing gives nearly the same bins for every seed.

    tails exchanged between two bins        5 3 | 2 1    →    5 3 | 3        cut where both hold
    that are cut at the same place          6 2 | 3           6 2 | 2 1      8 tokens
"""

import numpy as np

# In sets this large, enough documents share a length. Smaller sets get more rounds: 2 at 1M
# documents, 8 at 200k; the smallest get fewer, because windows of a stream are planned often.
_REMIX_BELOW = 5_000_000
_MAX_ROUNDS = 40
_SMALL, _MAX_ROUNDS_OF_SMALL = 1000, 12

# Cuts that are tried for each bin, and how often bins without a partner look for one.
_CUTS_PER_BIN = 1.5
_MATCHINGS = 2


def remix(sizes: np.ndarray, bin_of: np.ndarray, capacity: int, rng: np.random.Generator) -> None:
    """Move documents between bins, in place, without a new bin or one beyond `capacity`.

    O(documents · log documents) per round.

    Args:
        sizes: tokens of each document, ``(documents,)``.
        bin_of: bin of each document, ``(documents,)``, changed in place.
        capacity: tokens that a bin may hold.
        rng: draws the moves.
    """
    num_bins = int(bin_of.max()) + 1
    rounds = int((_REMIX_BELOW / len(sizes)) ** (2 / 3)) if num_bins > 1 else 0
    for _ in range(min(rounds, _MAX_ROUNDS if len(sizes) >= _SMALL else _MAX_ROUNDS_OF_SMALL)):
        order = random_order_within(bin_of, num_bins, rng)
        stops = np.cumsum(np.bincount(bin_of, minlength=num_bins))
        filled = np.cumsum(sizes[order], dtype=np.int64)
        before = np.append(0, filled[stops[:-1] - 1])  # tokens in the bins before
        room = capacity - (filled[stops - 1] - before)

        # A cut is behind a document; heads are the tokens up to the cut, in ascending order.
        number = int(max(_CUTS_PER_BIN * num_bins, 2 * (num_bins * capacity) ** 0.5))
        cuts = rng.integers(0, len(sizes), min(number, len(sizes)))
        heads = filled[cuts] - before[bin_of[order[cuts]]]
        ascending = stable_argsort(heads, capacity)
        cuts, heads = cuts[ascending], heads[ascending]
        bins = bin_of[order[cuts]]

        # The bin with the lower cut receives the tail of the other, no longer than its own, and
        # gives its own to the other, which has room for the difference if the lower one had it.
        fits = (np.diff(heads) <= room[bins[:-1]]) & (bins[:-1] != bins[1:])
        # A bin is in one exchange at most; those without a partner look for another one.
        lower = rng.permutation(np.flatnonzero(fits))
        found = []
        is_free = np.ones(num_bins, dtype=bool)
        last_claim = np.empty(num_bins, dtype=lower.dtype)
        for _ in range(_MATCHINGS):
            one, other = bins[lower], bins[lower + 1]
            both = np.stack([one, other], axis=1).ravel()
            last_claim[both] = lower.repeat(2)  # of several claims the last one stays
            won = (last_claim[one] == lower) & (last_claim[other] == lower)
            found.append(lower[won])
            is_free[one[won]] = is_free[other[won]] = False
            lower = lower[is_free[one] & is_free[other]]
        matched = np.concatenate(found)
        one, other = bins[matched], bins[matched + 1]
        partner = np.arange(num_bins, dtype=bin_of.dtype)
        partner[one], partner[other] = other, one
        tails = stops.copy()  # where each tail starts
        tails[one] = cuts[matched] + 1
        tails[other] = cuts[matched + 1] + 1
        is_tail = np.arange(len(sizes)) >= np.repeat(tails, np.diff(stops, prepend=0))
        bin_of[order[is_tail]] = np.repeat(partner, stops - tails)


# --- orders ---------------------------------------------------------------------------------------


def random_order_within(groups: np.ndarray, largest: int, rng: np.random.Generator) -> np.ndarray:
    """Return indices int64 in ascending order of `groups` in [0, largest], random in each group."""
    random_bits = min(32, 64 - _bits(len(groups) - 1) - _bits(largest))
    keys = groups.astype(np.uint64)
    keys <<= np.uint64(random_bits)
    keys |= rng.integers(0, 1 << random_bits, len(groups), dtype=np.uint32)
    return _order_of(keys)


def stable_argsort(keys: np.ndarray, largest: int) -> np.ndarray:
    """Return the stable sorting order of keys in [0, largest]."""
    if _bits(largest) <= 16:  # by radix
        return np.argsort(keys.astype(np.uint16), kind="stable")
    return _order_of(keys.astype(np.uint64))


def _order_of(keys: np.ndarray) -> np.ndarray:
    """Return the stable sorting order of `keys`, which are overwritten."""
    # With indices as low bits: NumPy sorts numbers several times faster than `argsort` works.
    index_bits = _bits(len(keys) - 1)
    keys <<= np.uint64(index_bits)
    keys |= np.arange(len(keys), dtype=np.uint64)
    keys.sort()
    keys &= np.uint64((1 << index_bits) - 1)
    return keys.view(np.int64)


def _bits(largest: int) -> int:
    return max(largest.bit_length(), 1)
