"""A training command without its launcher: its script, and the arguments of the trainer it builds.

train.py --my_option 8                          a script of anyone runs as it is
-m my_package.train --my_option 8               likewise
recipes/chat_data.py --model M --data D         a recipe, with short names written out
--model M --data D --prompt_column question     sft_packed.py, likewise

The script runs up to ``PackedSFTTrainer(…)`` and does not train. It loads and converts its data
itself, so the rows are those that it would train.
"""

import copy
import inspect
import runpy
import sys
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager, redirect_stdout
from dataclasses import dataclass, fields
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn
from unittest.mock import patch

from transformers import AutoConfig, AutoProcessor, Trainer, TrainingArguments
from trl import SFTTrainer, TrlParser
from trl.chat_template_utils import clone_chat_template

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.options import SHORT, short_usage_errors, suggest, values_of
from trl_packing.trainer import PackedSFTTrainer

# A machine without a GPU accepts these arguments. None of them affects the data.
_ON_ANY_MACHINE = {
    "use_cpu": True,
    "bf16": False,
    "fp16": False,
    "bf16_full_eval": False,
    "fp16_full_eval": False,
    "tf32": None,
    "deepspeed": None,
    "fsdp": None,
    "report_to": "none",
    "push_to_hub": False,
}

# Recipes import this package, so it imports them only by name.
_RECIPES = "trl_packing.recipes"

# Options that a file must not keep, and one that is none of the run's.
_NOT_KEPT = ("hub_token", "push_to_hub_token", "env")

_SIGNATURE = inspect.signature(PackedSFTTrainer.__init__)


@dataclass(frozen=True)
class TrainerCall:
    """The arguments of `PackedSFTTrainer` that decide how data are prepared and packed.

    Attributes:
        model: a name, or a model.
        args: a `PackedSFTConfig` or a plain `SFTConfig`.
        train_dataset: rows, or a stream.
        processing_class: the tokenizer; None: the model's.
        data_collator: None, or a collator that finds the trained tokens.
        formatting_func: the user's function from a row to its text.
        eval_dataset: rows, a dictionary of data sets, or None.
        compute_loss_func: the user's loss, or None.
    """

    model: Any
    args: Any
    train_dataset: Any
    processing_class: Any = None
    data_collator: Any = None
    formatting_func: Any = None
    eval_dataset: Any = None
    compute_loss_func: Any = None


class _Built(BaseException):
    """The script has built a trainer. No `except Exception` of the script catches this."""


def call_of_script(script: str, words: Sequence[str], *, is_module: bool = False) -> TrainerCall:
    """Run `script` up to its first `PackedSFTTrainer`, and return the arguments of that.

    Its output goes to stderr. The trainer is not built: nothing is trained or written by it.
    Settings that need another device, such as bf16, are changed.

    Args:
        script: a Python file, or the name of a module.
        words: its command line.
        is_module: `script` is the name of a module.

    Raises:
        ValueError: the script ends before, or builds another trainer.
    """
    name = script.rpartition(".")[2] + ".py" if is_module else Path(script).name
    try:
        with _stops_at_trainer(script, words, is_module):
            if is_module:
                runpy.run_module(script, run_name="__main__", alter_sys=True)
            else:
                runpy.run_path(script, run_name="__main__")
    except _Built as built:
        if isinstance(built.args[0], TrainerCall):
            return built.args[0]
        other = f"{name} builds {built.args[0]}; only a PackedSFTTrainer can be shown"
        raise ValueError(other) from None
    except SystemExit as end:
        ended = f"{name} ended with status {end.code} before its trainer"
        raise ValueError(end.code if isinstance(end.code, str) else ended) from end
    raise ValueError(f"{name} builds no PackedSFTTrainer, so there is nothing to show")


@contextmanager
def _stops_at_trainer(script: str, words: Sequence[str], is_module: bool) -> Iterator[None]:
    """Make a trainer raise `_Built`, and errors one line."""
    folder = [] if is_module else [str(Path(script).resolve().parent)]
    with ExitStack() as stack:
        stack.enter_context(_fits_any_machine())
        stack.enter_context(redirect_stdout(sys.stderr))
        stack.enter_context(patch.object(PackedSFTTrainer, "__init__", _reach))
        for other in (SFTTrainer, Trainer):
            stack.enter_context(patch.object(other, "__init__", _refuse_trainer))
        stack.enter_context(short_usage_errors())
        stack.enter_context(patch.object(sys, "argv", [script, *words]))
        stack.enter_context(patch.object(sys, "path", [*folder, *sys.path]))
        yield


