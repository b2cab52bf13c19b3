"""Tiny vision-language models, their processors and data sets with images, built in memory.

    processor = tiny_processor("qwen2_5_vl")          # the real class, around a tiny tokenizer
    model = tiny_vision_model("qwen2_5_vl", processor)  # random weights, ids of that tokenizer
    dataset = image_dataset()                         # images of several sizes; some rows have none

Every tower reads patches of 4 × 4 pixels.
"""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch
from architectures import tiny_processors
from architectures.tiny_processors import PINPOINTS
from datasets import Dataset
from PIL import Image

from helpers.one_step import ONE_STEP
from helpers.tiny import SHAPE, tiny_tokenizer
from trl_packing import PackedSFTConfig, PackedSFTTrainer

NAMES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "glm4v", "llava", "llava_next", "llava_onevision"),
    *("internvl", "idefics3", "smolvlm", "mistral3", "gemma3"),
)


def tiny_processor(name: str) -> Any:
    """Return a processor of the family `name`."""
    return tiny_processors.tiny_processor(name, tiny_tokenizer(chat=True))


# --- models ---------------------------------------------------------------------------------------

_TEXT = SHAPE | {"max_position_embeddings": 4096}
_HIDDEN = {"hidden_size": 16, "intermediate_size": 32, "initializer_range": 0.2, "patch_size": 4}
_TOWER = _HIDDEN | {"num_hidden_layers": 3, "num_attention_heads": 2}
_TOWER |= {"image_size": 16, "projection_dim": 16}
_QWEN_TOWER = _HIDDEN | {"depth": 2, "num_heads": 2, "out_hidden_size": 32}
_QWEN_TOWER |= {"spatial_merge_size": 2, "temporal_patch_size": 2}


def _mrope(*sections: int, **others: Any) -> dict[str, Any]:
    rope = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": list(sections)}
    return {"rope_parameters": rope | others}


def _clip(model_type: str) -> dict[str, Any]:
    return {**_TOWER, "model_type": model_type}


# name -> (text config, vision config, others)
_CONFIGS: dict[str, tuple[dict[str, Any], dict[str, Any], dict[str, Any]]] = {
    "qwen2_vl": (_mrope(1, 1, 2), {**_QWEN_TOWER, "embed_dim": 16, "hidden_size": 32}, {}),
    "qwen2_5_vl": (
        _mrope(1, 1, 2),
        {**_QWEN_TOWER, "window_size": 16, "fullatt_block_indexes": [1]},
        {},
    ),
    "qwen3_vl": (
        _mrope(2, 1, 1),
        {**_QWEN_TOWER, "depth": 3, "deepstack_visual_indexes": [0], "num_position_embeddings": 16},
        {},
    ),
    "glm4v": (_mrope(1, 2, 1), {**_QWEN_TOWER, "image_size": 16}, {}),
    "llava": ({"model_type": "llama"}, _clip("clip_vision_model"), {}),
    "llava_next": (
        *({"model_type": "llama"}, _clip("clip_vision_model"), {"image_grid_pinpoints": PINPOINTS}),
    ),
    "llava_onevision": (
        {"model_type": "qwen2"},
        {**_clip("siglip_vision_model"), "vision_use_head": False},
        {"image_grid_pinpoints": PINPOINTS, "vision_feature_select_strategy": "full"},
    ),
    "internvl": (
        {"model_type": "qwen2"},
        {**_TOWER, "image_size": [16, 16], "patch_size": [4, 4]},
        {"image_seq_length": 4},
    ),
    "idefics3": ({"model_type": "llama"}, _TOWER, {"scale_factor": 2}),
    "smolvlm": ({"model_type": "llama"}, _TOWER, {"scale_factor": 2}),
    "mistral3": (
        {"model_type": "mistral", "sliding_window": None},
        {**_clip("pixtral"), "image_size": 32, "head_dim": 8},
        {"spatial_merge_size": 2},
    ),
    "gemma3": (
        {"sliding_window": 24, "layer_types": ["sliding_attention", "full_attention"]},
        {**_clip("siglip_vision_model"), "vision_use_head": False},
        {"mm_tokens_per_image": 4},
    ),
}


