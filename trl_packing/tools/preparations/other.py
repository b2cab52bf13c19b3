"""The preparation that a run is compared with: TRL's, another template, or another file.

trl                TRL's own, with the same settings
template.jinja     the same run with this chat template
run.yaml           a run of its own if it names a model and data; if not, this run with its settings
"""

import copy
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from trl_packing.tools.options import read_config
from trl_packing.tools.preparations.side import Side
from trl_packing.tools.preview.previewed_run import PreviewedRun
from trl_packing.tools.training_command import TrainerCall, TrainingCommand

_TEMPLATES, _CONFIGS = (".jinja", ".j2"), (".yaml", ".yml")
_MODEL = {"model_name_or_path", "model"}
_DATA = {"dataset_name", "data"}


def check_against(against: str) -> None:
    """Raise ValueError if `against` is neither ``"trl"`` nor a template or a .yaml file."""
    path = Path(against)
    if against != "trl" and path.suffix not in (*_TEMPLATES, *_CONFIGS):
        raise ValueError(
            f"--against {against} is no preparation; name trl, a .jinja template or a .yaml file"
        )
    if against != "trl" and not path.is_file():
        raise ValueError(f"--against {against} does not exist (looked from {Path.cwd()})")


def other_side(against: str, run: PreviewedRun, words: Sequence[str]) -> Side:
    """Return the preparation that `against` names.

    Args:
        against: ``"trl"``, a .jinja or .j2 template, or a .yaml file of options.
        run: the run that is compared with it.
        words: the training command of the run, without its launcher.

    Raises:
        ValueError: `against` is none of these, or a file that does not exist.
    """
    check_against(against)
    path = Path(against)
    if against == "trl":
        return Side("TRL", run, by_trl=True)
    if path.suffix in _TEMPLATES:
        return Side(path.name, _with_template(run, against))
    command = TrainingCommand.from_words(_words_with(path, words))
    return Side(path.name, PreviewedRun.from_call(command.call))


def _with_template(run: PreviewedRun, path: str) -> PreviewedRun:
    args = copy.copy(run.args)
    args.chat_template_path = path
    tokenizer = run.preparation.processing_class
    call = TrainerCall(run.model, args, run.dataset, tokenizer, run.collator, run.formatting_func)
    return PreviewedRun.from_call(call)


def _words_with(path: Path, words: Sequence[str]) -> list[str]:
    """Return the training command that the file makes of the command `words`."""
    options = read_config(path, "--against")
    first = next((i for i, word in enumerate(words) if word.startswith("--")), len(words))
    if options.keys() & _MODEL and options.keys() & _DATA:
        return [*words[:first], "--config", str(path)]
    settings = [word for name, value in options.items() for word in (f"--{name}", *_values(value))]
    return [*words, *settings]  # the last of several options counts


def _values(value: Any) -> list[str]:
    if isinstance(value, list):
        return [str(one) for one in value]
    return [value if isinstance(value, str) else json.dumps(value)]
