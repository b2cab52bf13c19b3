"""A tiny random model of every causal language model architecture that transformers knows.

    names()                   ["afmoe", "apertus", …, "zaya"] of the installed version, and VARIANTS
    vision_names()            ["aria", …, "vipllava"]: vision-language models, used on text only
    tiny_config("gemma3")     width 64, a vocabulary of 128, one layer of every kind, windows of 8
    tiny_model("gemma3")      the causal language model of it: float32, CPU, random weights
    full_size_model("gemma3") the same class with its default configuration, on the meta device

Tiny models serve to *measure* how an architecture treats packed rows. Their configurations follow
the tables of `tiny_tables.py`, which are small in ways that hide nothing. Weights are large, and
none is zero, because a path that adds nothing hides its leak. There is no dropout and no jitter.
"""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from transformers import (
    CONFIG_MAPPING,
    MODEL_FOR_CAUSAL_LM_MAPPING,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES,
)

from architectures.tiny_tables import (
    HEAD_SIZES,
    NOT_BUILT,
    ONE_OR_TWO,
    SPECIAL,
    TINY,
    VARIANTS,
    VOCAB_SIZE,
)

#: Ids that a document may hold. Lower ids are pad, bos and eos; higher ones stand for images etc.
DOCUMENT_IDS = range(3, 120)


class NotBuilt(Exception):
    """There is no tiny model of this architecture. The message gives the reason in a sentence."""


def names() -> list[str]:
    """Return every model type that `AutoModelForCausalLM` knows, and `VARIANTS`, sorted."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def vision_names() -> list[str]:
    """Return the model types that only `AutoModelForImageTextToText` knows, sorted."""
    return sorted(
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    )


def tiny_config(name: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return a new tiny configuration of an architecture, or raise NotBuilt.

    Args:
        name: one of `names()` or `vision_names()`.
        changes: other values, also of its parts: ``{"vision_config": {"patch_size": 4}}``.
    """
    model_type, variant = VARIANTS.get(name, (name, {}))
    if name in NOT_BUILT:
        raise NotBuilt(f"{name} is not built: {NOT_BUILT[name]}")
    try:
        return _build(CONFIG_MAPPING[model_type], {**variant, **(changes or {})})
    except Exception as error:  # a class that the tables do not know may raise anything
        raise NotBuilt(f"{name} is not built: {_one_line(error)}") from error


def tiny_model(name: str, **settings: Any) -> PreTrainedModel:
    """Return a new tiny model in training mode, always with the same weights; or raise NotBuilt.

    `name` is one of `names()` or `vision_names()`, `settings` are other values of its config.
    """
    model_class, config = _class_and_config(name, tiny_config(name))
    for setting, value in settings.items():
        setattr(config, setting, value)
    return build_tiny(name, model_class, config)


def build_tiny(name: str, model_class: Any, config: Any) -> PreTrainedModel:
    """Return a new model of a tiny configuration in training mode, or raise NotBuilt."""
    attention = {"": "sdpa" if model_class._supports_sdpa else "eager"}
    for part in config.sub_configs:  # SDPA for text does not imply SDPA for images
        attention[part] = "eager" if part.startswith(("vision", "audio")) else attention[""]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(0)
        options = {"attn_implementation": attention, "dtype": torch.float32}
        try:
            model = model_class._from_config(config, **options)
        except Exception as error:  # most often a package that is not installed
            raise NotBuilt(f"{name} is not built: {_one_line(error)}") from error
        _strengthen(model)
    return model.train()


def full_size_model(name: str) -> PreTrainedModel:
    """Return a new model with its default configuration, on the meta device, or raise NotBuilt."""
    model_type, changes = VARIANTS.get(name, (name, {}))
    try:
        config = CONFIG_MAPPING[model_type](**copy.deepcopy(changes))
        model_class, config = _class_and_config(name, config)
        with torch.device("meta"):
            return model_class._from_config(config)
    except Exception as error:
        raise NotBuilt(f"{name} is not built: {_one_line(error)}") from error


def _class_and_config(name: str, config: Any) -> tuple[Any, Any]:
    is_vision = name in vision_names()
    classes: Any = (
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING if is_vision else MODEL_FOR_CAUSAL_LM_MAPPING
    )
    model_class = classes[type(config)]
    for part in config.sub_configs:  # a text model with the name of a composite
        if type(getattr(config, part)) is model_class.config_class:
            return model_class, getattr(config, part)
    return model_class, config


