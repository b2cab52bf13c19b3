"""Tiny vision-language models, their processors and data sets with images, built in memory.

    processor = tiny_processor("qwen2_5_vl")       # the real class, around a tiny tokenizer
    model = tiny_vision_model("qwen2_5_vl")        # random weights, the ids of that tokenizer
    dataset = image_dataset()                      # images of several sizes; some rows have none
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from datasets import Dataset
from PIL import Image
from helpers.tiny import tiny_tokenizer

NAMES = ["qwen2_vl", "qwen2_5_vl"]

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{{- 'IMAGE' if part['type'] == 'image' else part['text'] }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


class _NoVideos:
    """Stands in for a video processor, which needs torchvision."""

    model_input_names: tuple[str, ...] = ()

    def save_pretrained(self, *_args: Any, **_kwargs: Any) -> list[str]:
        return []

    def to_dict(self) -> dict[str, Any]:
        return {}


def _without_class_checks(cls: type) -> type:
    return type(cls.__name__, (cls,), {"check_argument_for_proper_class": lambda *_: None})


def _tokenizer(*special: str, template: str) -> Any:
    tokenizer = tiny_tokenizer(chat=True)
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", template)
    return tokenizer


def _qwen_processor() -> Any:
    from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
    from transformers.models.qwen2_vl.processing_qwen2_vl import Qwen2VLProcessor

    tokenizer = _tokenizer(
        *("<|vision_start|>", "<|image_pad|>", "<|video_pad|>", "<|vision_end|>"),
        template="<|vision_start|><|image_pad|><|vision_end|>",
    )
    images = Qwen2VLImageProcessorPil(
        patch_size=4, merge_size=2, min_pixels=8 * 8 * 2, max_pixels=8 * 8 * 24
    )
    return _without_class_checks(Qwen2VLProcessor)(
        images, tokenizer, _NoVideos(), chat_template=tokenizer.chat_template
    )


def tiny_processor(name: str) -> Any:
    """Return a processor of the family `name`."""
    return {"qwen2_vl": _qwen_processor, "qwen2_5_vl": _qwen_processor}[name]()


_TEXT = {
    "hidden_size": 32,
    "intermediate_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 4096,
    "initializer_range": 0.2,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_MROPE = {"rope_type": "default", "rope_theta": 1e4, "mrope_section": [1, 1, 2]}
_QWEN_VISION = {
    "depth": 2,
    "num_heads": 2,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "initializer_range": 0.2,
}


def tiny_vision_model(name: str, processor: Any | None = None, seed: int = 0) -> Any:
    """Return a tiny model of the family `name` for the tokens of `tiny_processor(name)`."""
    from transformers import AutoConfig, AutoModelForImageTextToText

    processor = processor or tiny_processor(name)
    tokenizer = processor.tokenizer
    ids = {
        "image_token_id": processor.image_token_id,
        "video_token_id": processor.video_token_id,
        "vision_start_token_id": tokenizer.convert_tokens_to_ids("<|vision_start|>"),
        "vision_end_token_id": tokenizer.convert_tokens_to_ids("<|vision_end|>"),
    }
    text = {**_TEXT, "vocab_size": len(tokenizer), "rope_parameters": _MROPE}
    vision: dict[str, Any] = dict(_QWEN_VISION)
    if name == "qwen2_vl":
        vision |= {"embed_dim": 16, "hidden_size": 32}
    else:
        vision |= {"hidden_size": 16, "out_hidden_size": 32, "intermediate_size": 32}
        vision |= {"window_size": 16, "fullatt_block_indexes": [1]}
    config = AutoConfig.for_model(name, text_config=text, vision_config=vision, **ids)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(seed)
        return AutoModelForImageTextToText.from_config(config, dtype=torch.float32)


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
