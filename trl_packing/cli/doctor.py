"""`trl-packing doctor`: whether this machine can train, and what would make it faster."""

import argparse
import shutil

from trl_packing.cli.output import print_json, quiet_libraries
from trl_packing.cli.run_options import add_run_arguments

HELP = "test this machine: versions, devices, attention backends, a recipe"

EPILOG = """\
examples:
  trl-packing doctor
  trl-packing doctor --model Qwen/Qwen3-0.6B --max_length 4096
  trl-packing doctor --config recipes/lora_8b.yaml

exit status:
  0  nothing here would stop a training run
  1  training would fail, for the reasons that are printed
  2  an option cannot be used; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    add_run_arguments(parser, "doctor")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 1 if training would fail."""
    from transformers.utils import logging as transformers_logging

    from trl_packing.tools.doctor.doctor import diagnose

    quiet_libraries()
    transformers_logging.set_verbosity_error()
    diagnosis = diagnose(arguments.words)
    if arguments.json:
        print_json(diagnosis.as_json())
    else:
        print(diagnosis.text(min(shutil.get_terminal_size((80, 24)).columns, 100)))
    return 1 if diagnosis.failures else 0
