"""Runs that do not train: built from settings or from the arguments of a trainer, planned, shown.

Tests come to them through this module alone.
"""

from trl_packing.run.run import TrainerCall
from trl_packing.run.sampling import Sampling
from trl_packing.run.sources import documents_of
from trl_packing.run.what_if import (
    computed_tokens,
    other_max_lengths,
    plan_run,
    preview_epoch,
    ways_to_batch,
)
from trl_packing.tools.preview import (
    documents_of_row,
    preview_losses,
    preview_rows,
    run_of_call,
    run_of_settings,
    trace_documents,
    with_row_numbers,
)

__all__ = [
    "Sampling",
    "TrainerCall",
    "computed_tokens",
    "documents_of",
    "documents_of_row",
    "other_max_lengths",
    "plan_run",
    "preview_epoch",
    "preview_losses",
    "preview_rows",
    "run_of_call",
    "run_of_settings",
    "trace_documents",
    "ways_to_batch",
    "with_row_numbers",
]
