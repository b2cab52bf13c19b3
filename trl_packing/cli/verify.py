"""`trl-packing verify`: whether packed documents see each other."""

import argparse
from pathlib import Path
from typing import Any

from trl_packing.cli.output import print_json, quiet_libraries
from trl_packing.cli.run_options import add_run_arguments

HELP = "measure whether packed documents see each other"

EPILOG = """\
examples:
  trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct --gradients
  trl-packing verify --config recipes/lora_8b.yaml --device cuda
  trl-packing verify --config recipes/vision_8b.yaml
  trl-packing verify --model HuggingFaceTB/SmolLM2-135M-Instruct --prefixes
  trl-packing verify --matrix --only llama qwen3

exit status:
  0  training on packed documents is exact
  1  no backend is exact; with --prefixes: prefixes cannot be shared;
     with --matrix: a difference is silent
  2  the model cannot be checked; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument("--dtype", help="bfloat16, auto, ...; default: the run's, or float32")
    parser.add_argument("--device", help="cpu, cuda, ...; default: cuda if it is available")
    parser.add_argument("--gradients", action="store_true", help="compare gradients too")
    parser.add_argument("--prefixes", action="store_true", help="check shared prefixes too")
    matrix = parser.add_argument_group("the matrix of architectures")
    matrix.add_argument("--matrix", action="store_true", help="tiny models instead of one model")
    matrix.add_argument("--only", nargs="+", metavar="NAME", help="only these architectures")
    matrix.add_argument("--processes", type=int, default=2, metavar="N", help="default: 2")
    matrix.add_argument("--output", metavar="FILE", help="Markdown file to write")
    add_run_arguments(parser, "verify")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; return 1 if documents leak, or if a difference is silent."""
    return _verify_all(arguments) if arguments.matrix else _verify_model(arguments)


def _verify_model(arguments: argparse.Namespace) -> int:
    quiet_libraries()
    from trl_packing.tools.command.training_command import model_of_words
    from trl_packing.tools.exactness.verify import VerifiedModel
    from trl_packing.tools.exactness.with_images import ImageProbes

    name_or_model, args = model_of_words(arguments.words)
    model = VerifiedModel.load(name_or_model, args, dtype=arguments.dtype, device=arguments.device)
    say = (lambda *_: None) if arguments.json else print
    images = ImageProbes.of(model.model, name_or_model, args, arguments.words)
    say(f"{model}\n")
    results = []
    for result in model.verify(gradients=arguments.gradients, images=images):
        results.append(result)
        say(result)
    exact = results[-1].backend if results[-1].is_exact else None
    shared = None
    if exact and arguments.prefixes:
        shared = model.verify_prefixes(exact, gradients=arguments.gradients)
        say(shared)
    if arguments.json:
        found: dict[str, Any] = {"exact": exact, "backends": [r.to_dict() for r in results]}
        if arguments.prefixes:
            found["prefixes"] = shared and shared.to_dict()
        print_json(model.to_dict() | found)
    elif exact:
        with_images = f", also with images ({images.source})" if images else ""
        print(f"\nTraining on packed documents is exact with attention={exact!r}{with_images}.")
        if shared is not None:
            verb = "is exact" if shared.is_exact else "is not possible: each document is computed"
            print(f"Sharing the prefixes of documents {verb}.")
    else:
        print("\nNo attention backend keeps the documents of a packed row apart on this model.")
    return 0 if exact and (shared is None or shared.is_exact) else 1


def _verify_all(arguments: argparse.Namespace) -> int:
    from trl_packing.tools.exactness.compatibility import judge_all, summary
    from trl_packing.tools.exactness.page import report
    from trl_packing.tools.exactness.tiny_models import names, vision_names

    if arguments.words:
        raise ValueError(f"--matrix takes no run: leave out {' '.join(arguments.words)}")
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
        if not arguments.json:
            words = f"{verdict.name:28} {verdict.outcome:10} {verdict.backend:14}"
            images = verdict.images.outcome.replace("trl", "TRL's path")
            reason = f"with images: {images}; {verdict.reason}" if images else verdict.reason
            print(f"{words} {reason[:90]}")
    if arguments.json:
        print_json({"architectures": [verdict.to_dict() for verdict in verdicts]})
    else:
        print(f"\n{summary(verdicts)}")
    if arguments.output:
        Path(arguments.output).write_text(report(verdicts))
    # The negative control: packed by TRL, leaking models must be reported as different.
    blind = arguments.only is None and not any(v.by_trl.startswith("differs") for v in verdicts)
    return 1 if blind or any(v.is_silent_difference for v in verdicts) else 0
