"""`trl-packing inspect`: documents with their trained tokens marked."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_packing.cli.comparison import run_comparison
from trl_packing.cli.output import print_json, uses_color
from trl_packing.cli.run_options import (
    add_run_arguments,
    add_stream_argument,
    name_of_data,
    previewed_run,
)

if TYPE_CHECKING:
    from trl_packing.tools.preview.previewed_run import PreviewedRun

HELP = "print documents with their trained tokens marked"

EPILOG = """\
examples:
  trl-packing inspect recipes/chat_data.py --config recipes/chat_data.yaml
  trl-packing inspect --config recipes/lora_8b.yaml --rows 0 17 --all
  trl-packing inspect --model M --data chat.jsonl --train_on assistant --json
  trl-packing inspect --config recipes/chat_data.yaml --html rows.html
  trl-packing inspect --config recipes/chat_data.yaml --micro_batches 1 2
  trl-packing inspect --config recipes/chat_data.yaml --against trl

exit status:
  0  every row that was asked for is trained; with --against, nothing differs
  1  one of them is not; with --against, something differs
  2  the run cannot be shown; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--rows", type=int, nargs="+", metavar="ROW", help="row numbers (default: 0 1 2)"
    )
    parser.add_argument("--all", action="store_true", help="count what all rows would lose")
    parser.add_argument(
        "--micro_batches",
        type=int,
        nargs="+",
        metavar="N",
        help="draw micro-batches of the first epoch, from 1, as packed rows; prefixes that\n"
        "documents share (prefix_sharing) stand above their branches",
    )
    parser.add_argument("--html", metavar="FILE", help="write the packed rows of the run as a page")
    parser.add_argument(
        "--against",
        metavar="WHAT",
        help="compare tokens and labels of all rows with those of another preparation: trl, a\n"
        ".jinja template, or a .yaml file",
    )
    add_stream_argument(parser)
    add_run_arguments(parser, "inspect")


def run(arguments: argparse.Namespace) -> int:
    """Print the rows; return 1 if one of them is not trained."""
    from trl_packing.pages.page import check_can_write
    from trl_packing.tools.preview.preview import preview_losses, preview_rows

    check_can_write("--html", arguments.html)
    if arguments.against:
        return run_comparison(arguments)
    drawn = arguments.micro_batches or []
    if drawn and arguments.rows is None:
        arguments.rows = []
    if not (arguments.all or arguments.html or drawn):  # a stream is read no further than needed
        arguments.stream_rows = max([0, *(arguments.rows or [2])]) + 1
    run = previewed_run(arguments)
    if arguments.all or arguments.html or drawn:
        run = run.with_all_images()
    color = not arguments.json and uses_color(arguments.color)
    rows = []
    for preview in preview_rows(run, arguments.rows, color=color):
        rows.append(preview)
        for text in () if arguments.json else preview.texts:
            print(text, end="\n\n")
    packed = _packed_rows(run, arguments, color=color) if drawn else []
    losses = preview_losses(run) if arguments.all else None
    if arguments.json:
        shown = {"rows": [row.to_dict() for row in rows], "losses": losses}
        print_json(shown | ({"packed_rows": packed} if drawn else {}))
    elif losses is not None:
        print(losses, end="\n\n")
    if arguments.html:
        _write_page(run, arguments)
    return 0 if all(row.documents for row in rows) else 1


def _packed_rows(run: "PreviewedRun", arguments: argparse.Namespace, *, color: bool) -> list[Any]:
    """Print micro-batches of the run, or return them for JSON."""
    from trl_packing.tools.rows.packed_rows import PackedEpoch
    from trl_packing.tools.rows.text import micro_batches, show_row

    epoch = PackedEpoch.of(run)
    rows = list(micro_batches(epoch, arguments.micro_batches))
    for row in () if arguments.json else rows:
        print(show_row(row, epoch, color=color), end="\n\n")
    return [row.to_dict() for row in rows]


def _write_page(run: "PreviewedRun", arguments: argparse.Namespace) -> None:
    from trl_packing.tools.rows.packed_rows import PackedEpoch
    from trl_packing.tools.rows.page import rows_page

    epoch = PackedEpoch.of(run)
    title = f"Packed rows · {name_of_data(arguments.words)}"
    note_beside = f"max_length {run.args.max_length:,}" if run.args.max_length else ""
    text = rows_page(epoch, title=title, note=note_beside, command=arguments.command_line)
    Path(arguments.html).write_text(text, encoding="utf-8")
    arguments.notes.append(f"wrote {arguments.html}")