def _reach(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    given = _SIGNATURE.bind(self, *args, **kwargs).arguments
    given |= given.pop("kwargs", {})
    raise _Built(
        TrainerCall(**{field.name: given.get(field.name) for field in fields(TrainerCall)})
    )


def _refuse_trainer(self: Any, *args: Any, **kwargs: Any) -> NoReturn:
    kind = type(self)
    raise _Built(f"{kind.__module__.partition('.')[0]}.{kind.__name__}")


@contextmanager
def _fits_any_machine() -> Iterator[None]:
    """Change settings that need a GPU, or write somewhere, inside the block."""
    post_init = TrainingArguments.__post_init__

    def fit(self: Any) -> None:
        for name, value in _ON_ANY_MACHINE.items():
            if hasattr(self, name):
                setattr(self, name, value)
        post_init(self)

    with patch.object(TrainingArguments, "__post_init__", fit):
        yield


# --- the command ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class TrainingCommand:
    """A training command without its launcher.

    Attributes:
        script: a Python file, or the name of a module.
        words: its options.
        is_module: `script` is the name of a module.
        is_named: the user has named the script; otherwise it is sft_packed.py.
    """

    script: str
    words: tuple[str, ...]
    is_module: bool = False
    is_named: bool = True

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "TrainingCommand":
        """Return the command that `words` are.

        Args:
            words: a script and its options, ``-m`` and a module, or options alone.

        Raises:
            ValueError: the script does not exist.
        """
        if len(words) > 1 and words[0] == "-m":
            if find_spec(words[1].partition(".")[0]) is None:
                raise ValueError(f"there is no module {words[1]}")
            return cls(words[1], tuple(words[2:]), is_module=True)
        if not words or words[0].startswith("-"):
            return cls(str(_recipes() / "sft_packed.py"), _with_long_names(words), is_named=False)
        script = _existing(words[0])
        is_recipe = cls(script, ()).is_recipe
        return cls(script, _with_long_names(words[1:]) if is_recipe else tuple(words[1:]))

    @property
    def names_data(self) -> bool:
        """Whether it names its data: by an option, a file, or in its script."""
        return self.is_named or not values_of(self.words).keys().isdisjoint(
            ("dataset_name", "datasets")
        )

    @property
    def is_recipe(self) -> bool:
        """Whether the script is a recipe of this package."""
        return self.script.startswith(f"{_RECIPES}.") or (
            Path(self.script).resolve().parent == _recipes().resolve()
        )

    @property
    def options(self) -> dict[str, str]:
        """The options of a recipe as texts, by name; none of another script."""
        given = values_of(self.words) if self.is_recipe else {}
        return {name: str(value) for name, value in given.items() if name not in _NOT_KEPT}

    @cached_property
    def call(self) -> TrainerCall:
        """The arguments of the trainer; the script runs once, and only now.

        Raises:
            ValueError: the script refuses its options or its data, or builds no trainer.
        """
        if not self.is_named and "--config" not in self.words and not self.names_data:
            raise ValueError(
                "name the model and the data (--model NAME --data FILE), a file with both "
                "(--config FILE), or the training script (recipes/sft_packed.py …)"
            )
        try:
            return call_of_script(self.script, self.words, is_module=self.is_module)
        except ValueError as error:
            if self.is_named:
                raise
            message = str(error).removeprefix(f"{Path(self.script).name}: ")
            raise ValueError(message) from error  # the user has not named this script

    def model_and_settings(self) -> tuple[Any, Any]:
        """Return the model, or its name, and the settings; only a script that is named loads data.

        Raises:
            ValueError: no model is named, or an option cannot be used.
        """
        if self.is_named:
            return self.call.model, self.call.args
        if "model_name_or_path" not in values_of(self.words):
            raise ValueError("name the model (--model NAME), a file with it, or the script")
        recipe = import_module(f"{_RECIPES}.sft_packed")
        with _fits_any_machine():
            data = () if self.names_data else ("--dataset_name", "none")
            _, args, model = recipe.parse([*self.words, *data])
        recipe.set_model_options(args, model)
        return model.model_name_or_path, args


def _recipes() -> Path:
    return import_module(_RECIPES).FOLDER


def _existing(script: str) -> str:
    """Return the path of a script; a recipe need not be in the current folder."""
    recipe = _recipes() / Path(script).name
    if not Path(script).is_file() and not recipe.is_file():
        hint = suggest(recipe.name, [file.name for file in _recipes().glob("*.py")])
        raise ValueError(f"the script {script} does not exist (looked from {Path.cwd()}){hint}")
    return script if Path(script).is_file() else str(recipe)


def _with_long_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with --model as --model_name_or_path, --data as --dataset_name, ..."""
    written = []
    for word in words:
        name, equals, value = word.partition("=")
        long = SHORT.get(name.removeprefix("--")) if name.startswith("--") else None
        written.append(word if long is None else f"--{long}{equals}{value}")
    return tuple(written)


# --- settings, tokenizer and config without a trainer ---------------------------------------------


def config_from_settings(settings: Sequence[str]) -> PackedSFTConfig:
    """Return the config that the options of a command line describe, on any machine.

    Raises:
        ValueError: an option is unknown, or has a value that it cannot have.
    """
    with _fits_any_machine(), short_usage_errors():
        args, unknown = TrlParser((PackedSFTConfig,)).parse_args_into_dataclasses(
            args=["--output_dir", "unused", *settings],
            return_remaining_strings=True,
            look_for_args_file=False,
        )
    if unknown:
        known = [field.name for field in fields(PackedSFTConfig)]
        hint = suggest(unknown[0].lstrip("-"), known, mark="--") or "; check its spelling"
        raise ValueError(f"PackedSFTConfig has no option {' '.join(unknown)}{hint}")
    return args


def check_path_exists(option: str, name: str) -> None:
    """Raise ValueError if `name` is a path that does not exist; hub ids pass."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if (is_path or name.endswith((".jinja", ".j2"))) and not Path(name).exists():
        raise ValueError(f"{option} {name} does not exist (looked from {Path.cwd()})")


def processing_class_of(model: Any, args: Any) -> Any:
    """Return the tokenizer or processor of `model`, a model or its name, as the trainer loads it.

    Raises:
        OSError: the model has neither.
        ValueError: `model` is a path that does not exist, or a package is missing.
    """
    name = model if isinstance(model, str) else model.config.name_or_path
    check_path_exists("the model", name)
    try:
        return AutoProcessor.from_pretrained(name, **loading_options(args))
    except ImportError as error:  # processors of images need Pillow and torchvision
        reason = " ".join(str(error).split())[:200]
        raise ValueError(
            f"the processor of {name} needs a package: {reason}; pip install 'trl-packing[vision]'"
        ) from error


def config_of(model: Any, args: Any) -> Any:
    """Return the config of `model`, a model or its name.

    Raises:
        OSError: a folder or a hub id has none.
    """
    if not isinstance(model, str):
        return model.config
    return AutoConfig.from_pretrained(model, **loading_options(args))


def config_value(model: Any, args: Any, name: str) -> int | None:
    """Return a number of the text model's config, such as "hidden_size"; None if there is none."""
    try:
        config = config_of(model, args)
    except (OSError, ValueError):  # a folder with only a tokenizer
        return None
    return getattr(config.get_text_config(), name, None)


def loading_options(args: Any) -> dict[str, Any]:
    """Return the revision, and whether code of the model may run, as the run loads its model."""
    given = args.model_init_kwargs or {}
    trusts = given.get("trust_remote_code", args.trust_remote_code)
    return {"revision": given.get("revision") or "main", "trust_remote_code": trusts}


def configure_tokenizer(tokenizer: Any, args: Any) -> Any:
    """Return a copy of `tokenizer` with the tokens and the chat template that TRL's trainer sets.

    Raises:
        ValueError: `eos_token` or `pad_token` is not in the vocabulary.
        OSError: `chat_template_path` is neither a template nor a tokenizer.
    """
    tokenizer = copy.deepcopy(tokenizer)
    inner = getattr(tokenizer, "tokenizer", tokenizer)  # the tokenizer inside a processor
    if args.eos_token is not None:
        inner.eos_token = _in_vocabulary(inner, "eos_token", args.eos_token)
    path = args.chat_template_path
    if path is not None and Path(path).is_file() and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        check_path_exists("chat_template_path", path)
        _, tokenizer, _ = clone_chat_template(_NoModel(), tokenizer, path)
    inner.pad_token = inner.pad_token or inner.eos_token
    if args.pad_token is not None:
        inner.pad_token = _in_vocabulary(inner, "pad_token", args.pad_token)
    return tokenizer


def _in_vocabulary(tokenizer: Any, name: str, token: str) -> str:
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"{name}={token!r} is not in the vocabulary of the tokenizer; name one of its tokens"
        )
    return token


class _NoModel:
    """Stands in for the model whose embeddings `clone_chat_template` resizes."""

    def __init__(self) -> None:
        self.vocab_size = 0
        self.config = self.generation_config = SimpleNamespace(eos_token_id=None)
        self.config.get_text_config = lambda: self.config

    def can_generate(self) -> bool:
        return True

    def resize_token_embeddings(
        self, new_num_tokens: int, pad_to_multiple_of: int | None = None
    ) -> None:
        multiple = pad_to_multiple_of or 1
        self.vocab_size = -(-new_num_tokens // multiple) * multiple
