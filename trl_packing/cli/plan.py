"""`trl-packing plan`: the bins and optimizer steps of an epoch."""

import argparse
import json
from pathlib import Path
from typing import TYPE_CHECKING, Any

from trl_packing.cli.output import note, print_json
from trl_packing.cli.run_options import (
    add_run_arguments,
    add_stream_argument,
    name_of_data,
    previewed_run,
)

if TYPE_CHECKING:
    from trl_packing.tools.preview.previewed_run import PreviewedRun

HELP = "print the bins and optimizer steps of an epoch"

EPILOG = """\
examples:
  trl-packing plan recipes/sft_packed.py --config recipes/sft_gsm8k.yaml
  trl-packing plan --config recipes/lora_8b.yaml --max_length 8192 --ranks 8
  trl-packing plan --model M --data chat.jsonl --train_on assistant --json
  trl-packing plan --config recipes/lora_8b.yaml --html plan.html

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
    parser.add_argument("--html", metavar="FILE", help="write the plan as a page")
    add_stream_argument(parser)
    add_run_arguments(parser, "plan")


def run(arguments: argparse.Namespace) -> int:
    """Print the report that the trainer would print before an epoch."""
    from trl_packing.pages.page import check_can_write
    from trl_packing.tools.preview.preview import preview_epoch

    check_can_write("--html", arguments.html)
    run = previewed_run(arguments)
    if arguments.html:
        report = _write_page(run, arguments)
    else:
        report = preview_epoch(run, ranks=arguments.ranks)
    if arguments.json:
        rows = {"rows": len(run.dataset), "is_stream": run.is_stream}
        print_json(json.loads(report.to_json()) | rows)
        return 0
    if run.is_stream:
        print(f"The first {len(run.dataset):,} rows of a stream, as if they were all:")
    print(report)
    return 0


def _write_page(run: "PreviewedRun", arguments: argparse.Namespace) -> Any:
    """Write the page, and return the report."""
    from trl_packing.tools.plan.page import plan_page
    from trl_packing.tools.plan.run_plan import plan_run

    plan = plan_run(run, ranks=arguments.ranks)
    data = name_of_data(arguments.words)
    name = Path(data).name if Path(data).exists() else data
    text = plan_page(plan, title=f"Plan · {name}", command=arguments.command_line)
    Path(arguments.html).write_text(text, encoding="utf-8")
    note(f"wrote {arguments.html}")
    return plan.report
