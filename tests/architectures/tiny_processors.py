"""A tiny processor of every vision-language type that can be built without a hub and torchvision.

    tiny_processor("llava")      the real class, around a tokenizer of words and a small image size
    token_ids("llava", …)        the ids of its tokens under the names that configurations have
    NAMES                        the types of this table

A row of the table gives the two classes, the sizes of images and the special tokens; all others are
the defaults of the classes. Image processors are those of PIL. Video and audio processors are left
out, because theirs need torchvision. Towers of `tiny_vision.py` read patches of 4 × 4 pixels.
"""

import inspect
import sys
from collections.abc import Mapping
from dataclasses import dataclass, field
from importlib import import_module
from typing import Any, ClassVar

from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

PINPOINTS = [[16, 32], [32, 16], [32, 32]]
WIDE_PINPOINTS = [[32, 64], [64, 32], [64, 64]]  # of towers that see 32 × 32 pixels

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_TEXT = (
    "user assistant what is on this picture ? a the red green blue cat dog house street tree with "
    "two small large and of in front . yes no it looks like"
)
_TURNS = ("<|im_start|>", "<|im_end|>")

_TEMPLATE = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['content'] is string %}{{- message['content'] }}
{%- else %}{%- for part in message['content'] %}
{{- 'IMAGE' if part['type'] == 'image' else part['text'] }}{%- endfor %}{%- endif %}
{{- '<|im_end|>\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{%- endif %}"""


@dataclass(frozen=True)
class ProcessorParts:
    """The classes and sizes of a processor.

    Attributes:
        processor: folder and class.
        images: folder and class of its image processor.
        size: options of the image processor.
        tokens: special tokens by the name that tokenizer and configuration give them.
        template: an image in a chat template.
        options: of the processor.
        others: special tokens without a name.
    """

    processor: tuple[str, str]
    images: tuple[str, str]
    size: Mapping[str, Any]
    tokens: Mapping[str, str]
    template: str
    options: Mapping[str, Any] = field(default_factory=dict)
    others: tuple[str, ...] = ()


# --- the table ------------------------------------------------------------------------------------

_SQUARE = {"height": 16, "width": 16}
_IMAGE = {"image": "<image>"}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
_QWEN = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
_QWEN_IMAGES = ("qwen2_vl", "Qwen2VLImageProcessorPil")
_QWEN_SIZE = {"patch_size": 4, "merge_size": 2, "min_pixels": 8 * 8 * 2, "max_pixels": 8 * 8 * 24}
_EDGES = {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 24}
_CLIP = ("clip", "CLIPImageProcessorPil")
_CLIP_SIZE = {"size": {"shortest_edge": 16}, "crop_size": _SQUARE}
_ANYRES = ("llava_next", "LlavaNextImageProcessorPil")
_ANYRES_SIZE = _CLIP_SIZE | {"image_grid_pinpoints": PINPOINTS}
_LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default"} | {
    "num_additional_image_tokens": 1
}
_TILED = ("got_ocr2", "GotOcr2ImageProcessorPil")
_TILED_SIZE = {"size": _SQUARE, "min_patches": 1, "max_patches": 4}
_INTERN = {
    "image": "<IMG_CONTEXT>",
    "context_image": "<IMG_CONTEXT>",
    "start_image": "<img>",
    "end_image": "</img>",
    "video": "<video>",
}
_IDEFICS_SIZE = {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}}
_IDEFICS_OTHERS = ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_TILES)
_PIXTRAL = ("pixtral", "PixtralImageProcessorPil")
_PIXTRAL_SIZE = {"size": {"longest_edge": 32}, "patch_size": 4}
_PIXTRAL_OPTIONS = {"patch_size": 4, "spatial_merge_size": 2}
_GEMMA = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}
_GLM = {
    "image": "<|image|>",
    "video": "<|video|>",
    "image_start": "<|begin_of_image|>",
    "image_end": "<|end_of_image|>",
    "video_start": "<|begin_of_video|>",
    "video_end": "<|end_of_video|>",
}
_GLM_IMAGE = "<|begin_of_image|><|image|><|end_of_image|>"
_GLM_SIZE = {"patch_size": 4, "merge_size": 2, "size": _EDGES}
_DEEPSEEK_SIZE = {"size": _SQUARE, "min_size": 4}
_OMNI = _QWEN | {
    "audio": "<|audio_pad|>",
    "vision_bos": "<|vision_start|>",
    "vision_eos": "<|vision_end|>",
    "audio_bos": "<|audio_start|>",
    "audio_eos": "<|audio_end|>",
    "audio_start": "<|audio_start|>",
    "audio_end": "<|audio_end|>",
}


