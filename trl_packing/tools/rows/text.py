"""Packed rows as text, for a terminal: the documents of a bin, and the tree of a shared row.

micro-batch 1 · 3 documents · 831 tokens instead of 1,852 (2.2× fewer)
═══════════════════════════AAAAAAAAA document 12        640 tokens
                           BBBBBBBBB document 40        640 tokens, 511 above
                           CCCC      document 7         572 tokens, 510 above
"""

from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np

from trl_packing.data.counts import quantity
from trl_packing.tools.preview.show_rows import show_rows
from trl_packing.tools.rows.packed_rows import PackedEpoch, PackedRow

_CELLS = 36  # of a line; the rest of 80 columns names its document


def micro_batches(epoch: PackedEpoch, numbers: Sequence[int]) -> Iterator[PackedRow]:
    """Yield the rows of micro-batches.

    Args:
        epoch: the rows of a run.
        numbers: of the micro-batches, from 1, as the page of rows counts them.

    Raises:
        ValueError: a micro-batch does not exist. Nothing is yielded then.
    """
    total = len(epoch.sampler.micro_batches())
    for number in numbers:
        if not 1 <= number <= total:
            raise ValueError(
                f"micro-batch {number} is not among the {total:,} of the epoch; they count from 1"
            )
    yield from epoch.rows([number - 1 for number in numbers])


def show_row(row: PackedRow, epoch: PackedEpoch, *, color: bool = False) -> str:
    """Return a packed row as text, with background colors for a terminal if asked."""
    return "\n".join([_heading(row, epoch), *_lines(row, epoch.capacity, color)])


def _heading(row: PackedRow, epoch: PackedEpoch) -> str:
    number = f"micro-batch {row.micro_batch + 1:,}"
    if not row.segments and epoch.capacity:
        number += f", {epoch.unit} {row.index + 1}"
    real = [d for d in row.documents if d.number is not None]
    tokens = row.segments[-1].stop if row.segments else row.real_tokens
    shared = f" instead of {row.real_tokens:,} ({row.real_tokens / tokens:.1f}× fewer)"
    parts = [
        number,
        quantity(len(real), "document"),
        *[quantity(row.num_images, "image")] * bool(row.num_images),
        f"{tokens:,} tokens{shared * bool(row.segments)}",
    ]
    return " · ".join(parts)


def _lines(row: PackedRow, capacity: int | None, color: bool) -> list[str]:
    real = [d for d in row.documents if d.number is not None]
    lengths = [d.stop - d.start for d in real]
    if not row.segments:
        cell = -(-max(sum(lengths), capacity or 0, 1) // 80)
        starts = np.cumsum([0, *lengths])
        images = [
            (int(first) + image.start, int(first) + image.stop)
            for document, first in zip(real, starts, strict=False)
            for image in document.images
        ]
        size: dict[str, Any] = {"capacity": capacity, "tokens_per_cell": cell}
        return [show_rows([lengths], images=[images], color=color, **size)]
    cell = -(-max(lengths) // _CELLS)
    shared = list(row.shared)
    trees = show_rows([lengths], shared=[shared], tokens_per_cell=cell, color=color).split("\n")
    plain = show_rows([lengths], shared=[shared], tokens_per_cell=cell).split("\n")
    names = [
        f"document {d.number:<7,}{length:>6,} tokens" + f", {above:,} above" * bool(above)
        for d, length, above in zip(real, lengths, shared, strict=True)
    ]
    return [
        f"{tree}{' ' * (_CELLS - len(text))} {name}"
        for tree, text, name in zip(trees, plain, names, strict=True)
    ]
