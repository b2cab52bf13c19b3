"""A training command without its launcher: the script that it runs, and its options.

train.py --my_option 8                          a script of anyone runs as it is
-m my_package.train --my_option 8               likewise
recipes/chat_data.py --model M --data D         a recipe, with short names written out
--model M --data D --prompt_column question     sft_packed.py, likewise
"""

from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import dataclass, replace
from functools import cached_property
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from trl_packing.tools.command.options import SHORT, suggest, values_of
from trl_packing.tools.command.trainer_call import TrainerCall, call_of_script, fits_any_machine

# Recipes import this package, so it imports them only by name.
_RECIPES = "trl_packing.recipes"

# Options that name data.
_DATA = ("dataset_name", "datasets")

# Options that a file must not keep.
_SECRETS = ("hub_token", "push_to_hub_token")


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
        words = list(words)
        if words[:1] == ["-m"] and len(words) > 1:
            if find_spec(words[1].partition(".")[0]) is None:
                raise ValueError(f"there is no module {words[1]}")
            return cls(words[1], tuple(words[2:]), is_module=True)
        if not words or words[0].startswith("-"):
            return cls(str(_recipes() / "sft_packed.py"), _with_long_names(words), is_named=False)
        command = cls(_existing(words[0]), tuple(words[1:]))
        return replace(command, words=_with_long_names(words[1:])) if command.is_recipe else command

    @property
    def names_data(self) -> bool:
        """Whether it names its data: by an option, a file, or in its script."""
        return self.is_named or not values_of(self.words).keys().isdisjoint(_DATA)

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
        return {n: str(value) for n, value in given.items() if n not in (*_SECRETS, "env")}

    def trainer_call(self, *, on_any_machine: bool = True) -> TrainerCall:
        """Run the script up to its trainer.

        Args:
            on_any_machine: change settings that need another device, such as bf16.

        Raises:
            ValueError: the script refuses its options or its data, or builds no trainer.
        """
        if not self.is_named and "--config" not in self.words and not self.names_data:
            raise ValueError(
                "name the model and the data (--model NAME --data FILE), a file with both "
                "(--config FILE), or the training script (recipes/sft_packed.py …)"
            )
        try:
            return call_of_script(
                self.script,
                self.words,
                is_module=self.is_module,
                on_any_machine=on_any_machine,
            )
        except ValueError as error:
            if self.is_named:
                raise
            message = str(error).removeprefix(f"{Path(self.script).name}: ")
            raise ValueError(message) from error  # the user has not named this script

    @cached_property
    def call(self) -> TrainerCall:
        """The arguments of the trainer; the script runs once."""
        return self.trainer_call()

    def model_and_settings(self, *, on_any_machine: bool = True) -> tuple[Any, Any]:
        """Return the model, or its name, and the settings; only a script that is named loads data.

        Args:
            on_any_machine: change settings that need another device, such as bf16.

        Raises:
            ValueError: no model is named, or an option cannot be used.
        """
        if self.is_named:
            call = self.call if on_any_machine else self.trainer_call(on_any_machine=False)
            return call.model, call.args
        if "model_name_or_path" not in values_of(self.words):
            raise ValueError("name the model (--model NAME), a file with it, or the script")
        recipe = import_module(f"{_RECIPES}.sft_packed")
        with fits_any_machine() if on_any_machine else nullcontext():
            data = () if self.names_data else ("--dataset_name", "none")
            _, args, model = recipe.parse([*self.words, *data])
        recipe.set_model_options(args, model)
        return model.model_name_or_path, args


def _recipes() -> Path:
    return import_module(_RECIPES).FOLDER


def _existing(script: str) -> str:
    """Return the path of a script; a recipe need not be in the current folder."""
    recipe = _recipes() / Path(script).name
    if Path(script).is_file() or not recipe.is_file():
        if not Path(script).is_file():
            hint = suggest(recipe.name, [file.name for file in _recipes().glob("*.py")])
            raise ValueError(f"the script {script} does not exist (looked from {Path.cwd()}){hint}")
        return script
    return str(recipe)


def _with_long_names(words: Sequence[str]) -> tuple[str, ...]:
    """Return a command line with --model as --model_name_or_path, --data as --dataset_name, ..."""
    written = []
    for word in words:
        name, equals, value = word.partition("=")
        long = SHORT.get(name.removeprefix("--")) if name.startswith("--") else None
        written.append(word if long is None else f"--{long}{equals}{value}")
    return tuple(written)
