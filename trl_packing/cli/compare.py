"""`trl-packing compare`: several runs over documents, tokens, steps or hours."""

import argparse
import sys
from pathlib import Path

HELP = "compare runs: losses, tokens, time, settings, versions"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="at least two: output_dir of a run, one of its checkpoints, its run.json, or the "
        "trainer_state.json of any Trainer",
    )
    parser.add_argument(
        "--over",
        choices=("documents", "tokens", "steps", "hours"),
        help="axis on which losses are compared; default: documents if all runs know them, else "
        "tokens, else steps if they hold equally many documents",
    )
    parser.add_argument("--html", metavar="FILE", help="write a page with the curves too")
    parser.add_argument("--json", action="store_true", help="print JSON instead of tables")


def run(arguments: argparse.Namespace) -> int:
    """Print the comparison."""
    from trl_packing.tools.compare_runs import compare
    from trl_packing.tools.run_files import load_run
    from trl_packing.tools.runs_page import compare_page

    if len(arguments.runs) < 2:
        raise ValueError(
            f"{arguments.runs[0]} alone has nothing to be compared with; name two runs"
        )
    if arguments.html and not Path(arguments.html).absolute().parent.is_dir():
        raise ValueError(f"--html {arguments.html}: its folder does not exist")
    records = [load_run(path) for path in arguments.runs]
    comparison = compare(records, arguments.over)
    print(comparison.to_json() if arguments.json else comparison)
    if arguments.html:
        Path(arguments.html).write_text(compare_page(records, comparison), encoding="utf-8")
        print(f"wrote {arguments.html}", file=sys.stderr)
    return 0
