"""A training command without its launcher: the script that it runs, and its options.

    recipes/lora.py --config c.yaml --lora_r 8      a script of anyone, named
    --config recipes/lora_8b.yaml                   the recipe that the comment of the file names
    --model M --data D --prompt_column question     the first recipe that takes these options

A recipe is found in this package, so it need not be in the current folder.
"""

import ast
import re
from collections.abc import Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, fields
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from tempfile import NamedTemporaryFile
from typing import Any

import yaml
from trl import ModelConfig

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.command.given_options import GivenOptions
from trl_packing.tools.command.settings import config_from_settings
from trl_packing.tools.command.spelling import suggest
from trl_packing.tools.command.trainer_call import TrainerCall, call_of_script

# Recipes import this package, so it imports them only by name.
_RECIPES = "trl_packing.recipes"

# Without a script and without a file that names one: the first of these that takes all options.
_BY_OPTIONS = ("full", "lora", "dora", "evaluation", "streaming", "sft_packed", "compare_packing")

# Recipes with the options of TRL's sft.py, and the dataclass that adds theirs.
_LIKE_TRL = {
    "sft_packed": ("sft_packed", "RecipeArguments"),
    "compare_packing": ("compare_packing", "CompareArguments"),
    "padding_free": ("compare_packing", "CompareArguments"),
}

# Options that name data.
_DATA = ("dataset_name", "datasets")

# Packages that train an adapter. The data of these recipes are those of full.py.
_ADAPTERS = {"lora": ("peft",), "dora": ("peft",), "qlora": ("peft", "bitsandbytes")}

# Options that a file must not keep.
_SECRETS = ("hub_token", "push_to_hub_token")

# Short names of options, and their names in the recipes.
_SHORT = {
    "model": "model_name_or_path",
    "data": "dataset_name",
    "split": "dataset_train_split",
    "revision": "model_revision",
}


@dataclass(frozen=True)
class TrainingCommand:
    """A training command without its launcher.

    Attributes:
        script: a Python file, or the name of a module.
        words: its options.
        is_module: `script` is the name of a module.
        in_file: keys and values of a YAML file that the options refer to as ``--config``.
        why: why this script, if no script was named: a sentence for the user.
    """

    script: str
    words: tuple[str, ...]
    is_module: bool = False
    in_file: dict[str, Any] | None = None
    why: str = ""

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "TrainingCommand":
        """Return the command that `words` are.

        Args:
            words: a script and its options, ``-m`` and a module, or options alone.

        Raises:
            ValueError: the script does not exist, or no recipe takes these options.
        """
        named, rest = _split_script(words)
        if named is not None and not _is_recipe(named):
            return cls(named, tuple(rest), is_module=words[0] == "-m")
        options = _with_long_names(GivenOptions.from_words(rest))
        if named is not None:
            return _recipe_command(
                Path(named.removesuffix(".py")).name.rpartition(".")[2], options, ""
            )
        return _recipe_command(*_recipe_of(options))

    def trainer_call(self) -> TrainerCall:
        """Run the script up to its trainer.

        Raises:
            ValueError: the script refuses its options or its data, or builds no trainer.
        """
        try:
            with self._file() as file:
                return call_of_script(self.script, [*file, *self.words], is_module=self.is_module)
        except ValueError as error:
            if not self.why:
                raise
            # The user has not named this script.
            raise ValueError(str(error).removeprefix(f"{Path(self.script).name}: ")) from error

    @contextmanager
    def _file(self) -> Iterator[list[str]]:
        if self.in_file is None:
            yield []
            return
        with NamedTemporaryFile("w", suffix=".yaml", encoding="utf-8") as file:
            yaml.safe_dump(self.in_file, file, allow_unicode=True)
            file.flush()
            yield ["--config", file.name]


def _split_script(words: Sequence[str]) -> tuple[str | None, list[str]]:
    """Return the script or module that `words` name, or None, and the words after it."""
    words = list(words)
    if words[:1] == ["-m"] and len(words) > 1:
        if not _is_recipe(words[1]) and find_spec(words[1].partition(".")[0]) is None:
            raise ValueError(f"there is no module {words[1]}")
        return words[1], list(words[2:])
    if not words or words[0].startswith("-"):
        return None, list(words)
    if not (_is_recipe(words[0]) or Path(words[0]).is_file()):
        hint = suggest(Path(words[0]).name, [f"{name}.py" for name in recipes()])
        raise ValueError(f"the script {words[0]} does not exist (looked from {Path.cwd()}){hint}")
    return words[0], list(words[1:])


# --- recipes --------------------------------------------------------------------------------------


@cache
def recipes() -> dict[str, Path]:
    """Return the recipes that build a trainer, and their files, by name."""
    folder = Path(import_module(_RECIPES).FOLDER)
    files = {path.stem: path for path in sorted(folder.glob("*.py"))}
    return {name: path for name, path in files.items() if name in _LIKE_TRL or _own(path)}


def _is_recipe(script: str) -> bool:
    """Whether `script` is the file or the module of a recipe, or the name of one not here."""
    path = Path(script)
    if script.startswith(f"{_RECIPES}."):
        return script.rpartition(".")[2] in recipes()
    if path.suffix == ".py" and path.stem in recipes():
        return not path.exists() or path.resolve() == recipes()[path.stem].resolve()
    return False


