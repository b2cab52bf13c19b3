"""The options that describe a run: its model, its data and its settings."""

import argparse
import warnings
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from trl_packing.tools.previewed_run import PreviewedRun


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of a run. Those that `parser` does not know become `arguments.settings`."""
    parser.epilog = "Further options are those of PackedSFTConfig: --train_on, --max_length, ..."
    parser.set_defaults(settings=[])
    parser.add_argument("--model", required=True, help="hub id or folder of a tokenizer")
    parser.add_argument("--data", required=True, help="hub id, .json, .jsonl or .parquet")
    parser.add_argument("--split", default="train")


def previewed_run(arguments: argparse.Namespace) -> "PreviewedRun":
    """Return the run that `arguments` describe, with its rows and its tokenizer."""
    import datasets

    from trl_packing.data.dataset import load_rows
    from trl_packing.tools.previewed_run import PreviewedRun
    from trl_packing.tools.settings import load_processing_class

    datasets.disable_progress_bars()
    # datasets logs the errors that it raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # transformers warns about renamed options that TRL sets; the user cannot change them.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    processing_class = load_processing_class(arguments.model, arguments.settings)
    rows = load_rows(arguments.data, arguments.split)
    return PreviewedRun.from_settings(rows, processing_class, arguments.settings, arguments.model)
