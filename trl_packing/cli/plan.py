"""`trl-packing plan`: the bins and optimizer steps of an epoch."""

import argparse

from trl_packing.cli.run_options import add_run_arguments, previewed_run

HELP = "print the bins and optimizer steps of an epoch"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    add_run_arguments(parser)
    parser.add_argument("--ranks", type=int, default=1, help="data-parallel processes")


def run(arguments: argparse.Namespace) -> int:
    """Print the report that the trainer would print before an epoch."""
    from trl_packing.tools.preview import preview_epoch
    from trl_packing.tools.settings import load_hidden_size

    run = previewed_run(arguments)
    hidden_size = load_hidden_size(arguments.model, arguments.settings)
    print(preview_epoch(run, ranks=arguments.ranks, hidden_size=hidden_size))
    return 0
