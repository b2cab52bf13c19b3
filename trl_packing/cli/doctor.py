"""`trl-packing doctor`: whether this machine can train, and what would make it faster."""

import argparse
import json
import shutil
from pathlib import Path

HELP = "test this machine: versions, devices, attention backends, memory of a model"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = (
        "Further options are those of the run: --max_length, --per_device_train_batch_size, "
        "--use_peft, --config run.yaml, ..."
    )
    parser.set_defaults(settings=[])
    parser.add_argument("--model", help="hub id or folder: adds its memory and its kernels")
    parser.add_argument("--json", action="store_true", help="print JSON, for a bug report")
    parser.add_argument("--html", metavar="FILE", help="write a page")


def run(arguments: argparse.Namespace) -> int:
    """Print the diagnosis; return 1 if training would fail."""
    from trl_packing.pages.page import check_can_write
    from trl_packing.tools.doctor import diagnose
    from trl_packing.tools.doctor_page import doctor_page

    if arguments.html:
        check_can_write("--html", arguments.html)
    diagnosis = diagnose(arguments.model, arguments.settings)
    if arguments.html:
        Path(arguments.html).write_text(doctor_page(diagnosis), encoding="utf-8")
    if arguments.json:
        print(json.dumps(diagnosis.as_json(), indent=2))
    else:
        print(diagnosis.text(min(shutil.get_terminal_size((80, 24)).columns, 100)))
    return 1 if diagnosis.failures else 0
