"""The images of one run: whether its rows are packed, its image files, and its documents.

data set has images      model's family and settings            path
no                                                              as without this module
yes                      in `families.py`, data in memory       packed
yes                      any other                              TRL's, unchanged, with the reason

A packed run takes TRL's path later if the processor contradicts its arithmetic, or if no attention
backend is exact with images.
"""

import copy
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from typing import Any

import numpy as np
import pyarrow as pa
import transformers
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from packaging.version import Version
from transformers import AutoConfig, ProcessorMixin
from trl import SFTTrainer
from trl.data_utils import get_dataset_column_names, is_conversational

from trl_packing.config import PackingOptions
from trl_packing.data.checks import check_is_one_set
from trl_packing.data.overflow import Overflow
from trl_packing.data.rules import Preparation
from trl_packing.documents.arrow import ArrowDocuments
from trl_packing.documents.bad_rows import and_others
from trl_packing.documents.labels import IMAGE_COLUMNS, IMAGE_ROW, SEQ_LENGTHS, document_columns
from trl_packing.formatting.chat_template import ChatTemplate
from trl_packing.formatting.message_flags import has_flags
from trl_packing.isolation.guard import IsolationGuard, NotIsolated
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.image_loads import ImageLoads
from trl_packing.vision.batch import ImageBatches
from trl_packing.vision.blank_images import (
    StillTower,
    check_no_experts_are_balanced,
    ranks_wait_for_tower,
)
from trl_packing.vision.documents import ImageRows, keys_of, tokenize_rows
from trl_packing.vision.families import why_no_family
from trl_packing.vision.guard import ImageGuard
from trl_packing.vision.image_store import ImageStore, holds_addresses
from trl_packing.vision.loads import RunLoads
from trl_packing.vision.other_media import check_no_other_media
from trl_packing.vision.placeholders import Placeholder, Placeholders, Size
from trl_packing.vision.tower import hide_boundaries
from trl_packing.vision.tower_cost import TowerCost, patch_size_of
from trl_packing.vision.trl_check import difference_from_trl
from trl_packing.vision.trl_path import (
    check_nothing_is_weighted,
    check_trl_can_train,
    show_images_to_trl,
)

logger = get_logger(__name__)

_TOO_LATE = (
    "under FSDP and DeepSpeed, the model can run only when its micro-batches are planned already, "
    "too late for TRL's path: take DDP, or, if every row has an image, SFTTrainer (a rank without "
    "one would stop the others)"
)
_OLDEST_TRANSFORMERS = (5, 23)  # processors before it have other methods for sizes and pixels


def has_images(dataset: Any) -> bool:
    """Return whether a data set, or one of a dictionary, has a column of images."""
    if isinstance(dataset, dict):
        return any(map(has_images, dataset.values()))
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return False
    return bool({*IMAGE_COLUMNS} & set(get_dataset_column_names(dataset) or ()))