def _token_ids(processor: Any) -> dict[str, int]:
    """Return the ids of special tokens under the names that configs of the models have."""
    tokenizer = processor.tokenizer
    known = tokenizer.get_vocab()
    feature = next(
        token
        for token in ("<|image_pad|>", "<|image|>", "<image_soft_token>", processor.image_token)
        if token in known
    )
    ids = {"image_token_id": known[feature], "image_token_index": known[feature]}
    for name, tokens in {
        "video_token_id": ("<|video_pad|>", "<|video|>", "<video>"),
        "vision_start_token_id": ("<|vision_start|>",),
        "vision_end_token_id": ("<|vision_end|>",),
        "image_start_token_id": ("<|begin_of_image|>",),
        "image_end_token_id": ("<|end_of_image|>",),
        "boi_token_index": ("<start_of_image>",),
        "eoi_token_index": ("<end_of_image>",),
    }.items():
        found = next((known[token] for token in tokens if token in known), None)
        ids |= {} if found is None else {name: found}
    return ids | {"video_token_index": ids.get("video_token_id", len(known) - 1)}


def tiny_vlm(name: str = "llava") -> tuple[Any, Any]:
    """Return a tiny model of the family `name` and its processor."""
    processor = tiny_processor(name)
    return tiny_vision_model(name, processor), processor


def tiny_vision_model(name: str, processor: Any, seed: int = 0) -> Any:
    """Return a tiny model of the family `name` for the tokens of `processor`."""
    return vision_model(name, processor, {}, {}, seed)


def vision_model(
    name: str,
    processor: Any,
    text_changes: dict[str, Any],
    vision_changes: dict[str, Any],
    seed: int = 0,
) -> Any:
    """Return a model of the family `name` with some fields of its tiny configs changed."""
    from transformers import AutoConfig, AutoModelForImageTextToText
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    text, vision, others = _CONFIGS[name]
    fields = CONFIG_MAPPING[name]().__dict__
    ids = {key: value for key, value in _token_ids(processor).items() if key in fields}
    text = {**_TEXT, "vocab_size": len(processor.tokenizer), **text, **text_changes}
    vision = {**vision, **vision_changes}
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision, **ids, **others)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        model = AutoModelForImageTextToText.from_config(config, dtype=torch.float32)
        with torch.no_grad():  # some classes start projectors at zero, which hides images
            for parameter in model.parameters():
                if not parameter.any():
                    parameter.normal_(std=0.1)
    return model


def vision_trainer(
    model: Any, processor: Any, folder: Any, dataset: Any = None, **options: Any
) -> Any:
    """Return a packed trainer of one step on `dataset`, by default `image_dataset()`."""
    settings = {"max_length": 320, "packing": True} | ONE_STEP | options
    names = ("eval_dataset", "compute_metrics", "peft_config")
    arguments = {name: settings.pop(name) for name in names if name in settings}
    return PackedSFTTrainer(
        model=copy.deepcopy(model),
        args=PackedSFTConfig(output_dir=str(folder), **settings),
        train_dataset=image_dataset() if dataset is None else dataset,
        processing_class=processor,
        **arguments,
    )


# --- data -----------------------------------------------------------------------------------------


def noise(height: int, width: int, seed: int) -> Image.Image:
    """Return an image of random pixels."""
    rng = np.random.default_rng(seed)
    return Image.fromarray(rng.integers(0, 256, (height, width, 3), np.uint8))


def image_dataset(rows: int = 8, form: str = "prompt_completion") -> Dataset:
    """Return rows with one, two or no images of different sizes.

    `form`: "prompt_completion" or "messages".
    """
    made = []
    for row in range(rows):
        number = (1, 2, 0, 1)[row % 4]
        images = [noise(20 + 8 * (row + n), 36 + 4 * n, 7 * row + n) for n in range(number)]
        parts = [{"type": "image", "text": None} for _ in images]
        question = {"type": "text", "text": f"Question {row}: what is this?" + " And?" * row}
        answer = {"type": "text", "text": f"Answer {row} is short." + " Yes." * (row % 3)}
        user = {"role": "user", "content": [*parts, question]}
        assistant = {"role": "assistant", "content": [answer]}
        if form == "messages":
            made.append({"images": images, "messages": [user, assistant]})
        else:
            made.append({"images": images, "prompt": [user], "completion": [assistant]})
    return Dataset.from_list(made)