def _build(config_class: type[PreTrainedConfig], changes: Mapping[str, Any]) -> PreTrainedConfig:
    parts = _parts(config_class)
    own = {name: value for name, value in changes.items() if name not in parts}
    special = {**SPECIAL.get(config_class.model_type, {}), **own}
    defaults = {field.name: field.default for field in dataclasses.fields(config_class)}
    values = {name: _tiny_value(name, default) for name, default in defaults.items()}
    values = {name: value for name, value in values.items() if value is not dataclasses.MISSING}
    for part, part_class in parts.items():
        values[part] = _build(part_class, changes.get(part, {}))
    if "kv_lora_rank" in defaults:  # latent attention: each head has separate keys
        values["num_key_value_heads"] = values["num_attention_heads"]
    elif isinstance(defaults.get("head_dim"), int):
        values["head_dim"] = _head_dim(defaults, values)
        if defaults.get("swa_head_dim") == defaults["head_dim"]:
            values["swa_head_dim"] = values["head_dim"]
    values |= special
    num_layers = config_class.attribute_map.get("num_hidden_layers", "num_hidden_layers")
    chosen = {num_layers, "layer_types", "mlp_layer_types", "layers_block_type"} & special.keys()
    if num_layers in defaults and not chosen:
        values |= _one_layer_of_each_kind(config_class, values, num_layers)
    config = config_class(**copy.deepcopy(values))  # classes change these values
    _shorten(getattr(config, "rope_parameters", None))
    return config


def _parts(config_class: type[PreTrainedConfig]) -> dict[str, type[PreTrainedConfig]]:
    """Return the configuration classes of the parts of a composite model, by default."""
    specs = getattr(config_class, "sub_configs_defaults", None)
    if specs is not None:
        return {part: type(spec.default_config) for part, spec in specs.items()}
    default = config_class()  # transformers before 5.20 gives only the names of the parts
    return {part: type(getattr(default, part)) for part in config_class.sub_configs}


def _tiny_value(name: str, default: Any) -> Any:
    """Return the tiny value of a field, or `MISSING` if it keeps its default."""
    is_number = isinstance(default, int) and not isinstance(default, bool)
    if name == "q_lora_rank" and default is None:  # queries of full rank
        return None
    if name in HEAD_SIZES and is_number:
        return -(-default // 64) * 8
    if name in ONE_OR_TWO and is_number and default > 0:
        return min(default, 2)
    if name in TINY:
        return TINY[name]
    if isinstance(default, int | float) and not isinstance(default, bool):
        if "drop" in name or "jitter" in name or name.endswith("loss_coef"):
            return 0.0
        if "vocab_size" in name:
            return min(default, VOCAB_SIZE)
        if name.endswith(("_token_id", "_token_index")) and default > TINY["eos_token_id"]:
            return VOCAB_SIZE - 1
    return dataclasses.MISSING


def _head_dim(defaults: Mapping[str, Any], values: Mapping[str, Any]) -> int:
    """Return the size of a head. All heads add up to the model's width if they do at full size."""
    heads, width = defaults.get("num_attention_heads"), defaults.get("hidden_size")
    if not isinstance(heads, int) or not isinstance(width, int):
        return values["head_dim"]
    if heads * defaults["head_dim"] == width:
        return values["hidden_size"] // values["num_attention_heads"]
    return values["head_dim"] if values["head_dim"] != 16 else 32


def _one_layer_of_each_kind(
    config_class: type[PreTrainedConfig], values: Mapping[str, Any], num_layers: str
) -> dict[str, Any]:
    """Return the per-layer fields of the full model, cut to the first layer of each kind."""
    full = config_class(
        **copy.deepcopy({key: value for key, value in values.items() if key != num_layers})
    )
    lists = {}
    for field in dataclasses.fields(config_class):
        value = vars(full).get(field.name)  # getattr refuses fields that differ between layers
        per_layer = isinstance(value, list | tuple) and len(value) == full.num_hidden_layers
        # A list of layer numbers may be as long, but no number occurs twice in it.
        if per_layer and len(set(value)) < len(value):
            lists[field.name] = value
    kinds = list(zip(*lists.values(), strict=True))
    first = sorted({kinds.index(kind) for kind in kinds})
    keep = first if len(first) > 1 else first * 2
    cut = {name: [value[layer] for layer in keep] for name, value in lists.items()}
    return {num_layers: len(keep), **cut} if cut else {}


def _shorten(rope_parameters: Any) -> None:
    """Cut the lengths in a default rope, also if it is nested by kind of layer."""
    if isinstance(rope_parameters, dict):
        for key, value in rope_parameters.items():
            if key.endswith("max_position_embeddings"):
                rope_parameters[key] = min(value, TINY[key])
            _shorten(value)


@torch.no_grad()
def _strengthen(model: nn.Module) -> None:
    """Scale matrices that `initializer_range` misses to a deviation of 0.2; fill zero tensors."""
    for parameter in model.parameters():
        if not parameter.any():
            parameter.normal_(std=0.2)
        elif parameter.ndim >= 2 and 0 < (std := parameter.std(correction=0)) < 0.1:
            parameter.mul_(0.2 / std)


def _one_line(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())}"
