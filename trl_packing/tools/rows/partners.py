"""The documents that share a row with a document, in one epoch and in the next.

epoch 1    [A B C] [D E]        of the pairs AB AC BC DE,
epoch 2    [A D] [B C E]        BC shares a row again
"""

import copy
from dataclasses import replace
from typing import Any

import numpy as np

from trl_packing.tools.rows.packed_row import PackedRow
from trl_packing.tools.rows.packed_rows import PackedEpoch


class Partners:
    """The documents that share a row in epoch 1, and in epoch 2."""

    def __init__(self, epoch: PackedEpoch):
        sampler = copy.copy(epoch.sampler)
        sampler.set_epoch(epoch.sampler.epoch + 1)
        second = replace(epoch, sampler=sampler)
        self.first = epoch
        self.groups = second.groups()
        self.bins = second.bins()
        self.micro_batches = second.micro_batch_of_documents()
        self.lengths = epoch.documents.lengths()

    def words(self) -> str:
        """Return how many pairs of documents share a row in both epochs, over the whole set."""
        first = self.first.bins()
        pairs, again = _pairs(first[:, None]), _pairs(np.stack([first, self.bins], 1))
        share = f" ({again / pairs:.1%})" if pairs else ""
        return (
            f"<p>Of {pairs:,} pairs of documents that share a {self.first.unit} in epoch 1, "
            f"{again:,}{share} share one again in epoch 2. Below: the selected row, and each row "
            "of epoch 2 that holds one of its documents.</p>"
        )

    def of(self, row: PackedRow) -> list[dict[str, Any]]:
        """Return the rows of epoch 2 that hold the documents of `row`: (number, tokens) each."""
        numbers = [d.number for d in row.documents if d.number is not None]
        bins = dict.fromkeys(int(self.bins[number]) for number in numbers)
        return [
            {
                "name": f"micro-batch {self.micro_batches[self.groups[number][0]] + 1:,}",
                "documents": [
                    [int(document), int(self.lengths[document])] for document in self.groups[number]
                ],
            }
            for number in bins
            if number >= 0
        ]


def _pairs(keys: np.ndarray) -> int:
    """Return the pairs of equal rows in `keys`, ``(documents, n)`` integers; -1 equals nothing."""
    _, sizes = np.unique(keys[(keys >= 0).all(1)], axis=0, return_counts=True)
    return int((sizes * (sizes - 1) // 2).sum())
