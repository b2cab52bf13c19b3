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
from importlib import import_module
from typing import Any, ClassVar, NamedTuple

import transformers
from tokenizers import Tokenizer, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.models.auto.image_processing_auto import IMAGE_PROCESSOR_MAPPING_NAMES
from transformers.models.auto.processing_auto import PROCESSOR_MAPPING_NAMES

PINPOINTS = [[16, 32], [32, 16], [32, 32]]
WIDE_PINPOINTS = [[32, 64], [64, 32], [64, 64]]  # of towers that see 32 × 32 pixels

_SPECIAL = ("<pad>", "<bos>", "<eos>", "<unk>")
_TEXT = "user assistant Question Answer what is this And short Yes : ? . 0 1 2 3 4 5 6 7"
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


class ProcessorParts(NamedTuple):
    """The sizes and tokens of a processor; its classes are those of transformers' own tables.

    Attributes:
        size: options of the image processor.
        tokens: special tokens by the name that tokenizer and configuration give them.
        template: an image in a chat template.
        options: of the processor.
        others: special tokens without a name.
    """

    size: Mapping[str, Any]
    tokens: Mapping[str, str]
    template: str
    options: Mapping[str, Any] = {}
    others: tuple[str, ...] = ()


# --- the table ------------------------------------------------------------------------------------

#: Types that take the processor, or only the images, of another type.
_PROCESSOR_OF = {"glm_ocr": "glm46v", "qwen2_5_omni_thinker": "qwen2_5_omni"}
_IMAGES_OF = {"glm4v_moe": "glm4v", "glm_ocr": "glm46v", "llava": "vipllava"}
_IMAGES_OF |= dict.fromkeys(("qwen2_5_omni_thinker", "qwen3_vl_moe"), "qwen2_vl")

_SQUARE = {"height": 16, "width": 16}
_IMAGE = {"image": "<image>"}
_VIDEO = _IMAGE | {"video": "<video>"}
_TILES = tuple(f"<row_{row}_col_{column}>" for row in range(1, 4) for column in range(1, 4))
_QWEN = {
    "image": "<|image_pad|>",
    "video": "<|video_pad|>",
    "vision_start": "<|vision_start|>",
    "vision_end": "<|vision_end|>",
}
_QWEN_SIZE = {"patch_size": 4, "merge_size": 2, "min_pixels": 8 * 8 * 2, "max_pixels": 8 * 8 * 24}
_QWEN_VL = ProcessorParts(_QWEN_SIZE, _QWEN, "<|vision_start|><|image_pad|><|vision_end|>")
_CLIP_SIZE = {"size": {"shortest_edge": 16}, "crop_size": _SQUARE}
_WIDE_SIZE = {"size": {"shortest_edge": 32}, "crop_size": {"height": 32, "width": 32}}
_LLAVA = {"patch_size": 4, "vision_feature_select_strategy": "default"}
_LLAVA |= {"num_additional_image_tokens": 1}
_CLIP = ProcessorParts(_CLIP_SIZE, _IMAGE, "<image>", _LLAVA)
_NEXT = _CLIP._replace(size=_CLIP_SIZE | {"image_grid_pinpoints": PINPOINTS})
_TILED_SIZE = {"size": _SQUARE, "min_patches": 1, "max_patches": 4}
_INTERN = dict.fromkeys(("image", "context_image"), "<IMG_CONTEXT>")
_INTERN |= {"start_image": "<img>", "end_image": "</img>", "video": "<video>"}
_INTERN_VL = ProcessorParts(_TILED_SIZE, _INTERN, "<IMG_CONTEXT>", {"image_seq_length": 4})
_IDEFICS = ProcessorParts(
    {"size": {"longest_edge": 32}, "max_image_size": {"longest_edge": 16}},
    _IMAGE,
    "<image>",
    {"image_seq_len": 4},
    ("<fake_token_around_image>", "<end_of_utterance>", "<global-img>", *_TILES),
)


def _pixtral(image: str, image_break: str, image_end: str) -> ProcessorParts:
    size = {"size": {"longest_edge": 32}, "patch_size": 4}
    tokens = {"image": image, "image_break": image_break, "image_end": image_end}
    return ProcessorParts(size, tokens, image, {"patch_size": 4, "spatial_merge_size": 2})


_GLM_TOKENS = {"image": "<|image|>", "video": "<|video|>"} | {
    f"{kind}_{end}": f"<|{word}_of_{kind}|>"
    for kind in ("image", "video")
    for end, word in (("start", "begin"), ("end", "end"))
}
_EDGES = {"shortest_edge": 8 * 8 * 2, "longest_edge": 8 * 8 * 24}
_GLM = ProcessorParts(
    {"patch_size": 4, "merge_size": 2, "size": _EDGES},
    _GLM_TOKENS,
    "<|begin_of_image|><|image|><|end_of_image|>",
)
_DEEPSEEK = ProcessorParts(
    {"size": _SQUARE, "min_size": 4}, _IMAGE, "<image>", {"num_image_tokens": 16}
)
_OMNI = (
    _QWEN
    | {"audio": "<|audio_pad|>"}
    | {
        f"{kind}_{name}": f"<|{kind}_{end}|>"
        for kind in ("vision", "audio")
        for name, end in (("bos", "start"), ("eos", "end"), ("start", "start"), ("end", "end"))
    }
)
_GEMMA = {"image": "<image_soft_token>", "boi": "<start_of_image>", "eoi": "<end_of_image>"}

