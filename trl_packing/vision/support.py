"""Decides whether the rows with images of a run are packed, or take TRL's path with the reason.

Videos and audio are refused by name: only their placeholders would be trained.
"""

from collections.abc import Sequence
from typing import Any

import transformers
from datasets import Dataset, IterableDataset
from packaging.version import Version
from trl.data_utils import get_dataset_column_names, is_conversational

from trl_packing.attention.model_facts import config_of
from trl_packing.data.messages import messages_in, rows_with
from trl_packing.documents.arrow import AnyDataset
from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW, row_name

_OLDEST_TRANSFORMERS = (5, 23)  # processors before it have other methods for sizes and pixels

#: Each type is trained packed in `tests/architectures/test_images.py` and in the matrix of
#: docs/compatibility.md: loss and gradients equal those of its documents one at a time.
FAMILIES = (
    *("qwen2_vl", "qwen2_5_vl", "qwen3_vl", "qwen3_vl_moe", "qwen2_5_omni_thinker"),
    *("glm4v", "glm4v_moe", "glm46v", "glm_ocr", "paddleocr_vl", "cohere_compass"),
    *("llava", "llava_next", "llava_next_video", "llava_onevision", "vipllava"),
    *("internvl", "qianfan_ocr", "aya_vision", "aria", "deepseek_vl", "janus"),
    *("idefics3", "smolvlm", "granite_docling", "granite4_vision"),
    *("mistral3", "lighton_ocr", "gemma3", "gemma4"),
    *("exaone4_5", "hyperclovax_vision_v2", "video_llama_3"),
)

_LEFT_OUT = ("tools", "chat_template_kwargs")  # by TRL, of rows with images
_OF_STREAM = 100  # rows that are read before training
_OTHER_MEDIA = ("video", "videos", "audio", "audios")
_OTHER_PARTS = ("video", "video_url", "audio", "audio_url", "input_audio")


def has_images(dataset: Any) -> bool:
    """Return whether a data set, or one of a dictionary, has a column of images."""
    if isinstance(dataset, dict):
        return any(map(has_images, dataset.values()))
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    return bool({*IMAGE_COLUMNS} & set(get_dataset_column_names(dataset) or ()))


def holds_conversations(dataset: Dataset) -> bool:
    """Return whether rows are conversations of the form that rows with images may have."""
    columns = {*dataset.column_names}
    is_pair = {"prompt", "completion"} <= columns
    others = {"input_ids", IMAGE_ROW, "conversations", "text", *_LEFT_OUT}
    if others & columns or is_pair == ("messages" in columns):
        return False
    return is_conversational(next(iter(dataset.with_format(None)), {}))


def why_not_packed(model: Any, sets: Sequence[Any], args: Any, scores: Any) -> str | None:
    """Return why a run on sets with images takes TRL's path, or None if it is packed."""
    installed = transformers.__version__
    oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
    if Version(installed).release[:2] < _OLDEST_TRANSFORMERS:
        return f"the data set has images, and transformers {installed} is older than {oldest}"
    if any(isinstance(dataset, IterableDataset) for dataset in sets):
        return "a data set is a stream with images, whose lengths are unknown"
    if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        return "skip_prepare_dataset=True leaves rows with images as they are"
    if getattr(args, "packing", False) and args.packing_strategy == "wrapped":
        return "packing_strategy='wrapped' cuts documents anywhere, also in an image"
    if found := {*_LEFT_OUT} & {name for dataset in sets for name in dataset.column_names}:
        return f"rows with images have {min(found)}, which TRL leaves out"
    if scores is not None:
        return "compute_metrics needs the logits of padded rows with images"
    model_type = config_of(model, args).model_type
    reason = f"the data set has images, which are not packed for {model_type} models"
    return None if model_type in FAMILIES else reason


def check_no_other_media(dataset: AnyDataset, name: str) -> None:
    """Raise ValueError if a data set for a model with a processor has videos or audio.

    Of a stream, only the first rows are read.
    """
    if found := {*_OTHER_MEDIA} & {*get_dataset_column_names(dataset)}:
        raise ValueError(
            f"the {name} dataset has {min(found)!r}; only text and images can be trained here, so "
            "remove the column"
        )
    is_stream = isinstance(dataset, IterableDataset)
    rows = dataset.take(_OF_STREAM) if is_stream else rows_with(dataset, ["type"])
    for number, row in enumerate(rows):
        for message in messages_in(row):
            content = message.get("content") if isinstance(message, dict) else None
            for part in content if isinstance(content, list) else ():
                kind = part.get("type") if isinstance(part, dict) else None
                if kind in _OTHER_PARTS:
                    raise ValueError(
                        f"{row_name(number, name)}: a message has a part of type {kind!r}; only "
                        "text and images can be trained here"
                    )
