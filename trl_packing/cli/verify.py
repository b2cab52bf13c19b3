"""`trl-packing verify`: whether packed documents see each other."""

import argparse
from pathlib import Path

HELP = "measure whether packed documents see each other"

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


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    of_what = parser.add_mutually_exclusive_group(required=True)
    of_what.add_argument("--model", help="causal language model: hub id or folder")
    of_what.add_argument("--matrix", action="store_true", help="a tiny model of every architecture")
    parser.add_argument("--attention", default="auto", choices=ATTENTIONS, help="with --model")
    parser.add_argument("--dtype", default="float32", help="with --model: auto, bfloat16, ...")
    parser.add_argument("--device", help="with --model: cpu, cuda, ...; default: cuda if available")
    parser.add_argument("--max-length", type=int, default=1024, help="with --model: longest probe")
    parser.add_argument("--gradients", action="store_true", help="with --model: gradients too")
    parser.add_argument("--only", nargs="+", metavar="NAME", help="with --matrix: only these")
    parser.add_argument("--processes", type=int, default=2, help="with --matrix: workers")
    parser.add_argument("--output", help="with --matrix: Markdown file to write")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; return 1 if documents leak, or if a difference is silent."""
    return _verify_all(arguments) if arguments.matrix else _verify_model(arguments)


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
    from trl_packing.tools.compatibility import judge_all, summary
    from trl_packing.tools.compatibility_page import report
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