def _qwen(folder: str, name: str, tokens: Mapping[str, str] = _QWEN) -> ProcessorParts:
    template = "<|vision_start|><|image_pad|><|vision_end|>"
    return ProcessorParts((folder, name), _QWEN_IMAGES, _QWEN_SIZE, tokens, template)


def _glm(folder: str, name: str, images: str) -> ProcessorParts:
    return ProcessorParts((folder, name), (folder, images), _GLM_SIZE, _GLM, _GLM_IMAGE)


def _idefics(folder: str, name: str) -> ProcessorParts:
    return ProcessorParts(
        (folder, f"{name}Processor"),
        (folder, f"{name}ImageProcessorPil"),
        *(_IDEFICS_SIZE, _IMAGE, "<image>"),
        {"image_seq_len": 4},
        _IDEFICS_OTHERS,
    )


_PARTS: dict[str, ProcessorParts] = {
    "aria": ProcessorParts(
        ("aria", "AriaProcessor"),
        ("aria", "AriaImageProcessorPil"),
        {"max_image_size": 980},
        *(_IMAGE, "<image>"),
        {"size_conversion": {980: 4}},
    ),
    "aya_vision": ProcessorParts(
        *(("aya_vision", "AyaVisionProcessor"), _TILED, _TILED_SIZE | {"crop_to_patches": True}),
        {"image": "<|IMG_PATCH|>"},
        "<image>",
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
        ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
    ),
    "cohere_compass": ProcessorParts(
        ("cohere_compass", "CohereCompassProcessor"),
        ("cohere_compass", "CohereCompassImageProcessorPil"),
        _QWEN_SIZE,
        {"image": "<|IMAGE_PAD|>", "video": "<|VIDEO_PAD|>"}
        | {"vision_start": "<|VISION_START|>", "vision_end": "<|VISION_END|>"},
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    ),
    "deepseek_vl": ProcessorParts(
        ("deepseek_vl", "DeepseekVLProcessor"),
        ("deepseek_vl", "DeepseekVLImageProcessorPil"),
        *(_DEEPSEEK_SIZE, _IMAGE, "<image>"),
        {"num_image_tokens": 16},
    ),
    "exaone4_5": _qwen("exaone4_5", "Exaone4_5_Processor"),
    "gemma3": ProcessorParts(
        ("gemma3", "Gemma3Processor"),
        ("gemma3", "Gemma3ImageProcessorPil"),
        *({"size": _SQUARE}, _GEMMA, "<start_of_image>"),
        {"image_seq_length": 4},
    ),
    "gemma4": ProcessorParts(
        ("gemma4", "Gemma4Processor"),
        ("gemma4", "Gemma4ImageProcessorPil"),
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "audio": "<|audio|>"}
        | {"boa": "<|audio>", "eoa": "<audio|>", "video": "<|video|>"},
        "<|image|>",
    ),
    "glm46v": _glm("glm46v", "Glm46VProcessor", "Glm46VImageProcessorPil"),
    "glm4v": _glm("glm4v", "Glm4vProcessor", "Glm4vImageProcessorPil"),
    "glm4v_moe": _glm("glm4v", "Glm4vProcessor", "Glm4vImageProcessorPil"),
    "glm_ocr": _glm("glm46v", "Glm46VProcessor", "Glm46VImageProcessorPil"),
    "granite4_vision": ProcessorParts(
        *(("granite4_vision", "Granite4VisionProcessor"), _ANYRES),
        {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
        | {"image_grid_pinpoints": WIDE_PINPOINTS},
        *(_IMAGE, "<image>"),
        _LLAVA | {"downsample_rate": "4/8"},
    ),
    "granite_docling": ProcessorParts(
        ("granite_docling", "GraniteDoclingProcessor"),
        ("granite_docling", "GraniteDoclingImageProcessorPil"),
        *({"size": _SQUARE, "max_patches": 4}, _IMAGE, "<image>"),
        {"image_seq_len": 4},
        _IDEFICS_OTHERS,
    ),
    "hyperclovax_vision_v2": _qwen("hyperclovax_vision_v2", "HyperCLOVAXVisionV2Processor"),
    "idefics3": _idefics("idefics3", "Idefics3"),
    "internvl": ProcessorParts(
        *(("internvl", "InternVLProcessor"), _TILED, _TILED_SIZE, _INTERN, "<IMG_CONTEXT>"),
        {"image_seq_length": 4},
    ),
    "janus": ProcessorParts(
        ("janus", "JanusProcessor"),
        ("janus", "JanusImageProcessorPil"),
        _DEEPSEEK_SIZE,
        _IMAGE | {"boi": "<begin_of_image>", "eoi": "<end_of_image>"},
        "<image>",
        {"num_image_tokens": 16},
    ),
    "lighton_ocr": ProcessorParts(
        *(("lighton_ocr", "LightOnOcrProcessor"), _PIXTRAL, _PIXTRAL_SIZE),
        {"image": "<|image_pad|>", "image_break": "<|vision_pad|>", "image_end": "<|vision_end|>"},
        "<|image_pad|>",
        _PIXTRAL_OPTIONS,
    ),
    "llava": ProcessorParts(
        *(("llava", "LlavaProcessor"), _CLIP, _CLIP_SIZE, _IMAGE, "<image>", _LLAVA)
    ),
    "llava_next": ProcessorParts(
        *(("llava_next", "LlavaNextProcessor"), _ANYRES, _ANYRES_SIZE, _IMAGE, "<image>", _LLAVA)
    ),
    "llava_next_video": ProcessorParts(
        *(("llava_next_video", "LlavaNextVideoProcessor"), _ANYRES, _ANYRES_SIZE),
        *(_IMAGE | {"video": "<video>"}, "<image>", _LLAVA),
    ),
    "llava_onevision": ProcessorParts(
        ("llava_onevision", "LlavaOnevisionProcessor"),
        ("llava_onevision", "LlavaOnevisionImageProcessorPil"),
        {"size": _SQUARE, "image_grid_pinpoints": PINPOINTS},
        *(_IMAGE | {"video": "<video>"}, "<image>"),
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": ProcessorParts(
        *(("pixtral", "PixtralProcessor"), _PIXTRAL, _PIXTRAL_SIZE),
        {"image": "[IMG]", "image_break": "[IMG_BREAK]", "image_end": "[IMG_END]"},
        "[IMG]",
        _PIXTRAL_OPTIONS,
    ),
    "paddleocr_vl": ProcessorParts(
        ("paddleocr_vl", "PaddleOCRVLProcessor"),
        ("paddleocr_vl", "PaddleOCRVLImageProcessorPil"),
        *(_QWEN_SIZE, _QWEN, "<|vision_start|><|image_pad|><|vision_end|>"),
    ),
    "qianfan_ocr": ProcessorParts(
        *(("qianfan_ocr", "QianfanOCRProcessor"), _TILED, _TILED_SIZE, _INTERN, "<image>"),
        {"image_seq_length": 4},
        ("<image>",),
    ),
    "qwen2_5_omni_thinker": _qwen("qwen2_5_omni", "Qwen2_5OmniProcessor", _OMNI),
    "qwen2_5_vl": _qwen("qwen2_5_vl", "Qwen2_5_VLProcessor"),
    "qwen2_vl": _qwen("qwen2_vl", "Qwen2VLProcessor"),
    "qwen3_vl": _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "qwen3_vl_moe": _qwen("qwen3_vl", "Qwen3VLProcessor"),
    "smolvlm": _idefics("smolvlm", "SmolVLM"),
    "video_llama_3": ProcessorParts(
        ("video_llama_3", "VideoLlama3Processor"),
        ("video_llama_3", "VideoLlama3ImageProcessorPil"),
        *(_QWEN_SIZE, _QWEN, "<|image_pad|>"),
    ),
    "vipllava": ProcessorParts(
        *(("llava", "LlavaProcessor"), _CLIP, _CLIP_SIZE, _IMAGE, "<image>", _LLAVA)
    ),
}