class RunImages:
    """Prepares data sets with images, and makes the tensors of their micro-batches.

    Attributes:
        packs: whether the training set has images that are packed; the other methods do nothing
            if not.
        store: the image files.
        contradiction: how the processor contradicts its arithmetic; None if it does not.
        is_built: whether the trainer is built, so that its path can no longer be chosen.
    """

    def __init__(self) -> None:
        self.packs = False
        self.store = ImageStore()
        self._loads = RunLoads(TowerCost())
        self._patch_size = 0
        self._takes_texts = False
        self.contradiction: str | None = None
        self.is_built = False
        self._given: tuple[Any, Any] = (None, None)
        self._tower: StillTower | None = None

    def why_not_packed(
        self, model: Any, train: Any, evaluated: Any, args: Any, processor: Any
    ) -> str | None:
        """Return why a training set with images takes TRL's path, or None if it is packed.

        Args:
            model: a model or its name.
            train: the training set, with images, or a dictionary of several.
            evaluated: the evaluation sets, which may be None.
            args: settings of the run, which may be None.
            processor: the user's, which may be None.

        Raises:
            ValueError: TRL cannot train these data sets either.
        """
        for name, dataset in (*_named(train, "train"), *_named(evaluated)):
            if isinstance(dataset, Dataset):
                check_no_other_media(dataset, name)
        reason = (
            _why_no_version()
            or _why_no_data(train, evaluated, args)
            or _why_no_model(model, args, processor)
        )
        self.packs = reason is None
        if reason is not None:
            check_is_one_set(train, reason)
            check_nothing_is_weighted([train, *_sets(evaluated)], reason)
        if self.packs:
            self._takes_texts = isinstance(train, dict)
            config = _config_of(model, args)
            self._loads, self._patch_size = RunLoads(TowerCost.of(config)), patch_size_of(config)
        return reason

    def loads(self, documents: ArrowDocuments) -> ImageLoads | None:
        """Return the patches and the cost of the images of documents; None if they have none."""
        return self._loads.of(documents) if self.packs else None

    def check_options(self, options: PackingOptions) -> None:
        """Raise ValueError for a setting that only data sets with images have."""
        if options.max_patches is not None and not self.packs:
            raise ValueError(
                f"max_patches={options.max_patches} limits the images of a bin, but the training "
                "set has no images; leave it out"
            )

    def take_all(self, train: Any, evaluated: Any) -> tuple[Any, Any]:
        """Return the data sets of the constructor with numbers in place of their images."""
        self._given = (train, evaluated)
        return self.take(train, "train"), self.take(evaluated, "eval")

    def give_back(self, trainer: SFTTrainer, reason: str) -> None:
        """Make `trainer` train the data sets of the constructor as TRL does, with their images.

        Raises:
            ValueError: a setting, or the weights of a data set, would be refused or ignored there,
                or the training set is a dictionary.
        """
        check_is_one_set(self._given[0], reason)
        check_trl_can_train(trainer.args, reason)
        check_nothing_is_weighted([self._given[0], *_sets(self._given[1])], reason)
        self.packs = False
        show_images_to_trl(trainer, *self._given)

    def take(self, dataset: Any, name: str) -> Any:
        """Return `dataset` with numbers in place of its images; without images, as it is.

        TRL would refuse to pack images that it sees. In a run on a dictionary of data sets,
        conversations without images become rows that have none, so that settings apply to both.
        """
        if isinstance(dataset, dict):
            return {key: self.take(value, key) for key, value in dataset.items()}
        if not (self.packs and isinstance(dataset, Dataset)):
            return dataset
        if has_images(dataset):
            return self.store.take(dataset, name)
        is_taken = self._takes_texts and _holds_conversations(dataset)
        return self.store.take_texts(dataset, name) if is_taken else dataset

    def without_files(self) -> "RunImages":
        """Return the images of the same run before any of its data sets was taken."""
        made = copy.copy(self)
        made.store, made.contradiction = ImageStore(), None
        made._loads = RunLoads(self._loads.cost)
        return made

    def guard(self, model: Any, **options: Any) -> IsolationGuard:
        """Return the guard of the run; options as for `IsolationGuard`."""
        if not self.packs:
            return IsolationGuard(model, **options)
        return ImageGuard(model, self.store, **options)

    @contextmanager
    def explaining(self, trainer: SFTTrainer) -> Iterator[None]:
        """Say in the error of a check why a sharded run does not take TRL's path."""
        try:
            yield
        except NotIsolated as error:
            is_sharded = trainer.is_fsdp_enabled or trainer.is_deepspeed_enabled
            if not (self.packs and is_sharded):
                raise
            raise NotIsolated(f"{error}; {_TOO_LATE}") from error

    def add_to(self, collator: PackedCollator, trainer: SFTTrainer) -> PackedCollator:
        """Return `collator`, with the tensors of images in its rows if the run has images.

        The tower of the model then never sees boundaries of documents.
        """
        if not self.packs:
            return collator
        model, waits = trainer.model, ranks_wait_for_tower(trainer)
        hide_boundaries(model)
        if waits:
            check_no_experts_are_balanced(trainer)
        if waits and not trainer.is_deepspeed_enabled:
            self._tower = StillTower()
            trainer.add_callback(self._tower)
        images = ImageBatches(self.store, trainer.processing_class, model, fills_rows=waits)
        return replace(collator, images=images)

    def measure(self, batches: Sequence[Mapping[str, Any]]) -> None:
        """Note whether any rank has images in the micro-batches of a step."""
        if self._tower is not None:
            self._tower.measure(batches)

    def tokenize(
        self, dataset: Any, rules: Preparation, chat_template: str | None, name: str
    ) -> Any:
        """Return the documents of a data set with images; any other data set as it is.

        Args:
            dataset: rows.
            rules: of the run.
            chat_template: replaces the processor's; None: the processor's.
            name: of the data set, for messages.

        Raises:
            ValueError: naming the row, for what cannot be prepared.
        """
        if not isinstance(dataset, Dataset):
            return dataset
        if isinstance(rules.processing_class, ProcessorMixin):
            check_no_other_media(dataset, name)
        if self.is_built and name == "train":  # the user has set another training set
            self._given = (dataset, self._given[1])
        dataset, processor = self.take(dataset, name), rules.processing_class
        if IMAGE_ROW not in dataset.column_names or "input_ids" in dataset.column_names:
            return dataset
        check_settings(dataset, rules, name)
        chat = ChatTemplate(processor.tokenizer, chat_template or template_of(processor))
        placeholders = Placeholders(processor, self._patch_size)
        row_format = replace(rules.row_format, chat=chat)
        weighted = has_flags(dataset, dataset[0])
        if weighted and row_format.flags_decide:
            row_format = replace(row_format, train_on="assistant")
        rows = ImageRows.of(row_format, placeholders.token, placeholders.feature_id)
        sizes = self.store.sizes_of(list(dataset[IMAGE_ROW]))
        learned = _learn(placeholders, sizes, name)
        patches = [[learned[key].patches for key in keys_of(of_row)] for of_row in sizes]
        self._loads.add(dataset[IMAGE_ROW], patches)
        documents = tokenize_rows(
            dataset,
            rows,
            learned,
            sizes,
            kept=document_columns(dataset.column_names, rules.options.named_columns()),
            weighted=weighted and row_format.train_on in ("assistant", "last_assistant"),
            num_proc=rules.args.dataset_num_proc,
            name=name,
        )
        if placeholders.counts_images:
            _check_no_row_is_cut(documents, sizes, rules, name)
        rules = replace(rules, row_format=row_format)
        found = difference_from_trl(dataset, documents, self.store, rules, chat_template, name)
        if found is not None and self.is_built:
            raise ValueError(f"{found}; its images cannot be packed, so remove them")
        self.contradiction = self.contradiction or found
        return documents


