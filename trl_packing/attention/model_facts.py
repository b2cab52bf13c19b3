"""Reads a model: the modules around it, its text config, and config fields that differ by layer.

Such a field (gemma4: heads of 256 with a window, of 512 without) raises if it is read from the
whole config, also by `getattr` with a default; `layer_values` reads it. Packed calls set the name
of their attention, because the backward reads it too, and the run around them restores the native
one, which pickles and copies always hold: no other process knows the packed one.
"""

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from inspect import signature
from pathlib import Path
from typing import Any

import torch
from torch import nn
from transformers import AutoConfig


@contextmanager
def temporarily(owner: Any, **attributes: Any) -> Iterator[None]:
    """Set attributes of `owner` inside the block, and restore them at its end."""
    before = {name: getattr(owner, name) for name in attributes}
    try:
        for name, value in attributes.items():
            setattr(owner, name, value)
        yield
    finally:
        for name, value in before.items():
            setattr(owner, name, value)


def loading_options(args: Any) -> dict[str, Any]:
    """Return the revision of the model of a run, and whether its code may run, as TRL does."""
    given = getattr(args, "model_init_kwargs", None) or {}
    trusts = given.get("trust_remote_code", getattr(args, "trust_remote_code", False))
    return {"revision": given.get("revision") or "main", "trust_remote_code": trusts}


def config_of(model: Any, args: Any) -> Any:
    """Return the config of a model, or of its name in a run with the settings `args`.

    Raises:
        ValueError: the name is no folder, and no hub id that can be loaded.
    """
    if not isinstance(model, str):
        return model.config
    try:
        return AutoConfig.from_pretrained(model, **loading_options(args))
    except (OSError, ValueError) as error:
        if Path(model).is_dir():
            raise  # the message names the file
        reason = str(error).split("\n")[0].rstrip(".")
        if model.startswith((".", "/", "~")) or model.count("/") > 1:
            reason = "no hub id looks like that"
        raise ValueError(
            f"the model {model!r} (model_name_or_path) is no folder, and cannot be loaded from the "
            f"hub or its cache ({reason}); name a folder with a model, or a hub id"
        ) from error


def check_model(model: Any, args: Any) -> None:
    """Raise ValueError for a name that is no folder, and no hub id that can be loaded."""
    if isinstance(model, str) and not Path(model).is_dir():
        config_of(model, args)


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, None if the model has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_values(config: Any, *names: str) -> list[Any]:
    """Return the values of a field in all layer configs, without None and with repetitions.

    Each layer's value is that of the first of `names` that it has; a list counts as several values.

    Examples:
        >>> from types import SimpleNamespace
        >>> layer_values(SimpleNamespace(head_dim=None, sliding_window=[8, None]), "sliding_window")
        [8]
    """
    found: list[Any] = []
    # transformers before 5.20 has no per-layer configs.
    differ = getattr(config, "is_heterogeneous", False)
    for layer in config.per_layer_config if differ else [config]:
        value = next((v for n in names if (v := getattr(layer, n, None)) is not None), None)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if value is not None]


# Names of the number of experts, of which TRL's head knows only the first.
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

_LENGTH_FIELDS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    *("local_attention", "local_attention_window_len", "keep_window_size"),
    *("attention_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length"),
    *("floor_scale", "log_scaling_n_floor", "rel_extent", "relative_max_distance"),
)


def length_constants(model: Any) -> list[int]:
    """Return the lengths in tokens at which a model may change its behavior, ascending."""
    config = text_config(model)
    values = [value for name in _LENGTH_FIELDS for value in layer_values(config, name)]
    return _positive([*values, *rope_thresholds(model)])


def rope_thresholds(model: Any) -> list[int]:
    """Return the lengths above which a document changes the rope of its batch, ascending."""
    config = text_config(model)
    # Either one rope for all layers, or one per layer type.
    ropes = layer_values(config, "rope_parameters", "rope_scaling")
    settings = [*ropes, *(kind for r in ropes for kind in r.values() if isinstance(kind, dict))]
    found = [one.get("original_max_position_embeddings") for one in settings]
    found += layer_values(config, "original_max_position_embeddings")
    if any("dynamic" in str(one.get("rope_type")) for one in settings):
        # With other ropes nothing changes at this length; learned positions just end.
        found += layer_values(config, "max_position_embeddings")
    return _positive(found)