NAMES = tuple(_PARTS)

# --- the code that applies it ---------------------------------------------------------------------


class _Nothing(dict):
    """Stands in for a processor of videos or audio."""

    _auto_class = None
    model_input_names: ClassVar[list[str]] = []
    num_frames, fps, size = 1, 1, {"longest_edge": 16}

    def save_pretrained(self, *_args: Any, **_kwargs: Any) -> list[str]:
        return []


def tiny_processor(name: str, tokenizer: Any = None) -> Any:
    """Return a new processor of the vision-language type `name`, one of `NAMES`.

    Args:
        name: of the type.
        tokenizer: gets the special tokens and a chat template; None for one of a few words.
    """
    parts = _PARTS[name]
    _replace_missing_packages(name)
    tokenizer = _word_tokenizer() if tokenizer is None else tokenizer
    _add_tokens(tokenizer, parts)
    given = {
        "tokenizer": tokenizer,
        "image_processor": _class("image_processing_pil", parts.images),
    }
    given["image_processor"] = given["image_processor"](**parts.size)
    given |= {"video_processor": _Nothing(), "feature_extractor": _Nothing()}
    real = _class("processing", parts.processor)
    taken = inspect.signature(real.__init__).parameters
    unchecked = {"check_argument_for_proper_class": lambda *_: None}
    made = type(real.__name__, (real,), unchecked)(
        **{key: part for key, part in given.items() if key in taken}, **parts.options
    )
    made.chat_template = tokenizer.chat_template
    return made


