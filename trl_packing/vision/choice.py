"""Decides whether the rows with images of a run are packed.

data set has images      model's family and settings            path
no                                                              as without images
yes                      in `families.py`, data in memory       packed
yes                      any other                              TRL's, unchanged, with the reason
"""

from typing import Any

import pyarrow as pa
import transformers
from datasets import Dataset, IterableDataset
from packaging.version import Version
from transformers import AutoConfig
from trl.data_utils import get_dataset_column_names, is_conversational

from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW
from trl_packing.vision.families import why_no_family
from trl_packing.vision.image_store import holds_addresses

_OLDEST_TRANSFORMERS = (5, 23)  # processors before it have other methods for sizes and pixels


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
    if {"input_ids", IMAGE_ROW, "conversations", "text", *_LEFT_OUT} & columns:
        return False
    forms = [form for form in ({"messages"}, {"prompt", "completion"}) if form <= columns]
    if len(forms) != 1:
        return False
    rows = dataset.with_format(None).select_columns(sorted(forms[0]))
    return is_conversational(next(iter(rows), {}))


def why_not_packed(model: Any, train: Any, evaluated: Any, args: Any, processor: Any) -> str | None:
    """Return why a run takes TRL's path; arguments as for `RunImages.why_not_packed`."""
    return (
        _why_no_version()
        or _why_no_data(train, evaluated, args)
        or _why_no_model(model, args, processor)
    )


def named_sets(given: Any, name: str = "eval") -> list[tuple[str, Any]]:
    """Return names and data sets of a dictionary, or one data set with `name`."""
    return list(given.items()) if isinstance(given, dict) else [(name, given)]


def sets_of(given: Any) -> list[Any]:
    """Return the data sets of a dictionary, or one data set in a list."""
    return [dataset for _, dataset in named_sets(given)]


def _why_no_version() -> str | None:
    installed = transformers.__version__
    if Version(installed).release[:2] >= _OLDEST_TRANSFORMERS:
        return None
    oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
    return f"the data set has images, and transformers {installed} is older than {oldest}"


def _why_no_data(train: Any, evaluated: Any, args: Any) -> str | None:
    """Return why data or settings of TRL need TRL's path, or None."""
    sets = [dataset for dataset in [*sets_of(train), *sets_of(evaluated)] if has_images(dataset)]
    if any(isinstance(dataset, IterableDataset) for dataset in sets):
        return "a data set is a stream with images, whose lengths are unknown"
    if (getattr(args, "dataset_kwargs", None) or {}).get("skip_prepare_dataset"):
        return "skip_prepare_dataset=True leaves rows with images as they are"
    strategy = getattr(args, "packing_strategy", None)
    if getattr(args, "packing", False) and strategy == "wrapped":
        return "packing_strategy='wrapped' cuts documents anywhere, also in an image"
    if any(map(holds_addresses, sets)):
        return "images are addresses, whose sizes are unknown without a download"
    text_field = getattr(args, "dataset_text_field", "text")
    for dataset in sets:
        columns = set(dataset.column_names)
        forms = [{"messages"}, {text_field}, {"prompt", "completion"}]
        if sum(form <= columns for form in forms) > 1:
            return "rows with images have several forms of text"
        if found := {*_LEFT_OUT} & columns:
            return f"rows with images have {sorted(found)[0]}, which TRL leaves out"
        if found := _keys_of_parts(dataset) & {*_PAYLOADS}:
            return f"parts of messages hold data of their own ({sorted(found)[0]!r})"
    return None


_LEFT_OUT = ("tools", "chat_template_kwargs")  # by TRL, of rows with images
_PAYLOADS = ("image", "url", "path", "base64", "video", "audio")


def _keys_of_parts(dataset: Dataset) -> set[str]:
    """Return the keys of the parts of all messages, as the Arrow table has them."""
    found: set[str] = set()
    for name in {"messages", "prompt", "completion"} & set(dataset.column_names):
        kind = dataset.data.schema.field(name).type
        parts = _fields(_fields(kind).get("content"))
        found |= parts.keys()
    return found


def _fields(kind: pa.DataType | None) -> dict[str, pa.DataType]:
    """Return the fields of the structures in a list, none of any other type."""
    entry = getattr(kind, "value_type", None)
    if entry is None or not pa.types.is_struct(entry):
        return {}
    return {field.name: field.type for field in entry}


def _why_no_model(model: Any, args: Any, processor: Any) -> str | None:
    """Return why a model or its processor needs TRL's path, or None."""
    config = config_of(model, args)
    if reason := why_no_family(config.model_type):
        return reason
    names = ("image_token", "image_token_ids", "_process_images")
    is_known = processor is None or all(hasattr(processor, name) for name in names)
    if not is_known:
        return f"the data set has images, and {type(processor).__name__} has no image_token"
    return None


def config_of(model: Any, args: Any) -> Any:
    """Return the config of a model, or of its name."""
    config = getattr(model, "config", None)
    if config is not None:
        return config
    given = getattr(args, "model_init_kwargs", None) or {}
    chosen = {k: v for k, v in given.items() if k in ("revision", "trust_remote_code")}
    return AutoConfig.from_pretrained(model, **chosen)
