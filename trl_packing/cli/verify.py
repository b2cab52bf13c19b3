"""`trl-packing verify`: whether packed documents see each other."""

import argparse
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

exit status:
  0  training on packed documents is exact
  1  no backend is exact; with --prefixes: prefixes cannot be shared
  2  the model cannot be checked; stderr has the reason in one line
"""


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.add_argument("--dtype", help="bfloat16, auto, ...; default: the run's, or float32")
    parser.add_argument("--device", help="cpu, cuda, ...; default: cuda if it is available")
    parser.add_argument("--gradients", action="store_true", help="compare gradients too")
    parser.add_argument("--prefixes", action="store_true", help="check shared prefixes too")
    add_run_arguments(parser, "verify")


def run(arguments: argparse.Namespace) -> int:
    """Print the verdicts; return 1 if documents leak."""
    quiet_libraries()
    from trl_packing.tools.command.training_command import TrainingCommand
    from trl_packing.tools.exactness.verify import VerifiedModel
    from trl_packing.tools.exactness.with_images import ImageProbes

    command = TrainingCommand.from_words(arguments.words)
    name_or_model, args = command.model_and_settings()
    model = VerifiedModel.load(name_or_model, args, dtype=arguments.dtype, device=arguments.device)
    say = (lambda *_: None) if arguments.json else print
    images = ImageProbes.of(model.model, name_or_model, args, command)
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
