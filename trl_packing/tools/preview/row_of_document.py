"""The row of the user's data set that each prepared document comes from, and its uncut length.

rows of the data set  →  one more column, their numbers  →  prepared as usual  →  documents with it

Preparation drops, cuts, splits and shuffles. It carries one column along for every document, the
`source_column` of evaluation sets, so the numbers need no bookkeeping of their own.
"""

import copy
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from datasets import Dataset

from trl_packing.data.counts import PreparationCounts
from trl_packing.data.preparation import fit
from trl_packing.documents.arrow import ArrowDocuments
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
    """Return the documents of the whole data set with the rows that they come from.

    A row may be several documents (`train_on="every_turn"`), and a document several pieces. So the
    documents are numbered once more before they are cut.
    """
    numbered = with_row_numbers(run)
    whole = numbered.unfitted()
    if whole is None:
        dataset, counts = numbered.documents()
        lengths = ArrowDocuments(dataset, ["input_ids"]).lengths()
        return TracedDocuments(dataset.remove_columns(ROW), counts, _numbers(dataset), lengths)
    documents: Any = whole.documents
    rows, uncut = _numbers(documents), ArrowDocuments(documents, ["input_ids"]).lengths()
    documents = documents.remove_columns(ROW).add_column(ROW, np.arange(len(rows)))
    fitted, counts = fit(replace(whole, documents=documents), numbered.preparation)
    numbers = _numbers(fitted)
    return TracedDocuments(fitted.remove_columns(ROW), counts, rows[numbers], uncut[numbers])


def _numbers(documents: Any) -> np.ndarray:
    return np.asarray(documents.with_format("numpy")[ROW][:], np.int64)
