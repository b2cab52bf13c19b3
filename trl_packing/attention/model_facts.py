"""Reads a model: the modules around it, its text config, and config fields that differ by layer.

    gemma4      head_dim            256 with a window, 512 without
    dots3_note  num_attention_heads 64 with a window, 128 without
    any model   per_layer_config={3: {"sliding_window": 64}}

transformers raises `AmbiguousGlobalPerLayerAttributeError` if such a field is read from the whole
config, and `getattr` with a default does not catch it. Every field that may belong to a layer is
therefore read by `layer_values`.
"""

import inspect
from typing import Any

from torch import nn


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, None if the model has no config."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, or ``[config]`` if layers do not differ; None has none."""
    if config is None:
        return []
    # transformers before 5.20 has no per-layer configs.
    return list(config.per_layer_config) if _differs_between_layers(config) else [config]


def layer_config(config: Any, layer: int) -> Any:
    """Return the config of one layer."""
    return config.per_layer_config[layer] if _differs_between_layers(config) else config


def layer_values(config: Any, *names: str) -> list[Any]:
    """Return the values of a field in all layer configs, without None and with repetitions.

    Args:
        config: text config of a model, or None.
        *names: names of the field; each layer's value is that of the first name that it has. A
            list counts as several values.

    Examples:
        >>> from types import SimpleNamespace
        >>> layer_values(SimpleNamespace(head_dim=None, sliding_window=[8, None]), "sliding_window")
        [8]
    """
    found: list[Any] = []
    for layer in layer_configs(config):
        value = next((v for n in names if (v := getattr(layer, n, None)) is not None), None)
        found += value if isinstance(value, (list, tuple)) else [value]
    return [value for value in found if value is not None]


def _differs_between_layers(config: Any) -> bool:
    return bool(getattr(config, "is_heterogeneous", False))


# Names of the number of experts. TRL's head knows only the first one (granitemoe, phimoe, ... have
# others).
EXPERT_COUNTS = ("num_experts", "num_local_experts", "n_routed_experts", "moe_num_experts")

# --- lengths at which a model changes -------------------------------------------------------------

_LENGTH_FIELDS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    *("local_attention", "local_attention_window_len", "keep_window_size"),
    *("attention_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length"),
    *("floor_scale", "log_scaling_n_floor", "rel_extent", "relative_max_distance"),
)


def length_constants(model: Any) -> list[int]:
    """Return the lengths in tokens at which a model may change its behavior, ascending.

    These are windows, chunks, scales by position, and rope thresholds.
    """
    config = text_config(model)
    found = _positive(value for name in _LENGTH_FIELDS for value in layer_values(config, name))
    return sorted(found.union(rope_thresholds(model)))


def rope_thresholds(model: Any) -> list[int]:
    """Return the lengths above which a document changes the rope of its batch, ascending."""
    config = text_config(model)
    # Either one rope for all layers, or one per layer type.
    ropes = layer_values(config, "rope_parameters", "rope_scaling")
    nested = [kind for rope in ropes for kind in rope.values() if isinstance(kind, dict)]
    settings = [*ropes, *nested]
    found = [one.get("original_max_position_embeddings") for one in settings]
    found += layer_values(config, "original_max_position_embeddings")
    if any("dynamic" in str(one.get("rope_type")) for one in settings):
        # With other ropes nothing changes at this length; learned positions just end.
        found += layer_values(config, "max_position_embeddings")
    return sorted(_positive(found))


def _positive(values: Any) -> set[int]:
    return {int(value) for value in values if isinstance(value, (int, float)) and value > 0}


# --- modules around the model ---------------------------------------------------------------------


def unwrap_peft(model: Any) -> Any:
    """Return the transformers model inside PEFT's wrapper, or `model` without one."""
    return model.get_base_model() if hasattr(model, "get_base_model") else model


def invokes_adapter(model: Any) -> bool:
    """Whether an aLoRA adapter of PEFT is active from its last invocation in each row on."""
    adapters = getattr(model, "peft_config", None) or {}
    return any(getattr(one, "alora_invocation_tokens", None) for one in adapters.values())


def requires(model: nn.Module, argument: str) -> bool:
    """Whether `model.forward` cannot be called without `argument`."""
    parameter = inspect.signature(model.forward).parameters.get(argument)
    return parameter is not None and parameter.default is parameter.empty


def unwrap_model(model: Any) -> nn.Module:
    """Return the model inside DDP, DeepSpeed, torch.compile and PEFT."""
    while True:
        inner = getattr(model, "_orig_mod", None)
        if inner is None and (not hasattr(model, "config") or _is_deepspeed_engine(model)):
            inner = getattr(model, "module", None)
        if inner is None and hasattr(model, "get_base_model"):
            inner = model.get_base_model()
        if inner is None:
            return model
        model = inner


def _is_deepspeed_engine(model: Any) -> bool:
    """Whether `model` is DeepSpeed's wrapper, whose `config` is DeepSpeed's dictionary."""
    return any(kind.__name__ == "DeepSpeedEngine" for kind in type(model).__mro__)
