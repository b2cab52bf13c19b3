"""Runs that do not train: built from settings or from the arguments of a trainer, planned, shown.

Tests come to them through this module alone.
"""

from trl_packing.tools.plan.plan import (
    computed_tokens,
    other_max_lengths,
    plan_run,
    preview_epoch,
    ways_to_batch,
)
from trl_packing.tools.preview import PreviewedRun, preview_losses, preview_rows, trace_documents
from trl_packing.tools.training_command import TrainerCall
from trl_packing.training.columns import documents_of

run_of_call = PreviewedRun.from_call
run_of_settings = PreviewedRun.from_settings

__all__ = [
    "TrainerCall",
    "computed_tokens",
    "documents_of",
    "other_max_lengths",
    "plan_run",
    "preview_epoch",
    "preview_losses",
    "preview_rows",
    "run_of_call",
    "run_of_settings",
    "trace_documents",
    "ways_to_batch",
]
