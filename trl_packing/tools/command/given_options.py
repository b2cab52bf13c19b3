"""The options of a training command, on its command line and in its YAML file, by name.

--config run.yaml --max-length 512 --use_cpu
    →  in_file {…}, on_line {max_length: [512], use_cpu: []}
"""

import json
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from trl_packing.tools.command.spelling import suggest


@dataclass(frozen=True)
class GivenOptions:
    """The options of a command, by name.

    Attributes:
        config: the YAML file, if there is one.
        in_file: its keys and values.
        on_line: the words after each option of the command line; they override the file.
    """

    config: Path | None = None
    in_file: dict[str, Any] = field(default_factory=dict)
    on_line: dict[str, list[str]] = field(default_factory=dict)

    @classmethod
    def from_words(cls, words: Sequence[str]) -> "GivenOptions":
        """Return the options in the words of a command line.

        Raises:
            ValueError: a word belongs to no option, or the YAML file cannot be read.
        """
        on_line: dict[str, list[str]] = {}
        name = None
        for word in words:
            if word.startswith("--"):
                name, equals, value = word.removeprefix("--").partition("=")
                name = name.replace("-", "_")
                on_line[name] = [value] if equals else []
            elif name is None:
                raise ValueError(f"{word!r} belongs to no option; options are --NAME VALUE")
            else:
                on_line[name].append(word)
        if "config" not in on_line:
            return cls(on_line=on_line)
        given = on_line.pop("config")
        if len(given) != 1:
            raise ValueError("--config takes one YAML file")
        return cls(Path(given[0]), read_config(Path(given[0])), on_line)

    @property
    def names(self) -> set[str]:
        """The names of all options. The key ``env`` of a YAML file sets environment variables."""
        return {*self.in_file, *self.on_line} - {"env"}

    def spelled_out(self, known: Collection[str]) -> "GivenOptions":
        """Return these options with abbreviations written out, as `argparse` does.

        Raises:
            ValueError: an option is not among `known`, nor the beginning of one alone.
        """
        on_line = {_spell_out(name, known): words for name, words in self.on_line.items()}
        for name in sorted(self.in_file.keys() - {"env", *known}):
            hint = suggest(name, known)
            raise ValueError(f"{self.config}: the option {name!r} is unknown{hint}")
        return replace(self, on_line=on_line)

    def only(self, names: Collection[str]) -> "GivenOptions":
        """Return the options that are among `names`."""
        return replace(
            self,
            in_file={
                name: value for name, value in self.in_file.items() if name in {"env", *names}
            },
            on_line={name: words for name, words in self.on_line.items() if name in names},
        )

    def with_revision_of_model(self) -> "GivenOptions":
        """Return these options with `model_revision` inside `model_init_kwargs`."""
        in_file, on_line = dict(self.in_file), dict(self.on_line)
        revision = [in_file.pop("model_revision", None), *on_line.pop("model_revision", [])][-1]
        if revision is None:
            return self
        kwargs: Any = in_file.pop("model_init_kwargs", None) or {}
        if "model_init_kwargs" in on_line:
            kwargs = json.loads(" ".join(on_line["model_init_kwargs"]))
        on_line["model_init_kwargs"] = [json.dumps({**kwargs, "revision": str(revision)})]
        return replace(self, in_file=in_file, on_line=on_line)

    def words(self) -> list[str]:
        """Return the words of the command line, without ``--config``."""
        return [word for name, values in self.on_line.items() for word in (f"--{name}", *values)]


def read_config(path: Path, option: str = "--config") -> dict[str, Any]:
    """Return the keys and values of a YAML file, which `option` names.

    Raises:
        ValueError: it does not exist, or is no mapping.
    """
    import yaml

    if not path.is_file():
        raise ValueError(f"{option} {path} does not exist (looked from {Path.cwd()})")
    try:
        content = yaml.safe_load(path.read_text(encoding="utf-8"))
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        raise ValueError(f"{option} {path} cannot be read: {error}") from error
    if not isinstance(content, dict):
        raise ValueError(f"{option} {path} must contain lines 'option: value'")
    return content


def _spell_out(name: str, known: Collection[str]) -> str:
    if name in known:
        return name
    longer = [other for other in known if other.startswith(name)]
    if len(longer) == 1:
        return longer[0]
    hint = suggest(name, known, mark="--")
    raise ValueError(f"--{name} is unknown{hint or '; --help lists the options'}")
