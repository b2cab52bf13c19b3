"""The config and the tokenizer of a run, made from the options of its command line.

["--train_on", "assistant"]  →  PackedSFTConfig(train_on="assistant")
--eos_token, --pad_token, --chat_template_path  →  the tokenizer as TRL's trainer would change it
"""

import copy
from collections.abc import Mapping, Sequence
from dataclasses import fields
from pathlib import Path
from types import SimpleNamespace
from typing import Any, NoReturn

from transformers import AutoConfig, AutoProcessor
from trl import TrlParser
from trl.chat_template_utils import clone_chat_template

from trl_packing.config import PackedSFTConfig
from trl_packing.tools.command.options import suggest

# A CPU-only machine accepts these arguments. None of them affects what is previewed.
_FIXED = ("--output_dir", "unused", "--use_cpu", "--bf16", "false", "--report_to", "none")


class _Parser(TrlParser):
    def error(self, message: str) -> NoReturn:
        raise ValueError(message)  # without the usage, which has hundreds of lines


def config_from_settings(
    settings: Sequence[str], in_file: Mapping[str, Any] | None = None
) -> PackedSFTConfig:
    """Return the config that the options of a command line describe.

    Args:
        settings: the words of the command line.
        in_file: keys and values of a YAML file, which the command line overrides.

    Raises:
        ValueError: an option is unknown, or has a value that it cannot have.
    """
    parser = _Parser((PackedSFTConfig,))
    parser.set_defaults_with_config(**(in_file or {}))
    args, unknown = parser.parse_args_into_dataclasses(
        args=[*settings, *_FIXED], return_remaining_strings=True, look_for_args_file=False
    )
    if unknown:
        hint = suggest(unknown[0].lstrip("-"), [f.name for f in fields(PackedSFTConfig)], mark="--")
        raise ValueError(
            f"PackedSFTConfig has no option {' '.join(unknown)}{hint or '; check its spelling'}"
        )
    return args


def check_path_exists(option: str, name: str) -> None:
    """Raise ValueError if `name` is a path that does not exist; hub ids pass."""
    is_path = name.startswith((".", "/", "~")) or name.count("/") > 1
    if (is_path or name.endswith((".jinja", ".j2"))) and not Path(name).exists():
        raise ValueError(f"{option} {name} does not exist (looked from {Path.cwd()})")


def load_processing_class(model: str, settings: Sequence[str] = ()) -> Any:
    """Return the tokenizer or processor that a trainer with these settings would load.

    Raises:
        OSError: the model has neither.
        ValueError: `model` is a path that does not exist.
    """
    return processing_class_of(model, config_from_settings(settings))


def processing_class_of(model: Any, args: Any) -> Any:
    """Return the tokenizer or processor of `model`, a model or its name, as the trainer loads it.

    Raises:
        OSError: the model has neither.
        ValueError: `model` is a path that does not exist, or a package is missing.
    """
    name = model if isinstance(model, str) else model.config.name_or_path
    check_path_exists("the model", name)
    try:
        return AutoProcessor.from_pretrained(name, **_loading_options(args))
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
    return AutoConfig.from_pretrained(model, **_loading_options(args))


def config_value(model: Any, args: Any, name: str) -> int | None:
    """Return a number of the text model's config; None if `model` has no config, or no such number.

    Args:
        model: a model, or its name.
        args: the settings of the run.
        name: such as "hidden_size".
    """
    try:
        config = config_of(model, args)
    except (OSError, ValueError):  # a folder with only a tokenizer
        return None
    return getattr(config.get_text_config(), name, None)


def _loading_options(args: Any) -> dict[str, Any]:
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
        _check_in_vocabulary(inner, "eos_token", args.eos_token)
        inner.eos_token = args.eos_token
    path = args.chat_template_path
    if path is not None and Path(path).is_file() and path.endswith((".jinja", ".j2")):
        tokenizer.chat_template = Path(path).read_text(encoding="utf-8")
    elif path is not None:
        check_path_exists("chat_template_path", path)
        _, tokenizer, _ = clone_chat_template(_NoModel(), tokenizer, path)
    pad_token = args.pad_token or inner.pad_token or inner.eos_token
    if args.pad_token is not None:
        _check_in_vocabulary(inner, "pad_token", args.pad_token)
    inner.pad_token = pad_token
    return tokenizer


def _check_in_vocabulary(tokenizer: Any, name: str, token: str) -> None:
    if token not in tokenizer.get_vocab():
        raise ValueError(
            f"{name}={token!r} is not in the vocabulary of the tokenizer; name one of its tokens"
        )


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