def _named(given: Any, name: str = "eval") -> list[tuple[str, Any]]:
    return list(given.items()) if isinstance(given, dict) else [(name, given)]


def _sets(given: Any) -> list[Any]:
    return [dataset for _, dataset in _named(given)]


def _holds_conversations(dataset: Dataset) -> bool:
    """Return whether rows are conversations of the form that rows with images may have."""
    columns = {*dataset.column_names}
    if {"input_ids", IMAGE_ROW, "conversations", "text", *_LEFT_OUT} & columns:
        return False
    forms = [form for form in ({"messages"}, {"prompt", "completion"}) if form <= columns]
    if len(forms) != 1:
        return False
    rows = dataset.with_format(None).select_columns(sorted(forms[0]))
    return is_conversational(next(iter(rows), {}))


def _why_no_version() -> str | None:
    installed = transformers.__version__
    if Version(installed).release[:2] >= _OLDEST_TRANSFORMERS:
        return None
    oldest = ".".join(map(str, _OLDEST_TRANSFORMERS))
    return f"the data set has images, and transformers {installed} is older than {oldest}"


def _why_no_data(train: Any, evaluated: Any, args: Any) -> str | None:
    """Return why data or settings of TRL need TRL's path, or None."""
    sets = [dataset for dataset in [*_sets(train), *_sets(evaluated)] if has_images(dataset)]
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
    config = _config_of(model, args)
    if reason := why_no_family(config.model_type):
        return reason
    names = ("image_token", "image_token_ids", "_process_images")
    is_known = processor is None or all(hasattr(processor, name) for name in names)
    if not is_known:
        return f"the data set has images, and {type(processor).__name__} has no image_token"
    return None


