"""Options of a training command before anything heavy is imported, and errors as one line.

--max_lenght 5                      →  --max_lenght is unknown; did you mean --max_length?
max_steps: 3 (twice)                →  --config run.yaml gives 'max_steps' twice; keep one
an error inside a training step     →  a traceback, because no option caused it
"""

import argparse
import os
import re
import sys
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from functools import cache, wraps
from pathlib import Path
from typing import Any, NoReturn, ParamSpec, TypeVar

from trl_packing.data.printable import escape_hidden

# Short names of options, and their names in training.
SHORT = {
    "model": "model_name_or_path",
    "data": "dataset_name",
    "split": "dataset_train_split",
    "revision": "model_revision",
}

# An environment variable: any value brings the traceback back.
TRACEBACK = "TRL_PACKING_TRACEBACK"

P = ParamSpec("P")
T = TypeVar("T")


def suggest(name: str, known: Collection[str], *, mark: str = "") -> str:
    """Return "; did you mean …?" with the most similar of `known` after `mark`, or "".

    Examples:
        >>> suggest("max_lenght", ["max_length", "max_steps"], mark="--")
        '; did you mean --max_length?'
        >>> suggest("zebra", ["max_length"])
        ''
    """
    from difflib import get_close_matches

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


@cache
def known_names() -> frozenset[str]:
    """Return the names of all options of all recipes and more, without importing TRL (10 seconds).

    They are read from the files of the installed libraries. It is empty with versions that are not
    tested, which may keep them elsewhere.
    """
    from importlib import import_module
    from importlib.util import find_spec

    from trl_packing.versions import TESTED, is_tested

    if not all(map(is_tested, TESTED)):
        return frozenset()
    files = [
        *import_module("trl_packing.recipes").FOLDER.glob("*.py"),
        Path(__file__).parents[1] / "config.py",
    ]
    for library, pattern in (
        ("transformers", "training_args.py"),
        ("trl", "trainer/*config*.py"),
        ("trl", "scripts/utils.py"),
    ):
        spec = find_spec(library)
        for folder in (spec and spec.submodule_search_locations) or ():
            files += Path(folder).glob(pattern)
    fields = re.compile(r"^    (\w+): ", re.MULTILINE)
    names = {name for file in files for name in fields.findall(file.read_text(encoding="utf-8"))}
    return frozenset({"config", "help", *SHORT, *names, *(f"no_{name}" for name in names)})


def values_of(words: Sequence[str]) -> dict[str, Any]:
    """Return the options of a training command by name: those of its file, then of its line.

    Raises:
        ValueError: a word belongs to no option, or the YAML file cannot be read.
    """
    on_line: dict[str, list[str]] = {}
    for word in words:
        if word.startswith("--"):
            name, equals, value = word.removeprefix("--").partition("=")
            values = [value] if equals else []
            on_line[SHORT.get(name, name.replace("-", "_"))] = values
        elif not on_line:
            raise ValueError(f"{word!r} belongs to no option; options are --NAME VALUE")
        else:
            values.append(word)
    files = on_line.pop("config", None)
    if files is not None and len(files) != 1:
        raise ValueError("--config takes one YAML file")
    in_file = read_config(Path(files[0])) if files else {}
    return in_file | {name: " ".join(values) for name, values in on_line.items()}


def with_long_names(words: Sequence[str]) -> list[str]:
    """Return a command line with --model as --model_name_or_path, --data as --dataset_name, ..."""
    long = {f"--{short}": f"--{name}" for short, name in SHORT.items()}
    parts = (word.partition("=") for word in words)
    return [long.get(name, name) + equals + value for name, equals, value in parts]


def read_config(path: Path) -> dict[str, Any]:
    """Return the keys and values of the YAML file of --config.

    Raises:
        ValueError: it does not exist, or is no mapping from names, each given once, to values.
    """
    import yaml

    class Loader(yaml.SafeLoader):
        """Refuses a key that is given twice, of which YAML keeps the last one silently."""

        def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
            keys = [key.value for key, _ in node.value if key.value != "<<"]
            if twice := [key for key in keys if keys.count(key) > 1]:
                raise ValueError(f"it gives {twice[0]!r} twice; keep one")
            return super().construct_mapping(node, deep)

    if not path.is_file():
        raise ValueError(f"--config {path} does not exist (looked from {Path.cwd()})")
    try:
        content = Loader(path.read_text(encoding="utf-8")).get_single_data()
    except (yaml.YAMLError, ValueError) as error:
        raise ValueError(f"--config {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"--config {path} must contain lines 'option: value'")
    if wrong := [key for key in content if not isinstance(key, str)]:
        raise ValueError(f"--config {path} has the key {wrong[0]!r}, which is no name of an option")
    return content


# --- errors as one line ---------------------------------------------------------------------------


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Set an attribute inside the block, as `unittest.mock.patch`, which is slow to import."""
    before = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, before)


def short_usage_errors() -> Any:
    """Make errors of `argparse` a ValueError, without the usage, which has hundreds of lines."""

    def fail(self: argparse.ArgumentParser, message: str) -> NoReturn:
        # argparse names both spellings of an option.
        raise ValueError(re.sub(r"(--\w+)/--[\w-]+", r"\1", message))

    return replaced(argparse.ArgumentParser, "error", fail)


def message_of(error: Exception) -> str | None:
    """Return `error` as one line, or None if its traceback should be printed.

    The traceback is printed for errors inside a training step, and for every error if the
    environment variable TRL_PACKING_TRACEBACK is set.
    """
    from traceback import walk_tb

    frames = (frame.f_code.co_name for frame, _ in walk_tb(error.__traceback__))
    if os.environ.get(TRACEBACK) or "training_step" in frames:
        return None
    words = " ".join(escape_hidden(str(error)).split())
    # Errors with a message for the user. Other errors may be bugs, so their type is named.
    if isinstance(error, (ValueError, OSError, ImportError)) and words:
        return words
    named = f"{type(error).__name__}: {words}" if words else type(error).__name__
    return f"{named} ({TRACEBACK}=1 shows where)"


def exits_in_one_line(main: Callable[P, T]) -> Callable[P, T]:
    """Wrap `main` of a script: an error ends the process with one line and status 1.

    The line starts with the name of the script, and with the rank if there are several.
    """
    program = Path(main.__code__.co_filename).name

    @wraps(main)
    def run(*args: P.args, **kwargs: P.kwargs) -> T:
        try:
            with short_usage_errors():
                return main(*args, **kwargs)
        except Exception as error:
            message = message_of(error)
            if message is None:
                raise
            several = int(os.environ.get("WORLD_SIZE", "1")) > 1
            rank = f" (rank {os.environ.get('RANK', '0')})" * several
            sys.exit(f"{program}{rank}: {message}")

    return run
