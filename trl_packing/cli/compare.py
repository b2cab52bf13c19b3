"""`trl-packing compare`: runs beside each other, over the documents that they trained."""

import argparse
import json
from pathlib import Path

from trl_packing.cli.output import note, print_json

HELP = "compare runs: losses, tokens, time, settings and versions"

EPILOG = """\
examples:
  trl-packing compare outputs/packed outputs/padded
  trl-packing compare outputs/* --html compare.html
  trl-packing compare outputs/packed of_trl/trainer_state.json

exit status:
  0  the comparison is printed
  2  a run cannot be read or compared; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="at least two: output_dir of a run, one of its checkpoints, its run.json, or the "
        "trainer_state.json of any Trainer",
    )
    parser.add_argument("--html", metavar="FILE", help="write the curves as a page")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    from trl_packing.pages.page import check_can_write
    from trl_packing.tools.runs.compare import compare, compare_page
    from trl_packing.tools.runs.files import load_run

    if len(arguments.runs) < 2:
        raise ValueError(
            f"{arguments.runs[0]} alone has nothing to be compared with; name two runs"
        )
    check_can_write("--html", arguments.html)
    records = [load_run(path) for path in arguments.runs]
    comparison = compare(records)
    if arguments.json:
        print_json(json.loads(comparison.to_json()))
    else:
        print(comparison)
    if arguments.html:
        Path(arguments.html).write_text(compare_page(records, comparison), encoding="utf-8")
        note(f"wrote {arguments.html}")
    return 0
