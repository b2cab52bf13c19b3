"""Switches a model's `attn_implementation` to a packed kernel and back to the native one.

    model.config._attn_implementation     "sdpa"                  native, and restored after a run
                                          "packed_documents"      while packed rows are computed
    pickle, copy.deepcopy, torch.save     "sdpa"                  always: no other process knows
                                                                  the packed name

Attention reads the name in the backward too (gradient checkpointing), so it cannot be restored
after each forward. Packed calls set it, and the run or the evaluation around them restores it.
"""

from collections.abc import Iterator
from inspect import signature
from typing import Any

import torch

from trl_packing.attention.model_facts import text_config

_FIELD = "_attn_implementation_internal"  # of transformers' configs (5.23)

_packed_names: dict[str, str | None] = {}


def register_packed_name(name: str, tower: str | None = None) -> None:
    """Remember that the `attn_implementation` `name` is a packed kernel of this package.

    Args:
        name: for the text part of a model.
        tower: for its vision tower; None leaves that as it is.
    """
    _packed_names[name] = tower


def is_packed_implementation(implementation: str | None) -> bool:
    """Whether `implementation` names a packed kernel of this package."""
    return implementation in _packed_names


class InstalledName(str):
    """The name of an installed implementation; it pickles and copies as the native name."""

    native: str | None

    def __new__(cls, name: str, native: str | None) -> "InstalledName":
        made = super().__new__(cls, name)
        made.native = native
        return made

    def __reduce__(self) -> tuple[Any, ...]:
        return (type(None), ()) if self.native is None else (str, (str(self.native),))

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return self.__reduce__()


def current_implementation(model: Any) -> str | None:
    """Return the `attn_implementation` of the model's text part."""
    return getattr(text_config(model), "_attn_implementation", None)


def native_implementation(model: Any) -> str | None:
    """Return the `attn_implementation` that the model had before a packed one was installed."""
    current = current_implementation(model)
    if isinstance(current, InstalledName):
        return current.native
    if not is_packed_implementation(current):
        return current
    return "eager" if str(current).endswith("eager") else "sdpa"  # loaded with a packed one


@torch.compiler.disable  # compiled graphs of the earlier implementation are compiled again
def set_implementation(model: Any, implementation: str | None) -> None:
    """Make the text part of `model` compute attention by `implementation`; None: no-op."""
    if implementation is None or current_implementation(model) == implementation:
        return
    before = [(config, vars(config).get(_FIELD)) for config in _configs(model)]
    parts: Any = implementation
    if "text_config" in (getattr(model.config, "sub_configs", None) or {}):
        parts = {"text_config": implementation}
        if tower := _tower_implementation(model, implementation):
            parts["vision_config"] = tower
    model.set_attn_implementation(parts)
    for config, name in before:
        now = vars(config).get(_FIELD)
        if now is not None and now != name:
            native = name.native if isinstance(name, InstalledName) else name
            vars(config)[_FIELD] = now if now == native else InstalledName(now, native)


def _tower_implementation(model: Any, implementation: str) -> str | None:
    """Return what the vision tower of `model` computes attention by; None leaves it as it is.

    The tower of Qwen2.5-VL calls SDPA once for each window of an image, unless the name of its
    implementation contains "flash": then it calls that once, with the boundaries of all windows.
    """
    config = getattr(model.config, "vision_config", None)
    attentions = (
        module
        for module in model.modules()
        if "Attention" in type(module).__name__ and getattr(module, "config", None) is config
    )
    takes_boundaries = any("cu_seqlens" in signature(x.forward).parameters for x in attentions)
    if getattr(config, "_attn_implementation", None) != "sdpa" or not takes_boundaries:
        return None
    is_package = implementation.startswith("flash_attention_")
    return implementation if is_package else _packed_names.get(implementation)


def restore_implementation(model: Any) -> None:
    """Restore the native `attn_implementation` of `model`; no-op if none was installed."""
    for config in _configs(model):
        name = vars(config).get(_FIELD)
        if isinstance(name, InstalledName):
            vars(config)[_FIELD] = name.native


def _configs(model: Any) -> Iterator[Any]:
    """Yield every config of `model` once, with the configs of its parts at every depth."""
    found = [c for m in model.modules() if hasattr(c := getattr(m, "config", None), "__dict__")]
    seen: set[int] = set()
    while found:
        config = found.pop()
        if id(config) in seen:
            continue
        seen.add(id(config))
        yield config
        parts = (getattr(config, name, None) for name in getattr(config, "sub_configs", None) or ())
        found += [part for part in parts if hasattr(part, "__dict__")]
