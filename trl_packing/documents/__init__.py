"""Documents: one tokenized training example each, as lengths, boundaries, labels and weights.

Belongs here: anything that can be said of documents without a model, a configuration or a data set
of somebody else. Does not: rules that make documents and cut them (data), or put them together
(packing).

Read `boundaries.py` first.
"""

from trl_packing.documents.boundaries import (
    block_diagonal_mask,
    cu_seqlens_from_lengths,
    document_ids_from_lengths,
    lengths_from_eos,
    position_ids_from_lengths,
)

__all__ = [
    "block_diagonal_mask",
    "cu_seqlens_from_lengths",
    "document_ids_from_lengths",
    "lengths_from_eos",
    "position_ids_from_lengths",
]
