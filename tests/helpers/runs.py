"""Runs that do not train: built from settings, a command or the arguments of a trainer; shown.

Tests come to them, to their pages and to their comparison through this module alone.
"""

import json
from collections.abc import Mapping
from typing import Any

from helpers.tiny import tiny_tokenizer
from trl_packing.data.files import records_of as records_of
from trl_packing.pages.plan import plan_page as plan_page
from trl_packing.pages.rows import PROPERTIES as PROPERTIES
from trl_packing.pages.rows import rows_page as rows_page
from trl_packing.run.run import TrainerCall as TrainerCall
from trl_packing.run.sampling import Sampling as Sampling
from trl_packing.run.sources import documents_of as documents_of
from trl_packing.run.what_if import computed_tokens as computed_tokens
from trl_packing.run.what_if import other_max_lengths as other_max_lengths
from trl_packing.run.what_if import plan_run as plan_run
from trl_packing.run.what_if import preview_epoch as preview_epoch
from trl_packing.run.what_if import ways_to_batch as ways_to_batch
from trl_packing.tools.compare_rows import EQUAL as EQUAL
from trl_packing.tools.compare_rows import Side as Side
from trl_packing.tools.compare_rows import compare as compare
from trl_packing.tools.compare_rows import documents_by_trl as documents_by_trl
from trl_packing.tools.prepare import prepare_run as prepare_run
from trl_packing.tools.preview import documents_of_row as documents_of_row
from trl_packing.tools.preview import preview_losses as preview_losses
from trl_packing.tools.preview import preview_rows as preview_rows
from trl_packing.tools.preview import run_of_call as run_of_call
from trl_packing.tools.preview import run_of_settings as run_of_settings
from trl_packing.tools.preview import trace_documents as trace_documents
from trl_packing.tools.preview import with_row_numbers as with_row_numbers
from trl_packing.tools.rows import PackedEpoch as PackedEpoch
from trl_packing.tools.training_command import TrainingCommand
from trl_packing.tools.training_command import call_of_script as call_of_script


def run_of(rows: Any, *options: str, tokenizer: Any = None) -> Any:
    return run_of_settings(rows, tokenizer or tiny_tokenizer(chat=True), options)


def call_of_command(*words: str) -> Any:
    """Return the arguments of the trainer that a command line asks for."""
    return TrainingCommand.from_words([*words]).call


def flags_of(settings: Mapping[str, Any]) -> list[str]:
    """Return the words by which a command line gives settings."""
    words = []
    for name, value in settings.items():
        text = json.dumps(value) if isinstance(value, dict) else str(value)
        words += [f"--{name}", text]
    return words
