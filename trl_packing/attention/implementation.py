"""The `attn_implementation` of a model while ours is in use, and the one that it came with.

    model.config._attn_implementation     "sdpa"                  as it came, and as we leave it
                                          "packed_documents"      while packed rows are computed
    pickle, copy.deepcopy, torch.save     "sdpa"                  always: ours is known here only

Attention reads the name in the backward too (gradient checkpointing), so it cannot go back after
each forward. Packed calls set it, and whoever drives them (a run, an evaluation) puts it back.
"""

from collections.abc import Iterator
from typing import Any

import torch

from trl_packing.models.introspection import text_config

_FIELD = "_attn_implementation_internal"  # of transformers' configs (5.23)


class InstalledName(str):
    """The name of an implementation; pickled and copied, it is `native`, the model's."""

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


@torch.compiler.disable  # a graph made before is made anew
def set_implementation(model: Any, implementation: str | None) -> None:
    """Let the text part of `model` compute attention by `implementation`; None changes nothing."""
    if implementation is None or current_implementation(model) == implementation:
        return
    before = [(config, vars(config).get(_FIELD)) for config in _configs(model)]
    composite = "text_config" in (getattr(model.config, "sub_configs", None) or {})
    model.set_attn_implementation({"text_config": implementation} if composite else implementation)
    for config, name in before:
        now = vars(config).get(_FIELD)
        if now is not None and now != name:
            native = name.native if isinstance(name, InstalledName) else name
            vars(config)[_FIELD] = now if now == native else InstalledName(now, native)


def restore_implementation(model: Any) -> None:
    """Give `model` the `attn_implementation` back that it came with; no-op if it has it."""
    for config in _configs(model):
        name = vars(config).get(_FIELD)
        if isinstance(name, InstalledName):
            vars(config)[_FIELD] = name.native


def _configs(model: Any) -> Iterator[Any]:
    """Yield every config of `model`, of its parts and of their parts, once."""
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
