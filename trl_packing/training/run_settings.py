"""The settings, versions and machine of a run, as its page shows them.

args  →  all settings as JSON, without secrets; names of those that differ from their defaults
"""

import re
from dataclasses import MISSING, Field, fields
from platform import python_version
from typing import Any

import torch

from trl_packing.versions import TESTED, installed_version

# Values that TRL and transformers put in place of a default; no user has asked for them.
_RESOLVED: dict[str, tuple[Any, ...]] = {
    "bf16": (True,),
    "activation_checkpointing": (True,),
    "gradient_checkpointing": (True,),
    "pad_to_multiple_of": (None,),
    "disable_tqdm": (False, True),  # the level of transformers' log decides
    "dataloader_pin_memory": (False,),
    "report_to": ([],),
    "debug": ([],),
    "do_eval": (True,),
}
_PER_RUN = ("output_dir", "logging_dir", "run_name")

_SECRET = re.compile(r"(^|_)(token|tokens|auth|password|passwd|secret|key)$", re.IGNORECASE)
_SECRET_VALUE = re.compile(r"hf_[A-Za-z0-9]{16,}")
_TOKENS_OF_TEXT = ("eos_token", "pad_token", "bos_token", "unk_token")


def all_settings(args: Any) -> dict[str, Any]:
    """Return every setting of `args` as JSON; secrets are replaced by "…"."""
    plain = args.to_dict()  # hides every value whose name ends in _token
    plain |= {name: getattr(args, name) for name in _TOKENS_OF_TEXT if name in plain}
    return _without_secrets(plain)


def changed_settings(args: Any) -> list[str]:
    """Return the names of the settings of `args` that differ from their defaults."""
    derived = {"packing"} if getattr(args, "_packing_is_default", False) else set()
    return [
        f.name
        for f in fields(args)
        if f.init and f.name not in _PER_RUN and f.name not in derived and _is_changed(args, f)
    ]


def installed_versions() -> dict[str, str]:
    """Return the versions of Python, this package and the libraries below it."""
    found = {"python": python_version()}
    for name in ("trl-packing", *TESTED, "torch", "peft", "flash-attn", "deepspeed"):
        if (number := installed_version(name)) is not None:
            found[name] = number
    return found


def device_in_words(device: torch.device) -> str:
    """Return the name of a device, of a CPU the number of threads."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    if device.type == "cpu":
        threads = torch.get_num_threads()
        return f"CPU, {threads} thread{'s' * (threads != 1)}"
    return str(device)


def _is_changed(args: Any, setting: Field) -> bool:
    value, default = getattr(args, setting.name), setting.default
    if setting.default_factory is not MISSING:
        default = setting.default_factory()
    if setting.name == "accelerator_config":
        default = type(value)() if default is None and value is not None else default
    resolved = _RESOLVED.get(setting.name, ())
    # An enum compares with its text.
    return value != default and all(value != other for other in resolved)


def _without_secrets(value: Any) -> Any:
    if isinstance(value, dict):
        return {
            name: "…" if _is_secret(name, inner) else _without_secrets(inner)
            for name, inner in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [_without_secrets(inner) for inner in value]
    return _SECRET_VALUE.sub("…", value) if isinstance(value, str) else value


def _is_secret(name: Any, value: Any) -> bool:
    return (
        name not in _TOKENS_OF_TEXT
        and isinstance(value, str)
        and bool(value)
        and _SECRET.search(str(name)) is not None
    )
