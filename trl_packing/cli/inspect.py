"""`trl-packing inspect`: documents with their trained tokens marked."""

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from trl_packing.cli.run_options import add_run_arguments, previewed_run

if TYPE_CHECKING:
    from trl_packing.tools.previewed_run import PreviewedRun

HELP = "print documents with their trained tokens marked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="row numbers; default: 0 1 2")
    parser.add_argument("--all", action="store_true", help="count what all rows would lose")
    parser.add_argument("--html", metavar="FILE", help="write the packed rows of the run as a page")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; return 1 if none of them is trained."""
    from trl_packing.pages.page import check_can_write
    from trl_packing.tools.preview import preview_losses, preview_rows

    if arguments.html:
        check_can_write("--html", arguments.html)
    run = previewed_run(arguments)
    shows_documents = False
    for preview in preview_rows(run, arguments.rows, color=sys.stdout.isatty()):
        shows_documents |= bool(preview.documents)
        for text in preview.texts:
            print(text, end="\n\n")
    if arguments.all:
        print(preview_losses(run), end="\n\n")
    if arguments.html:
        _write_page(run, arguments)
    return 0 if shows_documents else 1


def _write_page(run: "PreviewedRun", arguments: argparse.Namespace) -> None:
    from trl_packing.tools.command_line import command_line
    from trl_packing.tools.packed_rows import PackedEpoch
    from trl_packing.tools.rows_page import rows_page
    from trl_packing.tools.settings import load_hidden_size

    hidden_size = load_hidden_size(arguments.model, arguments.settings)
    epoch = PackedEpoch.of(run, model=arguments.model, hidden_size=hidden_size)
    title = f"Rows · {arguments.data} · max_length {run.args.max_length}"
    text = rows_page(epoch, title=title, command=command_line("trl-packing"))
    Path(arguments.html).write_text(text, encoding="utf-8")
    print(f"wrote {arguments.html}")