_PARTS: dict[str, ProcessorParts] = {
    "aria": ProcessorParts(
        {"max_image_size": 980}, _IMAGE, "<image>", {"size_conversion": {980: 4}}
    ),
    "aya_vision": ProcessorParts(
        _TILED_SIZE | {"crop_to_patches": True},
        {"image": "<|IMG_PATCH|>"},
        "<image>",
        {"patch_size": 4, "img_size": 16, "downsample_factor": 2},
        ("<image>", "<|START_OF_IMG|>", "<|END_OF_IMG|>", "TILE", "TILE_GLOBAL"),
    ),
    "cohere_compass": ProcessorParts(
        _QWEN_SIZE,
        {name: token.upper() for name, token in _QWEN.items()},
        "<|VISION_START|><|IMAGE_PAD|><|VISION_END|>",
    ),
    "deepseek_vl": _DEEPSEEK,
    "gemma3": ProcessorParts(
        {"size": _SQUARE}, _GEMMA, "<start_of_image>", {"image_seq_length": 4}
    ),
    "gemma4": ProcessorParts(
        {"patch_size": 4, "max_soft_tokens": 70, "pooling_kernel_size": 3},
        {"image": "<|image|>", "boi": "<|image>", "eoi": "<image|>", "audio": "<|audio|>"}
        | {"boa": "<|audio>", "eoa": "<audio|>", "video": "<|video|>"},
        "<|image|>",
    ),
    **dict.fromkeys(("glm46v", "glm4v", "glm4v_moe", "glm_ocr"), _GLM),
    "granite4_vision": ProcessorParts(
        _WIDE_SIZE | {"image_grid_pinpoints": WIDE_PINPOINTS},
        _IMAGE,
        "<image>",
        _LLAVA | {"downsample_rate": "4/8"},
    ),
    "granite_docling": _IDEFICS._replace(size={"size": _SQUARE, "max_patches": 4}),
    "internvl": _INTERN_VL,
    "janus": _DEEPSEEK._replace(
        tokens=_IMAGE | {"boi": "<begin_of_image>", "eoi": "<end_of_image>"}
    ),
    "lighton_ocr": _pixtral("<|image_pad|>", "<|vision_pad|>", "<|vision_end|>"),
    **dict.fromkeys(("llava", "vipllava"), _CLIP),
    "llava_next": _NEXT,
    "llava_next_video": _NEXT._replace(tokens=_VIDEO),
    "llava_onevision": ProcessorParts(
        {"size": _SQUARE, "image_grid_pinpoints": PINPOINTS},
        _VIDEO,
        "<image>",
        {"num_image_tokens": 16, "vision_feature_select_strategy": "full"},
    ),
    "mistral3": _pixtral("[IMG]", "[IMG_BREAK]", "[IMG_END]"),
    "qianfan_ocr": _INTERN_VL._replace(template="<image>", others=("<image>",)),
    "qwen2_5_omni_thinker": _QWEN_VL._replace(tokens=_OMNI),
    **dict.fromkeys(("qwen2_5_vl", "qwen2_vl", "qwen3_vl", "qwen3_vl_moe"), _QWEN_VL),
    **dict.fromkeys(("exaone4_5", "hyperclovax_vision_v2", "paddleocr_vl"), _QWEN_VL),
    **dict.fromkeys(("idefics3", "smolvlm"), _IDEFICS),
    "video_llama_3": _QWEN_VL._replace(template="<|image_pad|>"),
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
    images: Any = IMAGE_PROCESSOR_MAPPING_NAMES[_IMAGES_OF.get(name, name)]
    given = {
        "tokenizer": tokenizer,
        "image_processor": _class(images["pil"])(**parts.size),
        "video_processor": _Nothing(),
        "feature_extractor": _Nothing(),
    }
    processor: Any = PROCESSOR_MAPPING_NAMES[_PROCESSOR_OF.get(name, name)]
    real = _class(processor)
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


def _class(name: str) -> Any:
    """Return a class of transformers, also where a package is missing that nothing here needs."""
    modules: Any = transformers._class_to_module  # type: ignore[attr-defined]
    return getattr(import_module(f"transformers.{modules[name]}"), name)


def _replace_missing_packages(name: str) -> None:
    """Give modules of transformers what they would import from torchvision and num2words."""
    if name == "smolvlm":
        module: Any = import_module("transformers.models.smolvlm.processing_smolvlm")
        module.num2words = getattr(module, "num2words", None) or str
    if name == "mistral3":
        pil = import_module("transformers.models.pixtral.image_processing_pil_pixtral")
        sys.modules.setdefault("transformers.models.pixtral.image_processing_pixtral", pil)
