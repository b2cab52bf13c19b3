"""`trl-packing plan`: the bins and optimizer steps of an epoch."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trl_packing.cli.run_options import add_run_arguments, previewed_run

if TYPE_CHECKING:
    from trl_packing.tools.previewed_run import PreviewedRun

HELP = "print the bins and optimizer steps of an epoch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run_arguments(parser)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel processes")
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page")
    parser.add_argument("--png", metavar="FILE", help="draw the plan (needs matplotlib)")


def run(arguments: argparse.Namespace) -> int:
    """Print the report that the trainer would print before an epoch."""
    from trl_packing.tools.preview import preview_epoch
    from trl_packing.tools.settings import load_hidden_size

    files = {"--html": arguments.html, "--png": arguments.png}
    _check_files(files)
    run = previewed_run(arguments)
    hidden_size = load_hidden_size(arguments.model, arguments.settings)
    if any(files.values()):
        _write_files(run, arguments, hidden_size)
    else:
        print(preview_epoch(run, ranks=arguments.ranks, hidden_size=hidden_size))
    return 0


def _check_files(files: dict[str, str | None]) -> None:
    from trl_packing.pages.page import check_can_write

    for option, path in files.items():
        if path:
            check_can_write(option, path)


def _write_files(
    run: "PreviewedRun", arguments: argparse.Namespace, hidden_size: int | None
) -> None:
    from trl_packing.tools.command_line import command_line
    from trl_packing.tools.plan_page import plan_page
    from trl_packing.tools.plan_plot import plot_plan
    from trl_packing.tools.run_plan import plan_run

    plan = plan_run(run, ranks=arguments.ranks, hidden_size=hidden_size)
    print(plan.report)
    if arguments.html:
        data = Path(arguments.data)
        text = plan_page(
            plan,
            title=f"Plan · {data.name if data.exists() else arguments.data}",
            note=arguments.model,
            command=command_line("trl-packing"),
        )
        Path(arguments.html).write_text(text, encoding="utf-8")
    if arguments.png:
        plot_plan(plan).savefig(arguments.png, dpi=150)
    for path in filter(None, (arguments.html, arguments.png)):
        print(f"wrote {path}", file=sys.stderr)
