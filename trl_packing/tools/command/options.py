"""Options of a training command before anything heavy is imported: typing errors, and YAML files.

--max_lenght 5          →  --max_lenght is unknown; did you mean --max_length?
max_steps: 3 (twice)    →  --config run.yaml gives 'max_steps' twice; keep one
"""

import argparse
import re
from collections.abc import Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from difflib import get_close_matches
from functools import cache
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NoReturn
from unittest.mock import patch

import yaml

from trl_packing.versions import TESTED, installed_version, is_tested

# Short names of options, and their names in training.
SHORT = {
    "model": "model_name_or_path",
    "data": "dataset_name",
    "split": "dataset_train_split",
    "revision": "model_revision",
}

# Files with the fields of a run's configs, by library.
_FIELDS = {
    "transformers": ("training_args.py",),
    "trl": ("trainer/*config*.py", "scripts/utils.py"),
    "trl_packing": ("config/*.py",),
}
_FIELD = re.compile(r"^    (\w+): ", re.MULTILINE)


def suggest(name: str, known: Collection[str], *, mark: str = "") -> str:
    """Return "; did you mean …?" with the most similar of `known`, or "".

    Args:
        name: as it was written.
        known: the names that exist.
        mark: stands before the suggestion, such as "--".

    Examples:
        >>> suggest("max_lenght", ["max_length", "max_steps"], mark="--")
        '; did you mean --max_length?'
        >>> suggest("zebra", ["max_length"])
        ''
    """
    folded = {other.lower().replace("-", "_"): other for other in sorted(known)}
    found = get_close_matches(name.lower().replace("-", "_"), folded, n=1, cutoff=0.7)
    return f"; did you mean {mark}{folded[found[0]]}?" if found else ""


def check_names(words: Sequence[str], known: Collection[str], alike: Collection[str] = ()) -> None:
    """Raise ValueError for the first option among `words` that is no beginning of a `known` one.

    Args:
        words: a command line.
        known: names of options.
        alike: further names to suggest.
    """
    for word in words:
        name = word.removeprefix("--").partition("=")[0].replace("-", "_")
        if word.startswith("--") and not any(other.startswith(name) for other in known):
            hint = suggest(name, {*known, *alike}, mark="--") or "; --help lists the options"
            raise ValueError(f"--{name} is unknown{hint}")


def check_typing(words: Sequence[str], more: Collection[str] = ()) -> None:
    """Raise ValueError for an option that no recipe has, before TRL is imported (10 seconds).

    The names are read from the files of installed libraries. With versions that are not tested,
    which may keep them elsewhere, this is left to the parser of the recipe.

    Args:
        words: a command line; or "--NAME" for each key of a file.
        more: further names to suggest.
    """
    if all(is_tested(name, installed_version(name) or "0") for name in TESTED):
        check_names(words, {*_known_names(), *SHORT}, more)


@cache
def _known_names() -> frozenset[str]:
    """Return the names of all options of all recipes, and some that are none."""
    files = [*import_module("trl_packing.recipes").FOLDER.glob("*.py")]
    for library, patterns in _FIELDS.items():
        spec = find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += [file for pattern in patterns for file in Path(folder).glob(pattern)]
    names = {name for file in files for name in _FIELD.findall(file.read_text(encoding="utf-8"))}
    return frozenset({"config", "help", *names, *(f"no_{name}" for name in names)})


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a training command by name: those of its file, then of its line.

    Raises:
        ValueError: a word belongs to no option, or the YAML file cannot be read.
    """
    on_line: dict[str, list[str]] = {}
    name = None
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            name = SHORT.get(name, name.replace("-", "_"))
            on_line[name] = [value] if equals else []
        elif name is None:
            raise ValueError(f"{word!r} belongs to no option; options are --NAME VALUE")
        else:
            on_line[name].append(word)
    config = on_line.pop("config", None)
    if config is not None and len(config) != 1:
        raise ValueError("--config takes one YAML file")
    in_file = read_config(Path(config[0])) if config else {}
    return in_file | {name: " ".join(values) for name, values in on_line.items()}


# --- YAML files -----------------------------------------------------------------------------------


class _Loader(yaml.SafeLoader):
    """Refuses a key that is given twice, of which YAML keeps the last one silently."""


def _mapping(loader: _Loader, node: yaml.MappingNode) -> dict[Any, Any]:
    keys = [key.value for key, _ in node.value if isinstance(key, yaml.ScalarNode)]
    twice = next((key for key in keys if keys.count(key) > 1 and key != "<<"), None)
    if twice is not None:
        raise ValueError(f"gives {twice!r} twice; keep one")
    loader.flatten_mapping(node)
    return loader.construct_mapping(node, deep=True)


_Loader.add_constructor(yaml.resolver.BaseResolver.DEFAULT_MAPPING_TAG, _mapping)


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Return the keys and values of a YAML file, which `option` names.

    Raises:
        ValueError: it does not exist, or is no mapping from names, each given once, to values.
    """
    if not path.is_file():
        raise ValueError(f"{option} {path} does not exist (looked from {Path.cwd()})")
    try:
        content = _Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    except ValueError as error:
        raise ValueError(f"{option} {path} {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{option} {path} must contain lines 'option: value'")
    for key in content:
        if not isinstance(key, str):
            raise ValueError(f"{option} {path} has the key {key!r}, which is no name of an option")
    return content


def check_values(config: Mapping[str, Any], types: Mapping[str, Any], path: str) -> None:
    """Raise ValueError for a value of a YAML file that is a list where none can be, or the reverse.

    Args:
        config: keys and values of the file.
        types: annotations of options, by name. Others are not checked.
        path: of the file.
    """
    for name, value in config.items():
        kinds = str(types.get(name, "list dict Any"))
        for kind, word in ((list, "a list"), (dict, "a mapping")):
            if isinstance(value, kind) and not re.search(rf"\b({kind.__name__}|Any)\b", kinds):
                raise ValueError(f"--config {path}: {name}={value!r} must be one value, not {word}")
        if name == "datasets" and not isinstance(value, list):
            raise ValueError(f"--config {path}: datasets={value!r} must be a list of entries")


@contextmanager
def short_usage_errors() -> Iterator[None]:
    """Make errors of `argparse` a ValueError, without the usage, which has hundreds of lines."""

    def fail(self: argparse.ArgumentParser, message: str) -> NoReturn:
        # argparse names both spellings of an option.
        raise ValueError(re.sub(r"(--\w+)/--[\w-]+", r"\1", message))

    with patch.object(argparse.ArgumentParser, "error", fail):
        yield
