"""`trl-packing inspect --against`: two preparations of the same rows, compared."""

import argparse

from trl_packing.cli.output import print_json
from trl_packing.cli.run_options import previewed_run


def run_comparison(arguments: argparse.Namespace) -> int:
    """Print the differences of two preparations; return 1 if there are any."""
    from trl_packing.tools.preparations.compare import compare
    from trl_packing.tools.preparations.other import check_against, other_side
    from trl_packing.tools.preparations.side import Side
    from trl_packing.tools.preparations.text import comparison_text

    for name in ("rows", "all", "html"):
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
        print(comparison_text(comparison, tokenizers))
    return 0 if comparison.is_equal else 1
