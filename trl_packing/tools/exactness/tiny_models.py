"""A tiny random model of every causal language model architecture that transformers knows.

    names()                   ["afmoe", "apertus", …, "zaya"] of the installed version, and VARIANTS
    vision_names()            ["aria", …, "vipllava"]: vision-language models, used on text only
    tiny_config("gemma3")     width 64, a vocabulary of 128, one layer of every kind, windows of 8
    tiny_model("gemma3")      the causal language model of it: float32, CPU, random weights
    full_size_model("gemma3") the same class with its default configuration, on the meta device

Tiny models serve to *measure* how an architecture treats packed rows. They are small in ways that
hide nothing:

    structure  like the published model: several sizes of heads, keys wider than values, groups of
               experts, layers that use the keys of others
    lengths    every window, chunk and block is shorter than a short document
    layers     one of every kind in the full model: sliding and full attention, recurrence, experts
    weights    large, and none of them zero, because a path that adds nothing hides its leak
    chance     no dropout and no jitter: two runs of one model are equal to the last bit

Configurations follow rules. `_TINY` gives the value of each field by its *name*, in any
configuration, also in nested ones. `_SPECIAL` holds the exceptions, by model type. Only these
tables and the code that applies them belong here. Nothing is downloaded, and nothing else of this
package is imported.
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

VOCAB_SIZE = 128

#: Ids that a document may hold. Lower ids are pad, bos and eos; higher ones stand for images etc.
DOCUMENT_IDS = range(3, 120)

# ----------------------------------------------------------------------------------- the tables

# 4 heads of 16 in a width of 64, keys and values in 2; recurrent layers have 4 heads of 32.
_BY_VALUE: list[tuple[Any, str]] = [
    (64, "hidden_size d_model n_embd emb_dim embedding_dim embedding_size input_embedding_size"),
    (64, "output_embedding_size word_embed_proj_dim out_hidden_size output_proj_dims lru_width"),
    (64, "adapter_in_dim adapter_input_size adapter_out_dim audio_embed_dim mm_embed_dim"),
    (
        64,
        "hidden_size_global backbone_hidden_size input_size text_hidden_size projector_hidden_size",
    ),
    (64, "alignment_intermediate_size"),
    (96, "intermediate_size ffn_dim n_inner d_inner dff dim_ff mlp_dim feed_forward_size"),
    (96, "encoder_ffn_dim decoder_ffn_dim ffn_hidden_size intermediate_size_mlp"),
    (96, "dense_intermediate_size prefix_dense_intermediate_size"),
    (32, "moe_intermediate_size expert_ffn_hidden_size shared_intermediate_size"),
    (32, "shared_expert_intermediate_size shared_experts_intermediate_size router_hidden_size"),
    (32, "moe_shared_expert_intermediate_size hidden_size_per_layer_input"),
    (4, "num_attention_heads num_heads n_head n_heads attention_heads swa_num_attention_heads"),
    (4, "encoder_attention_heads decoder_attention_heads num_encoder_attention_heads"),
    (4, "num_decoder_attention_heads linear_num_heads linear_num_value_heads"),
    (4, "index_n_heads indexer_n_heads mamba_n_heads mamba_num_heads n_mamba_heads"),
    (2, "num_key_value_heads num_kv_heads swa_num_key_value_heads linear_num_key_heads"),
    (16, "head_dim d_head dim_head kv_channels attention_head_size"),
    (16, "linear_head_dim linear_key_head_dim linear_value_head_dim index_head_dim"),
    (16, "indexer_head_dim q_lora_rank kv_lora_rank o_lora_rank query_pre_attn_scalar"),
    (32, "mamba_d_head mamba_head_dim"),
    (128, "mamba_d_ssm"),
    (8, "rotary_dim mamba_d_state state_size ssm_state_size"),
    (1, "n_groups mamba_n_groups mamba_ngroups num_codebooks"),
    # Layers, if all are of one kind.
    (2, "num_hidden_layers n_layer n_layers num_layers depth encoder_layers decoder_layers"),
    (2, "num_encoder_layers num_decoder_layers num_blocks"),
    # Experts, two of four for each token; the first layer has none if the architecture allows it.
    (4, "num_experts num_local_experts n_routed_experts moe_num_experts"),
    (2, "num_experts_per_tok moe_topk moe_k top_k_experts interleave_moe_layer_step"),
    (1, "n_group topk_group n_shared_experts num_shared_experts moe_num_shared_experts"),
    (1, "first_k_dense_replace num_dense_layers moe_layer_start_index"),
    ([0], "mlp_only_layers"),
    # Lengths: enough positions for any row; everything else is shorter than a document.
    (512, "max_position_embeddings n_positions n_ctx max_seq_len max_target_positions"),
    (512, "context_length"),
    (8, "sliding_window sliding_window_size attention_window_size window_size mem_len"),
    (8, "attention_chunk_size local_attention_window_len chunk_size mamba_chunk_size block_size"),
    (8, "keep_window_size index_topk index_block_size indexer_budget chroma_length"),
    (16, "rel_extent local_attention relative_max_distance position_bias_max_distance"),
    (16, "position_bias_num_buckets floor_scale log_scaling_n_floor"),
    (32, "original_max_position_embeddings"),
    (4, "prompt_length"),
    # Switches. Some models turn windows off by default. Losses of experts mix documents by design.
    (True, "use_sliding_window is_decoder"),
    (False, "use_cache output_router_logits"),
    (1, "max_window_layers"),
    (0, "num_kv_shared_layers"),
    (0.2, "initializer_range init_std initializer_factor"),
    (1.0, "logit_scale logits_mup_width_multiplier"),
    (0, "pad_token_id"),
    (1, "bos_token_id decoder_start_token_id"),
    (2, "eos_token_id"),
]
_TINY: dict[str, Any] = {name: value for value, names in _BY_VALUE for name in names.split()}

# Sizes of heads that may differ keep their proportions: 128 becomes 16.
_HEAD_SIZES = ("head_dim", "swa_head_dim", "v_head_dim", "qk_nope_head_dim", "qk_rope_head_dim")
# 2, or 1 if the full model has 1: one key for all heads, one expert for each token.
_ONE_OR_TWO = (
    *("num_key_value_heads", "num_kv_heads", "n_group", "n_shared_experts"),
    *("num_experts_per_tok", "moe_topk", "moe_k", "top_k_experts"),
)

_FULL, _SLIDING, _LINEAR = "full_attention", "sliding_attention", "linear_attention"
_FACTORS = {"short_factor": [1.0] * 8, "long_factor": [1.0 + i for i in range(8)]}
# The last two layers, one of each kind, use the keys and values of the first two (gemma-4-E2B).
_SHARED_KEYS: dict[str, Any] = {
    "num_hidden_layers": 4,
    "layer_types": [_SLIDING, _FULL] * 2,
    "num_kv_shared_layers": 2,
}


def _mrope(*sections: int) -> dict[str, Any]:
    """Return a rope with its frequencies split between time, height and width, as published."""
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": rope}


# By model type, also for parts of composite models. Most entries add kinds of layers that published
# models have and the default configuration lacks, or set sizes that depend on each other.
_SPECIAL: dict[str, dict[str, Any]] = {
    "bamba": {"attn_layer_indices": [1]},
    "big_bird": {"attention_type": "original_full"},  # a decoder refuses the default on long rows
    # The threshold is about the median entropy here, so that patches depend on the text.
    "blt": {"encoder_hash_byte_group_vocab": 64, "patching_threshold": 4.4},
    "blt_local_decoder": dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "blt_local_encoder": dict.fromkeys(("num_attention_heads", "num_key_value_heads"), 2),
    "chameleon": {"vocabulary_map": {"<image>": VOCAB_SIZE - 1}},
    "chameleon_vqgan": {"base_channels": 32},
    "cohere2_moe": {"layer_types": [_SLIDING, _FULL], "mlp_layer_types": ["dense", "sparse"]},
    "cohere_compass_text": {
        "layer_types": [_SLIDING, _FULL],
        "rope_parameters": {
            kind: {"rope_type": "default", "rope_theta": 1e4} for kind in (_SLIDING, _FULL)
        },
    },
    "cosmos3_edge_text": _mrope(4, 2, 2),
    "dbrx": {
        "attn_config": {"kv_n_heads": 2, "rope_theta": 1e4, "clip_qkv": 8.0},
        "ffn_config": {"ffn_hidden_size": 64, "moe_top_k": 2, "moe_loss_weight": 0.0},
    },
    "deepseek_ocr2_text": {"mlp_layer_types": ["dense", "sparse"]},
    "deepseek_v4": {
        "compress_rates": {"compressed_sparse_attention": 4, "heavily_compressed_attention": 8}
    },
    "dots3_note_text": dict.fromkeys(("swa_num_attention_heads", "swa_num_key_value_heads"), 2)
    | {"swa_q_lora_rank": 16, "swa_kv_lora_rank": 32, "swa_v_head_dim": 16}
    | {"swa_head_dim": 32, "swa_qk_nope_head_dim": 24},
    "dots3_note_vision_encoder": {"mlp_layer_types": ["dense", "sparse"]},
    "electra": {"embedding_size": 32},
    "ernie4_5_vl_moe_text": {"moe_intermediate_size": [32, 16], **_mrope(3, 3, 2)},
    "evolla": {
        "protein_encoder_config": dict.fromkeys(("hidden_size", "intermediate_size"), 64)
        | {"num_hidden_layers": 1, "num_attention_heads": 4},
        "aligner_num_add_layers": 1,
    },
    "gemma3n_text": {"num_kv_shared_layers": 2},
    "gemma4_text": {"global_head_dim": 64, "num_experts": None, "use_double_wide_mlp": True}
    | _SHARED_KEYS,
    "gemma4_unified_text": {"global_head_dim": 64},
    "glm4v_moe_text": _mrope(1, 1, 2),
    "glm4v_text": _mrope(2, 3, 3),
    "glm5_next_text": {"index_kpool": 4, "qk_rope_head_dim": 0},
    "glm_ocr_text": _mrope(2, 3, 3),
    "gpt_neo": {"attention_types": [[["global", "local"], 1]], "num_layers": 2},
    "granite4_vision": {"deepstack_layer_map": [(0, 0)], "spatial_target_layers": [1]}
    | {"downsample_rate": "4/8"},
    "granitemoehybrid": {"layer_types": [_LINEAR, _FULL]},
    "hunyuan_vl_text": _mrope(2, 2, 2, 2),
    "jamba": {"attn_layer_period": 2, "attn_layer_offset": 1},
    "inkling2_text": {  # the first layer has no blocks before it
        "num_hidden_layers": 3,
        "layer_types": ["hybrid_sliding", "hybrid_sliding", "hybrid"],
        "n_layers_per_attn_res_block": 2,
    },
    "inkling_text": {"swa_num_key_value_heads": 4},
    "janus_vision_model": {"projection_dim": 64},
    "janus_vqgan": {"base_channels": 32, "num_embeddings": 64}
    | dict.fromkeys(("projection_dim", "image_token_embed_dim"), 64),
    "kosmos-2.5": {"latent_query_num": 4},
    "kosmos_2_5_text_model": {"embed_dim": 64, "layers": 2},
    "kosmos_2_5_vision_model": {"patch_embed_hidden_size": 64},
    "laguna": {"layer_types": [_FULL, _SLIDING], "mlp_layer_types": ["dense", "sparse"]}
    | {"num_attention_heads_per_layer": [4, 6]},
    "lfm2": {"layer_types": ["conv", _FULL]},
    "lfm2_moe": {"layer_types": ["conv", _FULL]},
    "longcat_flash": {"head_dim": 8, "zero_expert_num": 2},
    "mamba2": {"num_heads": 8, "head_dim": 16},
    "mellum": {"layer_types": [_FULL, _SLIDING]},
    "minicpm3": {"dim_model_base": 64, "v_head_dim": 8},
    "minimax_m3_vl_text": {
        "layer_types": [_FULL, "minimax_m3_sparse"],
        "mlp_layer_types": ["dense", "sparse"],
        "index_topk_blocks": 2,
    },
    "mllama_text_model": {"num_hidden_layers": 3, "cross_attention_layers": [1]},
    "muse_spark_audio": {"num_hidden_layers": 4, "hidden_sizes": [64] * 4, "depths": [1] * 4},
    "muse_spark_text": {"moe_hidden_size": 64},
    "nemotron_h_omni": {"audio_config": None, "vision_hidden_size": 64},
    "paddleocr_vl_text": _mrope(4, 6, 6),
    "prophetnet": {"num_buckets": 8},
    "qwen2_5_omni_text": _mrope(2, 3, 3),
    "qwen2_5_omni_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "qwen2_5_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_text": _mrope(2, 3, 3),
    "qwen2_vl_vision": {"embed_dim": 64},
    "qwen3_omni_moe_text": _mrope(4, 2, 2),
    "qwen3_omni_moe_thinker": {"vision_start_token_id": VOCAB_SIZE - 1},
    "qwen3_vl_moe_text": _mrope(4, 2, 2),
    "qwen3_vl_text": _mrope(4, 2, 2),
    "qwen4_exp_text": {
        "indexer_head_dim": 32,
        "indexer_kv_heads": 1,
        "indexer_compress_ratio": 4,
        "hc_lowrank": 8,
    }
    | {"ple_layer_ids": [1], "ngram_vocab_size_base": 64, "split_ngram_parts": 1},
    "radio": {"video_temporal_patch_size": 2},
    "recurrent_gemma": {"num_hidden_layers": 3},  # recurrent, recurrent, attention
    # Trains only on multiples of the chunk length. The seed keeps its random hashes the same.
    "reformer": {"attn_layers": ["local", "lsh"], "axial_pos_embds": False, "num_buckets": 4}
    | {"local_attn_chunk_length": 4, "lsh_attn_chunk_length": 4, "hash_seed": 0},
    "step3p5": {"num_sliding_attention_heads": 6},
    "xlm": {"causal": True},
    "xlnet": {"attn_type": "uni"},
    "xmod": {"default_language": "en_XX"},
    "zamba": {"layers_block_type": [_LINEAR, "hybrid", "hybrid"], "num_hidden_layers": 3},
    "zaya": {"layer_types": ["hybrid", "hybrid_sliding"], "num_experts_per_tok": 1},
}

#: Architectures with a switch that changes the role of positions: name -> (model type, changes).
VARIANTS: dict[str, tuple[str, dict[str, Any]]] = {
    "falcon+alibi": ("falcon", {"alibi": True}),
    "gemma4_text+experts": (  # like gemma-4-26B-A4B: layers without a window use keys as values
        "gemma4_text",
        {
            "enable_moe_block": True,
            "num_experts": 4,
            "attention_k_eq_v": True,
            "num_global_key_value_heads": 1,
            "hidden_size_per_layer_input": 0,
            "use_double_wide_mlp": False,
            "num_kv_shared_layers": 0,
            "num_hidden_layers": 2,
            "layer_types": [_SLIDING, _FULL],
        },
    ),
    "llama+dynamic": (  # frequencies change when a row (not a document) is longer than 32
        "llama",
        {
            "max_position_embeddings": 32,
            "rope_parameters": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 2.0},
        },
    ),
    "phi3+longrope": (  # likewise: short or long factors for the whole row
        "phi3",
        {
            "sliding_window": None,
            "rope_parameters": {"rope_type": "longrope", "rope_theta": 1e4, **_FACTORS},
        },
    ),
}

_DRAFT_HEAD = "it is the draft head of another model, and needs the keys of that model"
_ENCODER_DECODER = "it is an encoder-decoder, and its decoder does not run without the encoder"
_NO_TEXT_ALONE = "it does not run on text alone"
_NOT_BUILT_BY_REASON = {
    _DRAFT_HEAD: "gemma4_assistant gemma4_unified_assistant",
    _ENCODER_DECODER: "florence2 pix2struct pp_formulanet t5gemma2 udop vision-encoder-decoder",
    _NO_TEXT_ALONE: "blip blip-2 idefics instructblip instructblipvideo kosmos-2 pi0",
    "it trains only with the token types of its processor": "molmo2",
    "it is not a causal language model: it denoises one block at a time": "diffusion_gemma",
}
_NOT_BUILT = {name: why for why, these in _NOT_BUILT_BY_REASON.items() for name in these.split()}

# ---------------------------------------------------------------------- the code that applies them


class NotBuilt(Exception):
    """There is no tiny model of this architecture. The message gives the reason in a sentence."""


def names() -> list[str]:
    """Return every model type that `AutoModelForCausalLM` knows, and `VARIANTS`, sorted."""
    return sorted([*MODEL_FOR_CAUSAL_LM_MAPPING_NAMES, *VARIANTS])


def vision_names() -> list[str]:
    """Return the model types that only `AutoModelForImageTextToText` knows, sorted.

    These models are trained on text only here.
    """
    return sorted(
        MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES.keys() - MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys()
    )


def tiny_config(name: str, changes: Mapping[str, Any] | None = None) -> PreTrainedConfig:
    """Return a new tiny configuration of architecture `name`.

    Args:
        name: one of `names()` or `vision_names()`.
        changes: other values, also of its parts: ``{"vision_config": {"patch_size": 4}}``.

    Raises:
        NotBuilt: there is no tiny model of this architecture.
        ValueError: the installed transformers has no such architecture.
    """
    model_type, variant = VARIANTS.get(name, (name, {}))
    if model_type not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.keys() | vision_names():
        raise ValueError(
            f"no causal language model is called {name!r} in the installed transformers; "
            "tiny_models.names() and vision_names() list the others"
        )
    if name in _NOT_BUILT:
        raise NotBuilt(f"{name} is not built: {_NOT_BUILT[name]}")
    try:
        return _build(CONFIG_MAPPING[model_type], {**variant, **(changes or {})})
    except Exception as error:  # a class that the tables do not know may raise anything
        raise NotBuilt(f"{name} is not built: {_one_line(error)}") from error


def tiny_model(name: str, seed: int = 0, device: str = "cpu", **settings: Any) -> PreTrainedModel:
    """Return a new tiny model in training mode.

    Args:
        name: one of `names()` or `vision_names()`.
        seed: equal seeds give equal weights.
        device: ``"meta"`` leaves out the weights.
        settings: other values of its configuration.

    Raises:
        NotBuilt: there is no tiny model of this architecture.
    """
    model_class, config = _class_and_config(name, tiny_config(name))
    for setting, value in settings.items():
        setattr(config, setting, value)
    return build_tiny(name, model_class, config, seed, device)


def build_tiny(
    name: str, model_class: Any, config: Any, seed: int = 0, device: str = "cpu"
) -> PreTrainedModel:
    """Return a new model of a tiny configuration in training mode; `tiny_model` has the arguments.

    Raises:
        NotBuilt: there is no tiny model of this architecture.
    """
    attention = {"": "sdpa" if model_class._supports_sdpa else "eager"}
    for part in config.sub_configs:  # SDPA for text does not imply SDPA for images
        attention[part] = "eager" if part.startswith(("vision", "audio")) else attention[""]
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        try:
            with torch.device(device):
                model = model_class._from_config(
                    config, attn_implementation=attention, dtype=torch.float32
                )
        except Exception as error:  # most often a package that is not installed
            raise NotBuilt(f"{name} is not built: {_one_line(error)}") from error
        if device != "meta":
            _strengthen(model)
    return model.train()


def full_size_model(name: str) -> PreTrainedModel:
    """Return a new model with its default configuration, on the meta device.

    Raises:
        NotBuilt: the class has no usable defaults, or needs a package that is not installed.
    """
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
    special = {**_SPECIAL.get(config_class.model_type, {}), **own}
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
    if name in _HEAD_SIZES and is_number:
        return -(-default // 64) * 8
    if name in _ONE_OR_TWO and is_number and default > 0:
        return min(default, 2)
    if name in _TINY:
        return _TINY[name]
    if isinstance(default, int | float) and not isinstance(default, bool):
        if "drop" in name or "jitter" in name or name.endswith("loss_coef"):
            return 0.0
        if "vocab_size" in name:
            return min(default, VOCAB_SIZE)
        if name.endswith(("_token_id", "_token_index")) and default > _TINY["eos_token_id"]:
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
                rope_parameters[key] = min(value, _TINY[key])
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