def _positive(values: list[Any]) -> list[int]:
    return sorted({int(x) for x in values if isinstance(x, (int, float)) and x > 0})


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside PEFT's wrapper, or `model` without one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def invokes_adapter(model: Any) -> bool:
    """Whether an aLoRA adapter of PEFT is active from its last invocation in each row on."""
    adapters = getattr(model, "peft_config", None) or {}
    return any(getattr(one, "alora_invocation_tokens", None) for one in adapters.values())


def requires(model: nn.Module, argument: str) -> bool:
    """Whether `model.forward` cannot be called without `argument`."""
    parameter = signature(model.forward).parameters.get(argument)
    return parameter is not None and parameter.default is parameter.empty


def unwrap_model(model: Any) -> nn.Module:
    """Return the model inside DDP, DeepSpeed, torch.compile and PEFT."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        # The `config` of DeepSpeed's wrapper is DeepSpeed's dictionary.
        is_engine = any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
        if inner is None and (is_engine or not hasattr(model, "config")):
            inner = getattr(model, "module", None)
        inner = unwrap_peft(model) if inner is None else inner
        if inner is model:
            return model
        model = inner


_FIELD = "_attn_implementation_internal"  # of transformers' configs (5.23)

PACKED_NAMES: set[str] = set()  # of the registered kernels of this package


class InstalledName(str):
    """The name of an installed implementation; it pickles and copies as the native name.

    transformers may replace the one that was `requested`, by a kernel from a hub.
    """

    native: str | None
    requested: str

    def __new__(cls, name: str, native: str | None, requested: str) -> "InstalledName":
        made = super().__new__(cls, name)
        made.native = native
        made.requested = requested
        return made

    def __reduce_ex__(self, _protocol: Any) -> tuple[Any, ...]:
        return (type(None), ()) if self.native is None else (str, (str(self.native),))


def current_implementation(model: Any) -> str | None:
    """Return the `attn_implementation` of the model's text part."""
    return getattr(text_config(model), "_attn_implementation", None)


def native_implementation(model: Any) -> str | None:
    """Return the `attn_implementation` that the model had before a packed one was installed."""
    current = current_implementation(model)
    if isinstance(current, InstalledName):
        return current.native
    if current not in PACKED_NAMES:
        return current
    return "eager" if str(current).endswith("eager") else "sdpa"  # loaded with a packed one


@torch.compiler.disable  # compiled graphs of the earlier implementation are compiled again
def set_implementation(model: Any, implementation: str | None) -> None:
    """Make the text part of `model` compute attention by `implementation`; None: no-op."""
    current = current_implementation(model)
    if implementation in (None, current, getattr(current, "requested", None)):
        return
    before = [(config, vars(config).get(_FIELD)) for config in configs_of(model)]
    is_composite = "text_config" in (getattr(model.config, "sub_configs", None) or {})
    model.set_attn_implementation(
        {"text_config": implementation} if is_composite else implementation
    )
    for config, name in before:
        now = vars(config).get(_FIELD)
        if now is not None:
            native = name.native if isinstance(name, InstalledName) else name
            is_native = now == native
            vars(config)[_FIELD] = now if is_native else InstalledName(now, native, implementation)


def restore_implementation(model: Any) -> None:
    """Restore the native `attn_implementation` of `model`; no-op if none was installed."""
    for config in configs_of(model):
        name = vars(config).get(_FIELD)
        if isinstance(name, InstalledName):
            vars(config)[_FIELD] = name.native


def configs_of(model: Any) -> list[Any]:
    """Return every config of `model` once, with the configs of its parts at every depth."""
    configs: dict[int, Any] = {}
    found = [getattr(module, "config", None) for module in model.modules()]
    while found:
        config = found.pop()
        if hasattr(config, "__dict__") and id(config) not in configs:
            configs[id(config)] = config
            parts = getattr(config, "sub_configs", None) or ()
            found += [getattr(config, name, None) for name in parts]
    return list(configs.values())


def checkpointed_layers(model: nn.Module) -> list[nn.Module]:
    """Return the modules of `model` whose gradient checkpointing is on."""
    return [m for m in model.modules() if getattr(m, "gradient_checkpointing", False)]


@contextmanager
def without_checkpointing(model: nn.Module) -> Iterator[None]:
    """Turn gradient checkpointing off in the block.

    Under it, PEFT raises in a second forward of an aLoRA adapter before the backward of the first.
    """
    with ExitStack() as stack:
        for layer in checkpointed_layers(model):
            stack.enter_context(temporarily(layer, gradient_checkpointing=False))
        yield
