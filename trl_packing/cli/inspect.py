"""`trl-packing inspect`: documents with their trained tokens marked."""

import argparse

from trl_packing.cli.output import print_json, uses_color
from trl_packing.cli.run_options import add_run_arguments, add_stream_argument, previewed_run

HELP = "print documents with their trained tokens marked"

EPILOG = """\
examples:
  trl-packing inspect recipes/chat_data.py --config recipes/chat_data.yaml
  trl-packing inspect --config recipes/lora_8b.yaml --rows 0 17 --all
  trl-packing inspect --model M --data chat.jsonl --train_on assistant --json

exit status:
  0  every row that was asked for is trained
  1  one of them is not; its reason is printed
  2  the run cannot be shown; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="ROW", help="row numbers (default: 0 1 2)"
    )
    parser.add_argument("--all", action="store_true", help="count what all rows would lose")
    add_stream_argument(parser)
    add_run_arguments(parser, "inspect")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; return 1 if one of them is not trained."""
    from trl_packing.tools.preview import preview_losses, preview_rows

    if arguments.rows and not arguments.all:  # a stream is read no further than needed
        arguments.stream_rows = max(1, *arguments.rows) + 1
    run = previewed_run(arguments)
    color = not arguments.json and uses_color(arguments.color)
    rows = []
    for preview in preview_rows(run, arguments.rows, color=color):
        rows.append(preview)
        for text in () if arguments.json else preview.texts:
            print(text, end="\n\n")
    losses = preview_losses(run) if arguments.all else None
    if arguments.json:
        print_json({"rows": [row.to_dict() for row in rows], "losses": losses})
    elif losses is not None:
        print(losses, end="\n\n")
    return 0 if all(row.documents for row in rows) else 1
