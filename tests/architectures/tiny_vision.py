"""Tiny vision-language models that take images.

    processor = tiny_processor("llava")
    model = tiny_vision_model("llava", processor)     # patches of 4 × 4 pixels, ids of its tokens

The configurations are those of `tiny_models.py` with smaller images. `image_names()` lists the
types that transformers knows; `tiny_processors.NAMES` those that are built here.
"""

from collections.abc import Mapping
from typing import Any

from transformers import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING, PreTrainedModel
from transformers.models.auto.modeling_auto import MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES

from architectures.tiny_models import build_tiny, tiny_config
from architectures.tiny_processors import PINPOINTS, WIDE_PINPOINTS, token_ids

_SQUARE = {"image_size": 16, "patch_size": 4}
_SIGLIP = _SQUARE | {"vision_use_head": False}
_PAIRS = {"image_size": [16, 16], "patch_size": [4, 4]}
_LARGER = {"image_size": 32, "patch_size": 4}
_WINDOWS = {"patch_size": 4, "window_size": 16, "fullatt_block_indexes": [1]}
_DEEPSTACK = {"patch_size": 4, "deepstack_visual_indexes": [0], "num_position_embeddings": 16}

_GRID = {"image_grid_pinpoints": PINPOINTS}
_NO_CHANGES: Mapping[str, Any] = {}

#: By type: the values of its tower, and others.
_CHANGES: dict[str, tuple[Mapping[str, Any], Mapping[str, Any]]] = {
    name: (tower, others)
    for names, tower, others in (
        ("deepseek_vl glm46v glm4v glm4v_moe glm_ocr llava paddleocr_vl", _SQUARE, _NO_CHANGES),
        ("exaone4_5 hyperclovax_vision_v2 qwen2_5_omni_thinker qwen2_5_vl", _WINDOWS, _NO_CHANGES),
        ("cohere_compass qwen3_vl qwen3_vl_moe", _DEEPSTACK, _NO_CHANGES),
        ("qwen2_vl video_llama_3", {"patch_size": 4}, _NO_CHANGES),
        ("aya_vision", _SIGLIP, _NO_CHANGES),
        ("gemma3", _SIGLIP, {"mm_tokens_per_image": 4}),
        ("gemma4", {"patch_size": 4, "position_embedding_size": 64}, _NO_CHANGES),
        ("granite4_vision", _LARGER, {"image_grid_pinpoints": WIDE_PINPOINTS}),
        ("granite_docling", _SQUARE | {"scale_factor": 2}, _NO_CHANGES),
        ("idefics3 smolvlm", _SQUARE, {"scale_factor": 2}),
        ("internvl qianfan_ocr", _PAIRS, {"image_seq_length": 4}),
        ("janus", _SQUARE | {"num_image_tokens": 16}, _NO_CHANGES),
        ("lighton_ocr mistral3", _LARGER, {"spatial_merge_size": 2}),
        ("llava_next llava_next_video", _SQUARE, _GRID),
        ("llava_onevision", _SIGLIP, _GRID),
        ("vipllava", _SQUARE, {"vision_feature_layer": [-2, -1]}),
        (
            "aria",
            {"image_size": 980, "patch_size": 140},
            {"projector_patch_to_query_dict": {49: 4}},
        ),
    )
    for name in names.split()
}


def image_names() -> list[str]:
    """Return the model types that transformers knows to take images and text, sorted."""
    return sorted(MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING_NAMES)


def tiny_vision_model(
    name: str, processor: Any, vision: Mapping[str, Any] = _NO_CHANGES, **text_config: Any
) -> PreTrainedModel:
    """Return a new tiny model of the type `name` for the tokens of `processor`.

    Args:
        name: one of `tiny_processors.NAMES`.
        processor: of the same name.
        vision: other values of the configuration of its tower.
        text_config: other values of the configuration of its text model.

    Raises:
        NotBuilt: there is no tiny model of this type.
    """
    tower, others = _CHANGES[name]
    parts = {"vision_config": {**tower, **vision}, "text_config": text_config}
    config = tiny_config(name, {**parts, **others})
    for key, token_id in token_ids(name, processor.tokenizer).items():
        for field in (f"{key}_token_id", f"{key}_token_index"):
            if field in vars(config):
                setattr(config, field, token_id)
    classes: Any = MODEL_FOR_IMAGE_TEXT_TO_TEXT_MAPPING
    return build_tiny(name, classes[type(config)], config)
