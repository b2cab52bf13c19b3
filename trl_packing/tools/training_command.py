"""A training command without its launcher: its script, and the arguments of the trainer it builds.

train.py --my_option 8                          a script of anyone runs as it is
recipes/chat_data.py --model M --data D         a recipe, with short names written out
--model M --data D --prompt_column question     sft_packed.py, likewise

The script runs up to ``PackedSFTTrainer(…)``, so the rows are those that it would train.
"""

import copy
import inspect
import runpy
import sys
from collections.abc import Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn
from unittest.mock import patch

from trl_packing.data.printable import is_secret
from trl_packing.tools.options import UnknownOption, short_usage_errors, values_of

if TYPE_CHECKING:  # a command is read, and a mistake in it found, before TRL is imported
    from trl_packing.config import PackedSFTConfig
    from trl_packing.run.run import TrainerCall

# Recipes import this package, so it imports them only by name.
_RECIPES = "trl_packing.recipes"


class _Built(BaseException):
    """The script has built a trainer. No `except Exception` of the script catches this."""


def call_of_script(script: str, words: Sequence[str]) -> "TrainerCall":
    """Run `script` up to its first `PackedSFTTrainer`, and return the arguments of that.

    Its output goes to stderr, and settings that need another device are changed.

    Raises:
        ValueError: the script ends before, a recipe lacks an option, or another trainer is built.
    """
    from transformers import Trainer
    from trl import SFTTrainer

    from trl_packing.run.run import TrainerCall
    from trl_packing.trainer import PackedSFTTrainer

    name = Path(script).name
    folder = str(Path(script).resolve().parent)
    signature = inspect.signature(PackedSFTTrainer.__init__)

    def stop(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
        raise _Built(self, args, kwargs)

    with (
        fits_any_machine(),
        redirect_stdout(sys.stderr),
        patch.object(PackedSFTTrainer, "__init__", stop),
        patch.object(SFTTrainer, "__init__", stop),
        patch.object(Trainer, "__init__", stop),
        short_usage_errors(),
        patch.object(sys, "argv", [script, *words]),
        patch.object(sys, "path", [folder, *sys.path]),
    ):
        try:
            runpy.run_path(script, run_name="__main__")
        except _Built as built:
            trainer, args, kwargs = built.args
        except SystemExit as end:
            if isinstance(end.__context__, UnknownOption):  # as it is said in training
                raise end.__context__ from None
            raise ValueError(f"{name} ended before its trainer: {end.code}") from end
        else:
            raise ValueError(f"{name} builds no PackedSFTTrainer, so there is nothing to show")
    if not isinstance(trainer, PackedSFTTrainer):
        kind = f"{type(trainer).__module__.partition('.')[0]}.{type(trainer).__name__}"
        raise ValueError(f"{name} builds {kind}; only a PackedSFTTrainer can be shown")
    given = signature.bind(trainer, *args, **kwargs).arguments
    return TrainerCall(**{field.name: given.get(field.name) for field in fields(TrainerCall)})


def fits_any_machine() -> Any:
    """Change settings that need a GPU, or write somewhere, inside the block."""
    from transformers import TrainingArguments

    from trl_packing.pages.record import ON_ANY_MACHINE

    post_init = TrainingArguments.__post_init__

    def fit(self: Any) -> None:
        vars(self).update(ON_ANY_MACHINE)
        post_init(self)

    return patch.object(TrainingArguments, "__post_init__", fit)


@dataclass(frozen=True)
class TrainingCommand:
    """A training command without its launcher; a script that is not named is sft_packed.py.

    `options` are those of a recipe as texts, by name and without secrets; none of another script.
    """

    script: str
    words: tuple[str, ...]
    options: dict[str, str]
    is_named: bool

    @classmethod
    def from_words(cls, words: Sequence[str], *, needs_data: bool = True) -> "TrainingCommand":
        """Return the command of a script and its options, or of options alone.

        Raises:
            ValueError: the script does not exist, or nothing names data.
        """
        folder = import_module(_RECIPES).FOLDER.resolve()
        is_named = bool(words) and not words[0].startswith("-")
        script, *rest = words if is_named else [str(folder / "sft_packed.py"), *words]
        path = Path(script)
        path = path if path.is_file() else folder / path.name  # a recipe, from any folder
        if not path.is_file():
            raise ValueError(f"the script {script} does not exist (looked from {Path.cwd()})")
        found = values_of(rest) if path.resolve().parent == folder else {}
        found.pop("env", None)  # of the process, not of the run
        options = {name: str(value) for name, value in found.items() if not is_secret(name)}
        command = cls(str(path), tuple(rest), options, is_named)
        if needs_data and not command.names_data:
            raise ValueError(
                "name the model and the data (--model NAME --data FILE), a file with both "
                "(--config FILE), or the training script (recipes/sft_packed.py …)"
            )
        return command

    @property
    def names_data(self) -> bool:
        """Whether it names its data: by an option, a file, or in its script."""
        return self.is_named or not {"dataset_name", "datasets"}.isdisjoint(self.options)

    @cached_property
    def call(self) -> "TrainerCall":
        """The arguments of the trainer; the script runs once, and only now."""
        return call_of_script(self.script, self.words)

    def model_and_settings(self) -> tuple[Any, Any]:
        """Return the model, or its name, and the settings; only a named script loads data."""
        if self.is_named:
            return self.call.model, self.call.args
        if "model_name_or_path" not in self.options:
            raise ValueError("name the model (--model NAME), a file with it, or the script")
        data = () if self.names_data else ("--dataset_name", "none")
        with fits_any_machine():
            _, args, model = import_module(f"{_RECIPES}.sft_packed").parse([*self.words, *data])
        return model.model_name_or_path, args


def config_from_settings(settings: Sequence[str]) -> "PackedSFTConfig":
    """Return the config that the options of a command line describe, on any machine."""
    from trl import TrlParser

    from trl_packing.config import PackedSFTConfig

    with fits_any_machine(), short_usage_errors():
        (args,) = TrlParser((PackedSFTConfig,)).parse_args_into_dataclasses(
            args=["--output_dir", "unused", *settings], look_for_args_file=False
        )
    return args


def processing_class_of(model: Any, args: Any) -> Any:
    """Return the tokenizer or processor of a model or its name, as the trainer loads it."""
    from transformers import AutoProcessor

    from trl_packing.attention.model_facts import check_model, loading_options

    name = model if isinstance(model, str) else model.config.name_or_path
    check_model(name, args)
    return AutoProcessor.from_pretrained(name, **loading_options(args))


def configure_tokenizer(tokenizer: Any, args: Any) -> Any:
    """Return a copy of `tokenizer` with the tokens and the chat template that TRL's trainer sets.

    Raises:
        OSError: `chat_template_path` is neither a template nor a tokenizer.
    """
    from transformers import LlamaConfig, LlamaForCausalLM
    from trl.chat_template_utils import clone_chat_template

    from trl_packing.data.chat_template import tokenizer_in

    tokenizer = copy.deepcopy(tokenizer)
    path = args.chat_template_path
    inner = tokenizer_in(tokenizer)
    if args.eos_token is not None:
        inner.eos_token = args.eos_token
    if path is not None and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:  # it also resizes the embeddings of a model
        sizes = {"hidden_size": 2, "intermediate_size": 2, "num_attention_heads": 1}
        tiny = LlamaConfig(vocab_size=2, num_hidden_layers=0, num_key_value_heads=1, **sizes)
        _, tokenizer, _ = clone_chat_template(LlamaForCausalLM(tiny), tokenizer, path)
    inner.pad_token = args.pad_token or inner.pad_token or inner.eos_token
    return tokenizer
