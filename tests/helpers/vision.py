"""Tiny vision-language models, their processors and data sets with images, built in memory.

    processor = tiny_processor("qwen2_5_vl")          # the real class, around a tiny tokenizer
    model = tiny_vision_model("qwen2_5_vl", processor)  # random weights, ids of that tokenizer
    dataset = image_dataset()                         # images of several sizes; some rows have none

Image processors are those of PIL, and video processors are left out: both need torchvision
otherwise. Every tower reads patches of 4 × 4 pixels.
"""

from __future__ import annotations

import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image

from helpers.tiny import tiny_tokenizer

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{{- 'IMAGE' if part['type'] == 'image' else part['text'] }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


class _NoVideos(dict):
    """Stands in for a video processor, which needs torchvision."""

    _auto_class = None
    model_input_names: tuple[str, ...] = ()
    num_frames, fps, size = 1, 1, {"longest_edge": 16}

    def save_pretrained(self, *_args: Any, **_kwargs: Any) -> list[str]:
        return []


# --- processors -----------------------------------------------------------------------------------


def _class(family: str, kind: str, name: str) -> Any:
    return getattr(import_module(f"transformers.models.{family}.{kind}_{family}"), name)


def _images(family: str, name: str, **options: Any) -> Any:
    return _class(family, "image_processing_pil", name)(**options)


def _processor(family: str, name: str, *parts: Any, tokenizer: Any, **options: Any) -> Any:
    """Return a processor of the real class that accepts a stand-in for videos."""
    real = _class(family, "processing", name)
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    made = type(name, (real,), unchecked)
    return made(*parts, chat_template=tokenizer.chat_template, **options)


def _tokenizer(*special: str, template: str, **attributes: str) -> Any:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", template)
    for name, token in attributes.items():  # tokenizers of these models know their tokens by name
        setattr(tokenizer, name, token)
        setattr(tokenizer, f"{name}_id", tokenizer.convert_tokens_to_ids(token))
    return tokenizer


_SIZE = {"height": 16, "width": 16}
_PINPOINTS = [[16, 32], [32, 16], [32, 32]]
_QWEN_TOKENS = ("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>")


def _qwen(family: str, name: str) -> Any:
    template = "<|vision_start|><|image_pad|><|vision_end|>"
    tokenizer = _tokenizer(*_QWEN_TOKENS, template=template)
    pixels = {"min_pixels": 8 * 8 * 2, "max_pixels": 8 * 8 * 24}
    images = _images("qwen2_vl", "Qwen2VLImageProcessorPil", patch_size=4, merge_size=2, **pixels)
    return _processor(family, name, images, tokenizer, _NoVideos(), tokenizer=tokenizer)


def _glm4v() -> Any:
    special = ("<|begin_of_image|>", "<|image|>", "<|end_of_image|>", "<|video|>")
    template = "<|begin_of_image|><|image|><|end_of_image|>"
    tokenizer = _tokenizer(*special, template=template)
    size = {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 48}
    images = _images("glm4v", "Glm4vImageProcessorPil", patch_size=4, merge_size=2, size=size)
    return _processor(
        "glm4v", "Glm4vProcessor", images, tokenizer, _NoVideos(), tokenizer=tokenizer
    )


def _llava() -> Any:
    tokenizer = _tokenizer("<image>", template="<image>")
    size = {"size": {"shortest_edge": 16}, "crop_size": _SIZE}
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _processor(
        *("llava", "LlavaProcessor", _images("clip", "CLIPImageProcessorPil", **size), tokenizer),
        **options,
        patch_size=4,
        tokenizer=tokenizer,
    )


def _llava_next() -> Any:
    tokenizer = _tokenizer("<image>", template="<image>")
    images = _images(
        *("llava_next", "LlavaNextImageProcessorPil"),
        size={"shortest_edge": 16},
        crop_size=_SIZE,
        image_grid_pinpoints=_PINPOINTS,
    )
    options = {"vision_feature_select_strategy": "default", "num_additional_image_tokens": 1}
    return _processor(
        *("llava_next", "LlavaNextProcessor", images, tokenizer),
        **options,
        patch_size=4,
        tokenizer=tokenizer,
    )


def _llava_onevision() -> Any:
    tokenizer = _tokenizer("<image>", "<video>", template="<image>")
    images = _images(
        *("llava_onevision", "LlavaOnevisionImageProcessorPil"),
        size=_SIZE,
        image_grid_pinpoints=_PINPOINTS,
    )
    return _processor(
        *("llava_onevision", "LlavaOnevisionProcessor", images, tokenizer, _NoVideos()),
        num_image_tokens=16,
        vision_feature_select_strategy="full",
        tokenizer=tokenizer,
    )


def _internvl() -> Any:
    names = ("<img>", "</img>", "<IMG_CONTEXT>", "<video>")
    tokenizer = _tokenizer(
        *names,
        template="<IMG_CONTEXT>",
        start_image_token="<img>",
        end_image_token="</img>",
        context_image_token="<IMG_CONTEXT>",
        video_token="<video>",
    )
    images = _images(
        "got_ocr2", "GotOcr2ImageProcessorPil", size=_SIZE, min_patches=1, max_patches=4
    )
    return _processor(
        *("internvl", "InternVLProcessor", images, tokenizer, _NoVideos()),
        image_seq_length=4,
        tokenizer=tokenizer,
    )


_TILES = tuple(f"<row_{i}_col_{j}>" for i in range(1, 7) for j in range(1, 7))


def _idefics(family: str, name: str, image_class: str, *others: Any) -> Any:
    special = ("<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>")
    tokenizer = _tokenizer(*special, *_TILES, template="<image>")
    images = _images(
        family, image_class, size={"longest_edge": 32}, max_image_size={"longest_edge": 16}
    )
    return _processor(
        family, name, images, tokenizer, *others, image_seq_len=4, tokenizer=tokenizer
    )


def _smolvlm() -> Any:
    module = import_module("transformers.models.smolvlm.processing_smolvlm")
    module.num2words = getattr(module, "num2words", None) or (lambda number: str(number))
    return _idefics("smolvlm", "SmolVLMProcessor", "SmolVLMImageProcessorPil", _NoVideos())


def _mistral3() -> Any:
    # The processor reads a function of this module, which imports torchvision.
    pil = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
    sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
    tokenizer = _tokenizer("[IMG]", "[IMG_BREAK]", "[IMG_END]", template="[IMG]")
    images = _images("pixtral", "PixtralImageProcessorPil", size={"longest_edge": 32}, patch_size=4)
    return _processor(
        *("pixtral", "PixtralProcessor", images, tokenizer),
        patch_size=4,
        spatial_merge_size=2,
        tokenizer=tokenizer,
    )


def _gemma3() -> Any:
    tokenizer = _tokenizer(
        *("<start_of_image>", "<end_of_image>", "<image_soft_token>"),
        template="<start_of_image>",
        boi_token="<start_of_image>",
        eoi_token="<end_of_image>",
        image_token="<image_soft_token>",
    )
    images = _images("gemma3", "Gemma3ImageProcessorPil", size=_SIZE)
    return _processor(
        *("gemma3", "Gemma3Processor", images, tokenizer), image_seq_length=4, tokenizer=tokenizer
    )


_PROCESSORS: dict[str, Callable[[], Any]] = {
    "qwen2_vl": lambda: _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen2_5_vl": lambda: _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen3_vl": lambda: _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "glm4v": _glm4v,
    "llava": _llava,
    "llava_next": _llava_next,
    "llava_onevision": _llava_onevision,
    "internvl": _internvl,
    "idefics3": lambda: _idefics("idefics3", "Idefics3Processor", "Idefics3ImageProcessorPil"),
    "smolvlm": _smolvlm,
    "mistral3": _mistral3,
    "gemma3": _gemma3,
}

NAMES = tuple(_PROCESSORS)


def tiny_processor(name: str) -> Any:
    """Return a processor of the family `name`."""
    return _PROCESSORS[name]()


# --- models ---------------------------------------------------------------------------------------

_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_TOWER = {
    "hidden_size": 16,
    "intermediate_size": 32,
    "num_hidden_layers": 3,
    "num_attention_heads": 2,
    "image_size": 16,
    "patch_size": 4,
    "initializer_range": 0.2,
    "projection_dim": 16,
}
_QWEN_TOWER = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
    "hidden_size": 16,
    "out_hidden_size": 32,
    "intermediate_size": 32,
}


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
        {"model_type": "llama"},
        _clip("clip_vision_model"),
        {"image_grid_pinpoints": _PINPOINTS},
    ),
    "llava_onevision": (
        {"model_type": "qwen2"},
        {**_clip("siglip_vision_model"), "vision_use_head": False},
        {"image_grid_pinpoints": _PINPOINTS, "vision_feature_select_strategy": "full"},
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
