"""`trl-packing prepare`: the documents of a run, written once."""

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_packing.cli.output import print_json, quiet_libraries
from trl_packing.cli.run_options import add_run_arguments

HELP = "tokenize, label and cut the data of a run once, for many runs"

EPILOG = """\
examples:
  trl-packing prepare chat.jsonl prepared --model M --num_proc 16
  trl-packing prepare prepared --config recipes/lora_8b.yaml
  trl-packing prepare recipes/chat_data.py prepared --config chat.yaml
  trl-packing prepare prepared --config recipes/sft_mixture.yaml
Then train, plan or inspect with --dataset_name prepared and the same
settings.

DATA is a hub id, a file or a folder, and OUT the folder to write, which
appears only when it is complete. The data sets of a mixture become folders
in OUT; the command prints the entries of `datasets:` that train them.

exit status:
  0  OUT holds the prepared data
  2  the data cannot be prepared; stderr has the reason in one line
"""

_USAGE = "trl-packing prepare [SCRIPT] [DATA] OUT [--config FILE] [--OPTION ...]"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of the command."""
    parser.epilog = EPILOG
    parser.set_defaults(places=())
    parser.add_argument("--num_proc", type=int, metavar="N", help="processes (default: 1)")
    add_run_arguments(parser, "prepare")
    parser.usage = _USAGE


def run(arguments: argparse.Namespace) -> int:
    """Write the prepared data, and print what was kept and lost."""
    script, data, out = _places(arguments.places)
    words = [*script, *arguments.words, *data]
    if arguments.num_proc is not None:
        if arguments.num_proc < 1:
            raise ValueError(f"--num_proc {arguments.num_proc} must be at least 1")
        words += ["--dataset_num_proc", str(arguments.num_proc)]
    quiet_libraries()
    from trl_packing.tools import prepare
    from trl_packing.tools.command.training_command import TrainingCommand

    command = TrainingCommand.from_words(words)
    options = command.options
    if "datasets" not in options:
        out = prepare.check_place(out)  # before the data are loaded
    call = command.trainer_call()
    if isinstance(call.train_dataset, dict):
        sources = prepare.prepare_sources(call, out, options=options)
        text = prepare.sources_as_text(sources, call.args.mixture)
        told = {"sources": {name: prepare.as_json(each) for name, each in sources.items()}}
    else:
        made = prepare.prepare_run(call, out, options=options)
        text, told = prepare.as_text(made), prepare.as_json(made)
    if not command.is_named:
        arguments.notes.append("prepared as sft_packed.py trains it")
    if arguments.json:
        print_json(told)
    else:
        print(text)
    return 0


def _places(words: Sequence[str]) -> tuple[list[str], list[Any], Path]:
    """Return the script, the option that names the data, and the folder to write."""
    size = 2 if words[:1] == ["-m"] else int(words[:1] != [] and words[0].endswith(".py"))
    script, places = list(words[:size]), list(words[size:])
    if len(places) not in (1, 2):
        raise ValueError(
            "name the data and the folder to write first: trl-packing prepare DATA OUT --model NAME"
        )
    *data, out = places
    return script, ["--dataset_name", *data] if data else [], Path(out).expanduser()