def _own(path: Path) -> set[str]:
    """Return the fields of the class `Arguments` of a recipe.

    The file is read and not imported, because a recipe may need a package that is not installed.
    """
    classes = [node for node in ast.parse(path.read_text()).body if isinstance(node, ast.ClassDef)]
    (body, *_) = [*(node.body for node in classes if node.name == "Arguments"), []]
    targets = [node.target for node in body if isinstance(node, ast.AnnAssign)]
    return {target.id for target in targets if isinstance(target, ast.Name)}


@cache
def _options_of(recipe: str) -> frozenset[str]:
    """Return the names of all options of a recipe."""
    if recipe not in _LIKE_TRL:
        return frozenset(_own(recipes()[recipe]) | _names(PackedSFTConfig))
    module, arguments = _LIKE_TRL[recipe]
    own = getattr(import_module(f"{_RECIPES}.{module}"), arguments)
    return frozenset(_names(own) | _names(PackedSFTConfig) | _names(ModelConfig))


def _names(kind: Any) -> set[str]:
    # A flag that is on by default has an option that turns it off.
    return {f.name for f in fields(kind)} | {
        f"no_{f.name}" for f in fields(kind) if f.default is True
    }


@cache
def known_options() -> frozenset[str]:
    """Return the names of the options of all recipes."""
    return frozenset().union(*map(_options_of, recipes()), ["model_revision", *_SHORT])


def _with_long_names(options: GivenOptions, others: Collection[str] = ()) -> GivenOptions:
    on_line = {_SHORT.get(name, name): words for name, words in options.on_line.items()}
    options = GivenOptions(options.config, options.in_file, on_line)
    return options.spelled_out(known_options() | set(others))


def _recipe_of(options: GivenOptions) -> tuple[str, GivenOptions, str]:
    """Return the recipe that a command without a script means, its options, and why it is this.

    Raises:
        ValueError: there is none.
    """
    if "model_name_or_path" not in options.names or options.names.isdisjoint(_DATA):
        raise ValueError(
            "name the model and the data (--model NAME --data FILE), a file with both "
            "(--config FILE), or the training script (recipes/sft_packed.py …)"
        )
    takes_revision = options.names - {"model_revision"}
    for recipe in _named_in_comments(options.config):
        if takes_revision <= _options_of(recipe):
            return recipe, options, f"{recipe}.py trains it, which {options.config} names"
    for recipe in _BY_OPTIONS:
        if takes_revision <= _options_of(recipe):
            return recipe, options, f"{recipe}.py trains it; to see another script, name it first"
    names = " and ".join(f"--{name}" for name in sorted(takes_revision - _options_of("full")))
    raise ValueError(f"no recipe takes {names} together; name the training script first")


def _named_in_comments(config: Path | None) -> list[str]:
    """Return the recipes that the comments of a YAML file name, as those in `recipes/` do."""
    if config is None:
        return []
    lines = config.read_text(encoding="utf-8").splitlines()
    comments = "\n".join(line for line in lines if line.startswith("#"))
    found = re.findall(r"\brecipes[/.](\w+)\.py\b|-m trl_packing\.recipes\.(\w+)", comments)
    return [name for pair in found for name in pair if name in recipes()]


def _recipe_command(recipe: str, options: GivenOptions, why: str) -> TrainingCommand:
    """Return the command that runs a recipe, or full.py for one whose packages are missing."""
    missing = [name for name in _ADAPTERS.get(recipe, ()) if find_spec(name) is None]
    if missing:
        options = options.only(_options_of("full") | {"model_revision"})
        why = f"full.py trains it, and {recipe}.py too ({missing[0]} is not installed)"
        recipe = "full"
    if "model_revision" not in _options_of(recipe):
        options = options.with_revision_of_model()
    in_file = options.in_file if options.config is not None else None
    return TrainingCommand(str(recipes()[recipe]), tuple(options.words()), in_file=in_file, why=why)


# --- a model without data -------------------------------------------------------------------------


def options_of_words(words: Sequence[str], others: Collection[str] = ()) -> GivenOptions:
    """Return the options of a training command with their long names, whatever its script.

    Args:
        words: a script, which may be left out, and its options.
        others: names of options that no recipe has.

    Raises:
        ValueError: an option is unknown.
    """
    return _with_long_names(GivenOptions.from_words(_split_script(words)[1]), others)


def names_data(words: Sequence[str]) -> bool:
    """Return whether a training command names its data: by an option, a file, or in its script."""
    if _split_script(words)[0] is not None:
        return True
    return not options_of_words(words).names.isdisjoint(_DATA)


def options_of_recipe(words: Sequence[str]) -> dict[str, str]:
    """Return the options of a recipe's command as texts, by name; none of another script."""
    script = _split_script(words)[0]
    if script is not None and not _is_recipe(script):
        return {}
    options = options_of_words(words)
    in_file = {name: str(value) for name, value in options.in_file.items() if name != "env"}
    given = in_file | {name: " ".join(values) for name, values in options.on_line.items()}
    return {name: value for name, value in given.items() if name not in _SECRETS}


def model_of_words(words: Sequence[str]) -> tuple[Any, Any]:
    """Return the model of a training command, a model or its name, and its settings.

    Raises:
        ValueError: no model is named, or an option cannot be used.
    """
    if _split_script(words)[0] is not None:
        call = TrainingCommand.from_words(words).trainer_call()
        return call.model, call.args
    options = options_of_words(words).with_revision_of_model()
    name = options.on_line.get("model_name_or_path", [options.in_file.get("model_name_or_path")])
    if not name or not name[0]:
        raise ValueError("name the model (--model NAME), a file with it, or the training script")
    options = options.only(_names(PackedSFTConfig))
    return str(name[0]), config_from_settings(options.words(), options.in_file)
