"""`trl-packing plan`: the bins and optimizer steps of an epoch."""

import argparse
import json

from trl_packing.cli.output import print_json
from trl_packing.cli.run_options import add_run_arguments, add_stream_argument, previewed_run

HELP = "print the bins and optimizer steps of an epoch"

EPILOG = """\
examples:
  trl-packing plan recipes/sft_packed.py --config recipes/sft_gsm8k.yaml
  trl-packing plan --config recipes/lora_8b.yaml --max_length 8192 --ranks 8
  trl-packing plan --model M --data chat.jsonl --train_on assistant --json

exit status:
  0  the plan is printed
  2  the run cannot be planned; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument(
        "--ranks", type=int, default=1, metavar="N", help="data-parallel processes (default: 1)"
    )
    add_stream_argument(parser)
    add_run_arguments(parser, "plan")


def run(arguments: argparse.Namespace) -> int:
    """Print the report that the trainer would print before an epoch."""
    from trl_packing.tools.preview import preview_epoch

    run = previewed_run(arguments)
    report = preview_epoch(run, ranks=arguments.ranks)
    if arguments.json:
        rows = {"rows": len(run.dataset), "is_stream": run.is_stream}
        print_json(json.loads(report.to_json()) | rows)
        return 0
    if run.is_stream:
        print(f"The first {len(run.dataset):,} rows of a stream, as if they were all:")
    print(report)
    return 0
