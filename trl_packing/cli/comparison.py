"""`trl-packing inspect --against`: two preparations of the same rows, compared."""

import argparse
import shutil
from pathlib import Path
from typing import TYPE_CHECKING

from trl_packing.cli.output import note, print_json
from trl_packing.cli.run_options import name_of_data, previewed_run

if TYPE_CHECKING:
    from trl_packing.tools.preparations.compare import Comparison

_MOST_COLUMNS = 100


def run_comparison(arguments: argparse.Namespace) -> int:
    """Print the differences of two preparations; return 1 if there are any."""
    from trl_packing.tools.preparations.compare import compare
    from trl_packing.tools.preparations.other import check_against, other_side
    from trl_packing.tools.preparations.side import Side
    from trl_packing.tools.preparations.text import comparison_text

    for name in ("rows", "all"):
        if getattr(arguments, name):
            raise ValueError(f"--{name} has no effect beside --against, which compares all rows")
    check_against(arguments.against)
    run = previewed_run(arguments)
    sides = Side("this run", run), other_side(arguments.against, run, arguments.words)
    comparison = compare(*sides)
    tokenizers = [side.run.preparation.eos.tokenizer for side in sides]
    if arguments.json:
        print_json(comparison.to_dict())
    else:
        width = min(shutil.get_terminal_size().columns, _MOST_COLUMNS)
        print(comparison_text(comparison, tokenizers, width=width))
    if arguments.html:
        _write_page(comparison, tokenizers, arguments)
    return 0 if comparison.is_equal else 1


def _write_page(comparison: "Comparison", tokenizers: list, arguments: argparse.Namespace) -> None:
    from trl_packing.tools.command.command_line import command_line
    from trl_packing.tools.preparations.page import comparison_page

    title = f"{name_of_data(arguments)} against {comparison.names[1]}"
    html = comparison_page(comparison, tokenizers, title=title, command=command_line("trl-packing"))
    Path(arguments.html).write_text(html, encoding="utf-8")
    note(f"wrote {arguments.html}")
