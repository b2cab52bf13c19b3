"""`trl-packing inspect`: documents with their trained tokens marked."""

import argparse
import sys

from trl_packing.cli.run_options import add_run_arguments, previewed_run

HELP = "print documents with their trained tokens marked"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run_arguments(parser)
    parser.add_argument("--rows", type=int, nargs="+", help="row numbers; default: 0 1 2")
    parser.add_argument("--all", action="store_true", help="count what all rows would lose")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; return 1 if none of them is trained."""
    from trl_packing.tools.preview import preview_losses, preview_rows

    run = previewed_run(arguments)
    shows_documents = False
    for preview in preview_rows(run, arguments.rows, color=sys.stdout.isatty()):
        shows_documents |= bool(preview.documents)
        for text in preview.texts:
            print(text, end="\n\n")
    if arguments.all:
        print(preview_losses(run), end="\n\n")
    return 0 if shows_documents else 1