def token_ids(name: str, tokenizer: Any) -> dict[str, int]:
    """Return the ids of the special tokens of `name`, as `image_token_id` and the like."""
    tokens = _PARTS[name].tokens.items()
    return {key: tokenizer.convert_tokens_to_ids(token) for key, token in tokens}


def _word_tokenizer() -> PreTrainedTokenizerFast:
    known = {word: at for at, word in enumerate((*_SPECIAL, *_TEXT.split()))}
    backend = Tokenizer(models.WordLevel(known, unk_token="<unk>"))
    backend.pre_tokenizer = pre_tokenizers.Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=backend,
        pad_token="<pad>",
        bos_token="<bos>",
        eos_token="<|im_end|>",
        unk_token="<unk>",
    )


def _add_tokens(tokenizer: Any, parts: ProcessorParts) -> None:
    """Add the special tokens of a processor, and a chat template."""
    special = dict.fromkeys((*_TURNS, *parts.tokens.values(), *parts.others))
    tokenizer.add_special_tokens({"additional_special_tokens": list(special)})
    for key, token in parts.tokens.items():
        setattr(tokenizer, f"{key}_token", token)
        setattr(tokenizer, f"{key}_token_id", tokenizer.convert_tokens_to_ids(token))
    tokenizer.chat_template = _TEMPLATE.replace("IMAGE", parts.template)


def _class(kind: str, where: tuple[str, str]) -> Any:
    folder, name = where
    return getattr(import_module(f"transformers.models.{folder}.{kind}_{folder}"), name)


def _replace_missing_packages(name: str) -> None:
    """Give modules of transformers what they would import from torchvision and num2words."""
    if name == "smolvlm":
        module: Any = import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = getattr(module, "num2words", None) or str
    if name == "mistral3":
        pil = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
