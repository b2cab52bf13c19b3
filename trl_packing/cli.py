"""The command `trl-packing`.

trl-packing inspect --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl
    print documents with their trained tokens marked, and count what preparation would lose

trl-packing plan --model HuggingFaceTB/SmolLM2-135M-Instruct --data chat.jsonl --ranks 8
    print the bins, optimizer steps and documents a step of an epoch, beside those of a padded run

trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct
trl-packing verify --matrix --output docs/compatibility.md
    measure whether packing changes what a model learns, on one model or on every architecture
"""

import argparse
import io
import sys
import warnings
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_packing.tools.exit_messages import message_of

# Libraries are imported inside the commands, so that `--help` and typing errors are quick.

# `attention.backends.CHOICES`, written out here because importing it loads torch.
ATTENTIONS = (
    "auto",
    "flash_attention_4",
    "flash_attention_3",
    "flash_attention_2",
    "varlen",
    "documents",
    "model",
    "mask",
    "padded",
    "equal_lengths",
)


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command.

    Returns:
        The exit status: 0 on success; 1 if documents leak or differ silently (verify), or no row
        can be shown (inspect); 2 if the command cannot run, with the reason in one line on stderr.
    """
    for stream in (sys.stdout, sys.stderr):
        if isinstance(stream, io.TextIOWrapper):  # the terminal may lack some characters
            stream.reconfigure(errors="backslashreplace")
    parser = _parser()
    arguments, settings = parser.parse_known_args(argv)
    if settings and arguments.command == "verify":
        parser.error(f"unrecognized arguments: {' '.join(settings)}")
    try:
        if arguments.command == "plan":
            return _plan(arguments, settings)
        if arguments.command == "inspect":
            return _inspect(arguments, settings)
        return _verify_all(arguments) if arguments.matrix else _verify_model(arguments)
    except Exception as error:
        message = message_of(error)
        if message is None:
            raise
        print(f"trl-packing {arguments.command}: {message}", file=sys.stderr)
        return 2


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="trl-packing", description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    further = "Further options are those of PackedSFTConfig: --train_on, --max_length, ..."
    inspect = commands.add_parser(
        "inspect", help="print documents with their trained tokens marked", epilog=further
    )
    plan = commands.add_parser(
        "plan", help="print the bins and optimizer steps of an epoch", epilog=further
    )
    for command in (inspect, plan):
        command.add_argument("--model", required=True, help="hub id or folder of a tokenizer")
        command.add_argument("--data", required=True, help="hub id, .json, .jsonl or .parquet")
        command.add_argument("--split", default="train")
    plan.add_argument("--ranks", type=int, default=1, help="data-parallel processes")
    inspect.add_argument("--rows", type=int, nargs="+", help="row numbers; default: 0 1 2")
    inspect.add_argument("--all", action="store_true", help="count what all rows would lose")
    verify = commands.add_parser("verify", help="measure whether packed documents see each other")
    of_what = verify.add_mutually_exclusive_group(required=True)
    of_what.add_argument("--model", help="causal language model: hub id or folder")
    of_what.add_argument("--matrix", action="store_true", help="a tiny model of every architecture")
    verify.add_argument("--attention", default="auto", choices=ATTENTIONS, help="with --model")
    verify.add_argument("--dtype", default="float32", help="with --model: auto, bfloat16, ...")
    verify.add_argument("--device", help="with --model: cpu, cuda, ...; default: cuda if available")
    verify.add_argument("--max-length", type=int, default=1024, help="with --model: longest probe")
    verify.add_argument("--gradients", action="store_true", help="with --model: gradients too")
    verify.add_argument("--only", nargs="+", metavar="NAME", help="with --matrix: only these")
    verify.add_argument("--processes", type=int, default=2, help="with --matrix: workers")
    verify.add_argument("--output", help="with --matrix: Markdown file to write")
    return parser


# --- before a run -----------------------------------------------------------------------------


def _inspect(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    from trl_packing.tools.preview import preview_losses, preview_rows
    from trl_packing.tools.previewed_run import PreviewedRun

    rows, processing_class = _load(arguments, settings)
    run = PreviewedRun.from_settings(rows, processing_class, settings, arguments.model)
    shows_documents = False
    for preview in preview_rows(run, arguments.rows, color=sys.stdout.isatty()):
        shows_documents |= bool(preview.documents)
        for text in preview.texts:
            print(text, end="\n\n")
    if arguments.all:
        print(preview_losses(run), end="\n\n")
    return 0 if shows_documents else 1


def _plan(arguments: argparse.Namespace, settings: Sequence[str]) -> int:
    from trl_packing.tools.preview import preview_epoch
    from trl_packing.tools.previewed_run import PreviewedRun
    from trl_packing.tools.settings import load_hidden_size

    rows, processing_class = _load(arguments, settings)
    run = PreviewedRun.from_settings(rows, processing_class, settings, arguments.model)
    hidden_size = load_hidden_size(arguments.model, settings)
    print(preview_epoch(run, ranks=arguments.ranks, hidden_size=hidden_size))
    return 0


def _load(arguments: argparse.Namespace, settings: Sequence[str]) -> tuple[Any, Any]:
    """Return the rows of the data set, and the tokenizer or processor that the trainer loads."""
    import datasets

    from trl_packing.data.dataset import load_rows
    from trl_packing.tools.settings import load_processing_class

    datasets.disable_progress_bars()
    # datasets logs the errors that it raises.
    datasets.logging.set_verbosity(datasets.logging.CRITICAL)
    # transformers warns about renamed options that TRL sets; the user cannot change them.
    warnings.filterwarnings("ignore", category=FutureWarning, module="transformers")
    processing_class = load_processing_class(arguments.model, settings)
    return load_rows(arguments.data, arguments.split), processing_class


# --- exactness --------------------------------------------------------------------------------


def _verify_model(arguments: argparse.Namespace) -> int:
    from trl_packing.tools.verify import verify_model

    is_exact = verify_model(
        arguments.model,
        attention=arguments.attention,
        dtype=arguments.dtype,
        device=arguments.device,
        max_length=arguments.max_length,
        gradients=arguments.gradients,
    )
    return 0 if is_exact else 1


def _verify_all(arguments: argparse.Namespace) -> int:
    from trl_packing.tools.compatibility import judge_all, report, summary
    from trl_packing.tools.tiny_models import names, vision_names

    known = [*names(), *vision_names()]
    chosen = arguments.only or known
    if unknown := sorted(set(chosen) - set(known)):
        raise ValueError(f"--only {' '.join(unknown)}: transformers has no such architecture")
    if arguments.processes < 1:
        raise ValueError(f"--processes {arguments.processes} must be at least 1")
    if arguments.output and not Path(arguments.output).absolute().parent.is_dir():
        raise ValueError(f"--output {arguments.output}: its folder does not exist")
    verdicts = []
    for verdict in judge_all(chosen, processes=arguments.processes):
        verdicts.append(verdict)
        print(f"{verdict.name:28} {verdict.outcome:10} {verdict.backend:14} {verdict.reason[:90]}")
    print(f"\n{summary(verdicts)}")
    if arguments.output:
        Path(arguments.output).write_text(report(verdicts))
    # The negative control: packed by TRL, leaking models must be reported as different.
    blind = arguments.only is None and not any(v.by_trl.startswith("differs") for v in verdicts)
    return 1 if blind or any(v.is_silent_difference for v in verdicts) else 0


if __name__ == "__main__":
    sys.exit(main())
