"""The lengths at which a model starts to behave differently, read from its config."""

from typing import Any

_LENGTH_FIELDS = ("sliding_window", "attention_chunk_size", "floor_scale")


def length_constants(model: Any) -> list[int]:
    """Return all such lengths: windows, chunks, scales by position, rope; ascending."""
    config = text_config(model)
    found = _positive(getattr(config, name, None) for name in _LENGTH_FIELDS)
    return sorted(found.union(rope_thresholds(model)))


def rope_thresholds(model: Any) -> list[int]:
    """Return the lengths above which a document changes the rope of its whole batch, ascending."""
    config = text_config(model)
    rope = getattr(config, "rope_parameters", None) or getattr(config, "rope_scaling", None) or {}
    nested = [v for v in rope.values() if isinstance(v, dict)] or [rope]
    found = [settings.get("original_max_position_embeddings") for settings in nested]
    found.append(getattr(config, "original_max_position_embeddings", None))
    if any("dynamic" in str(settings.get("rope_type")) for settings in nested):
        # Elsewhere nothing changes there, and learned positions end.
        found.append(getattr(config, "max_position_embeddings", None))
    return sorted(_positive(found))


def text_config(model: Any) -> Any:
    """Return the config of the model's text part, None if it has no config at all."""
    config: Any = getattr(model, "config", None)
    return config.get_text_config() if hasattr(config, "get_text_config") else config


def _positive(values: Any) -> set[int]:
    return {int(value) for value in values if isinstance(value, (int, float)) and value > 0}
