"""Fields of a model's configuration, which may differ between its layers.

    gemma4      head_dim            256 with a window, 512 without
    dots3_note  num_attention_heads 64 with a window, 128 without
    any model   per_layer_config={3: {"sliding_window": 64}}

transformers refuses to read such a field from the whole configuration, by an error that `getattr`
with a default does not catch (`AmbiguousGlobalPerLayerAttributeError`). So every field that could
be one of a layer is read here.
"""

from typing import Any


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, None if it has no config at all."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def layer_configs(config: Any) -> list[Any]:
    """Return the config of each layer, or `config` alone where layers have no values of their own.

    None has none.
    """
    if config is None:
        return []
    # transformers before 5.20 has no configs of layers.
    return list(config.per_layer_config) if _differs_between_layers(config) else [config]


def layer_config(config: Any, layer: int) -> Any:
    """Return the config of one layer."""
    return config.per_layer_config[layer] if _differs_between_layers(config) else config


def layer_values(config: Any, *names: str) -> list[Any]:
    """Return the values of a field over all layers, each as often as it is told; never None.

    names: of the field; a layer's value is that of the first name that it has. A list under that
        name is taken as values, too.

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
