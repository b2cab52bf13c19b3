"""An order of documents in which groups with a common prefix come in one optimizer step.

drawn              a0 b0 c0 a1 d0 b1 e0 ...          groups: a of 3 documents, b of 2, ...
groups as drawn    a a a | b b | c | d | e | ...
steps of 4         a a a c | b b d e | ...           b does not fit behind a: c comes first
"""

import numpy as np

from trl_packing.packing.prefix_groups import PrefixGroups

# Most groups that wait for a step with room, before one is cut. Few, to keep steps random.
_MOST_WAITING = 64


def keep_groups_together(
    order: np.ndarray, groups: PrefixGroups, documents_per_step: int
) -> np.ndarray:
    """Return `order` with the documents of each group next to each other, ``(documents,)`` int64.

    A group comes where the first of its documents was drawn. It comes a little later if it does not
    fit into what is left of a step, and it is cut if no other group fits there. O(documents).

    Args:
        order: documents as drawn; some of the data set may be missing.
        groups: of the data set.
        documents_per_step: documents in a step.
    """
    numbers = groups.numbers[order]
    _, first, group = np.unique(numbers, return_index=True, return_inverse=True)
    drawn = np.argsort(np.argsort(first))[group]  # groups by the draw of their first document
    place = np.empty(len(groups.documents), np.int64)
    place[groups.documents] = np.arange(len(place))
    order = order[np.lexsort((place[order], drawn))]
    sizes = np.bincount(drawn)
    if sizes.max(initial=1) == 1:
        return order
    starts = (np.cumsum(sizes) - sizes).tolist()
    parts = _in_steps(sizes.tolist(), documents_per_step)
    return np.concatenate([order[starts[n] + a : starts[n] + b] for n, a, b in parts])


def _in_steps(sizes: list[int], room_of_step: int) -> list[tuple[int, int, int]]:
    """Return parts of groups, step by step: the group, its first document and the one behind."""
    parts: list[tuple[int, int, int]] = []
    waiting: list[tuple[int, int, int]] = []  # parts as well, in the order of drawing
    drawn, room = 0, room_of_step
    while drawn < len(sizes) or waiting:
        kept = []
        for part in waiting:
            if part[2] - part[1] <= room:
                parts.append(part)
                room -= part[2] - part[1]
            else:
                kept.append(part)
        waiting = kept
        while room and drawn < len(sizes) and len(waiting) < _MOST_WAITING:
            size = sizes[drawn]
            if size <= room:
                parts.append((drawn, 0, size))
                room -= size
            else:
                waiting.append((drawn, 0, size))
            drawn += 1
        if room and waiting:
            number, start, stop = waiting[0]
            parts.append((number, start, start + room))
            waiting[0] = (number, start + room, stop)
        room = room_of_step
    return parts
