"""The lengths at which a model starts to behave differently, read from its config."""

from typing import Any

from trl_packing.model_config import layer_values, text_config

_LENGTH_FIELDS = (
    *("sliding_window", "sliding_window_size", "attention_window_size", "window_size"),
    *("local_attention", "local_attention_window_len", "keep_window_size"),
    *("attention_chunk_size", "local_attn_chunk_length", "lsh_attn_chunk_length"),
    *("floor_scale", "log_scaling_n_floor", "rel_extent", "relative_max_distance"),
)


def length_constants(model: Any) -> list[int]:
    """Return all such lengths: windows, chunks, scales by position, rope; ascending."""
    config = text_config(model)
    found = _positive(value for name in _LENGTH_FIELDS for value in layer_values(config, name))
    return sorted(found.union(rope_thresholds(model)))


def rope_thresholds(model: Any) -> list[int]:
    """Return the lengths above which a document changes the rope of its whole batch, ascending."""
    config = text_config(model)
    # One rope for all layers, or one for every kind of layer.
    ropes = layer_values(config, "rope_parameters", "rope_scaling")
    nested = [kind for rope in ropes for kind in rope.values() if isinstance(kind, dict)]
    settings = [*ropes, *nested]
    found = [one.get("original_max_position_embeddings") for one in settings]
    found += layer_values(config, "original_max_position_embeddings")
    if any("dynamic" in str(one.get("rope_type")) for one in settings):
        # Elsewhere nothing changes there, and learned positions end.
        found += layer_values(config, "max_position_embeddings")
    return sorted(_positive(found))


def _positive(values: Any) -> set[int]:
    return {int(value) for value in values if isinstance(value, (int, float)) and value > 0}