def _config_of(model: Any, args: Any) -> Any:
    """Return the config of a model, or of its name."""
    config = getattr(model, "config", None)
    if config is not None:
        return config
    given = getattr(args, "model_init_kwargs", None) or {}
    chosen = {k: v for k, v in given.items() if k in ("revision", "trust_remote_code")}
    return AutoConfig.from_pretrained(model, **chosen)


def check_settings(dataset: Dataset, rules: Preparation, name: str) -> None:
    """Raise ValueError for settings and columns that rows with images cannot serve."""
    options: PackingOptions = rules.options
    if SEQ_LENGTHS in dataset.column_names:
        raise ValueError(
            f"rows of the {name} dataset are packed already (seq_lengths) and have images; pass "
            "the documents"
        )
    refused = {
        "prompt_template": options.prompt_template,
        "response_template": options.response_template,
        "static_shapes": options.static_shapes,
        "append_eos": options.append_eos,
        "train_on": options.train_on if options.train_on == "every_turn" else None,
    }
    for setting, value in refused.items():
        if value:
            raise ValueError(
                f"{setting}={value!r} is not available for data sets with images; leave it out"
            )
    if not isinstance(rules.processing_class, ProcessorMixin):
        raise ValueError(
            f"the {name} dataset has images, but processing_class is a "
            f"{type(rules.processing_class).__name__}; pass the model's processor (AutoProcessor)"
        )


def _check_no_row_is_cut(
    documents: Dataset, sizes: Sequence[np.ndarray], rules: Preparation, name: str
) -> None:
    """Raise ValueError for a row that would keep some of its images, which then change their tiles.

    The processor cuts an image into more tiles if it is alone in its row.
    """
    overflow = Overflow.from_args(rules.args, rules.packing)
    lengths = ArrowDocuments(documents, ["input_ids"]).lengths()
    if overflow.capacity is None or overflow.policy in ("drop", "error"):
        return
    several = np.array([len(of_row) > 1 for of_row in sizes])
    wrong = np.flatnonzero(several & (lengths > overflow.capacity))
    if len(wrong):
        raise ValueError(
            f"row {wrong[0]} of the {name} dataset has {lengths[wrong[0]]} tokens and several "
            f"images, and {type(rules.processing_class).__name__} processes an image differently "
            f"if others are cut off; raise max_length={overflow.capacity}, or set overflow='drop'"
            f"{and_others(wrong)}"
        )


def template_of(processor: Any) -> str | None:
    """Return the chat template of a processor, the default one if it has several."""
    template = processor.chat_template
    return template.get("default") if isinstance(template, dict) else template


def _learn(
    placeholders: Placeholders, sizes: Sequence[np.ndarray], name: str
) -> dict[Size, Placeholder]:
    """Return the placeholders by size. Raises ValueError naming the row of a refused size."""
    found: dict[Size, int] = {}
    for row, of_row in enumerate(sizes):
        for size in keys_of(of_row):
            found.setdefault(size, row)
    try:
        placeholders.learn(found)
    except ValueError:
        for size, row in found.items():
            try:
                placeholders.learn([size])
            except ValueError as error:
                raise ValueError(
                    f"row {row} of the {name} dataset has an image of {size[1]} × {size[0]} "
                    f"pixels, which the processor refuses ({error}); remove the row or resize it"
                ) from error
    return {size: placeholders.of(size) for size in found}
