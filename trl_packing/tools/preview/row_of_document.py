"""The row of the user's data set that each prepared document comes from, and its uncut length.

rows of the data set  →  one more column, their numbers  →  prepared as usual  →  documents with it

Preparation drops, cuts, splits and shuffles. It carries one column along for every document, the
`source_column` of evaluation sets, so the numbers need no bookkeeping of their own.
"""

import copy
from dataclasses import dataclass, replace

import numpy as np
from datasets import Dataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.overflow import Overflow
from trl_packing.documents.arrow import ArrowDocuments, is_packed
from trl_packing.tools.preview.previewed_run import PreviewedRun

# The column that holds the numbers.
ROW = "trl_packing_row"


@dataclass(frozen=True, eq=False)
class TracedDocuments:
    """The documents of a run, as training reads them, and where they come from.

    Attributes:
        dataset: documents.
        counts: of what was kept and lost; None for rows that were packed before.
        rows: the row of the user's data set that each document comes from, ``(documents,)`` int64.
        uncut: its tokens before it was cut to fit, ``(documents,)`` int64.
    """

    dataset: Dataset
    counts: PreparationCounts | None
    rows: np.ndarray
    uncut: np.ndarray


def with_row_numbers(run: PreviewedRun, rows: np.ndarray | None = None) -> PreviewedRun:
    """Return `run` on `rows` of its data set (all by default), which carry their numbers."""
    numbers = np.arange(len(run.dataset)) if rows is None else rows
    dataset = run.dataset if rows is None else run.dataset.select(rows)
    return with_settings(replace(run, dataset=dataset.add_column(ROW, numbers)), source_column=ROW)


def with_settings(run: PreviewedRun, **changes: object) -> PreviewedRun:
    """Return `run` with some of its settings changed."""
    args = copy.copy(run.args)
    for name, value in changes.items():
        setattr(args, name, value)
    return replace(run, args=args, preparation=replace(run.preparation, args=args))


def trace_documents(run: PreviewedRun) -> TracedDocuments:
    """Return the documents of the whole data set with the rows that they come from."""
    dataset, counts = with_row_numbers(run).documents()
    rows = np.asarray(dataset.with_format("numpy")[ROW][:], np.int64)
    lengths = ArrowDocuments(dataset, ["input_ids"]).lengths()
    if counts is None or is_packed(dataset) or not counts.stages:
        return TracedDocuments(dataset.remove_columns(ROW), counts, rows, lengths)
    uncut = _uncut_lengths(run, rows, lengths)
    return TracedDocuments(dataset.remove_columns(ROW), counts, rows, uncut)


def _uncut_lengths(run: PreviewedRun, rows: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the length of each document before it was cut.

    Only rows whose documents may have been cut are prepared once more. Row 0 is among them, because
    the first row decides the format of all.
    """
    makes_pieces = Overflow.from_args(run.args, run.args.packing).makes_pieces
    may_be_cut = (lengths == run.args.max_length) | makes_pieces
    if not may_be_cut.any():
        return lengths
    chosen = np.unique([0, *rows[may_be_cut]])
    unlimited = with_settings(with_row_numbers(run, chosen), max_length=None, shuffle_dataset=False)
    whole, _ = unlimited.documents()
    uncut = np.zeros(len(run.dataset), np.int64)
    uncut[np.asarray(whole.with_format("numpy")[ROW][:])] = ArrowDocuments(
        whole, ["input_ids"]
    ).lengths()
    return np.where(may_be_cut, uncut[rows], lengths)
