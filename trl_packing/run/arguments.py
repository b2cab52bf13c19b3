"""Checks of the arguments of `PackedSFTTrainer`, and the path of a run: ours, or TRL's.

a user's data_collator, with_transform, images       TRL's path, unchanged
context parallelism, or sp_size on padded rows       the same
DataCollatorForCompletionOnlyLM                      ours: it finds the trained tokens
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor

The path is decided before anything else exists.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest.mock import patch

from accelerate import ParallelismConfig
from datasets import Dataset, DatasetDict, IterableDataset, IterableDatasetDict
from transformers import GenerationConfig
from trl import SFTConfig
from trl.chat_template_utils import get_training_chat_template, has_generation_markers
from trl.data_utils import is_conversational

from trl_packing.attention.model_facts import loading_options, temporarily
from trl_packing.config import PackingOptions, check_device, check_options
from trl_packing.data.bad_rows import check_is_one_set, check_not_empty
from trl_packing.data.chat_template import PASS_FAST, ChatTemplate
from trl_packing.data.files import records_of
from trl_packing.data.fitting import Overflow
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
from trl_packing.documents.labels import IMAGE_COLUMNS
from trl_packing.packing.collator import PackedCollator
from trl_packing.run.sources import columns_of, weight_columns

# Settings that do something on TRL's path too, or nothing without another one.
_ON_ANY_PATH = ("attention", "isolation_check", "run_page", "mixture_unit", "instruction_template")

_FROM_LAUNCHER = "ACCELERATE_USE_PARALLELISM_CONFIG"  # a variable of `accelerate launch`


def reason_for_trl_path(train_dataset: Any, data_collator: Any) -> str | None:
    """Return why a run takes TRL's path, images and parallelism aside; None if it is ours."""
    ours = (PackedCollator, DataCollatorForCompletionOnlyLM)
    if data_collator is not None and not isinstance(data_collator, ours):
        return f"data_collator is your own ({type(data_collator).__name__})"
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        check_not_empty(train_dataset, "train")
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return "the data set has a transform (with_transform), so lengths are unknown"
    return None


def source_sets(
    train_dataset: Any, args: Any = None, collator: Any = None
) -> dict[str, Any] | None:
    """Return the data sets of a training set that is a dictionary; None for one data set.

    Raises:
        TypeError: it is empty, or holds something else than named data sets of one kind.
        ValueError: they cannot be trained together, or sources of one stream are to be mixed.
    """
    if not isinstance(train_dataset, dict):
        if isinstance(train_dataset, IterableDataset) and PackingOptions.of(args).mixture:
            raise ValueError(
                "a mixture draws sources, which a stream tells only by being read; pass a "
                "dictionary of streams"
            )
        return None
    is_named = all(isinstance(name, str) for name in train_dataset)
    are_streams = {isinstance(dataset, IterableDataset) for dataset in train_dataset.values()}
    are_sets = all(isinstance(d, (Dataset, IterableDataset)) for d in train_dataset.values())
    are_splits = isinstance(train_dataset, (DatasetDict, IterableDatasetDict))
    if are_splits or not (is_named and are_sets and len(are_streams) == 1):
        raise TypeError(
            "`train_dataset` must be a `Dataset` or `IterableDataset`, or a dictionary of one kind "
            "by the names of sources; of splits, pass one"
        )
    for dataset in train_dataset.values():
        if reason := reason_for_trl_path(dataset, collator):
            check_is_one_set(train_dataset, reason)
    return dict(train_dataset)


def parallelism_of(args: Any) -> ParallelismConfig | None:
    """Return accelerate's parallelism of a run, from its settings or from its launcher."""
    given = getattr(args, "parallelism_config", None)
    if given is None and os.environ.get(_FROM_LAUNCHER) == "true":
        return ParallelismConfig()
    return given


def take_parallelism(args: Any) -> str | None:
    """Make accelerate's `sp_size` the `sequence_parallel_size` of `args`, if rows are packed.

    Return that context or sequence parallelism cuts rows, where they stay apart, or None.

    Raises:
        ValueError: packed or padding-free rows are asked for all the same.
    """
    parallelism = parallelism_of(args)
    if parallelism is None or parallelism.cp_size * parallelism.sp_size == 1:
        return None
    is_default = getattr(args, "_packing_is_default", False)
    asked = getattr(args, "packing", False) and not is_default
    asked = asked or getattr(args, "eval_packing", False) or getattr(args, "padding_free", False)
    if (asked or is_default) and parallelism.non_data_parallel_size == parallelism.sp_size:
        size = PackingOptions.of(args).sequence_parallel_size
        if size not in (1, parallelism.sp_size):
            raise ValueError(
                f"sequence_parallel_size={size} and accelerate's sp_size={parallelism.sp_size} "
                "differ; leave one of them out"
            )
        args.sequence_parallel_size = parallelism.sp_size
        return None
    if asked:
        raise ValueError(
            "Packing is not compatible with context parallelism, nor with tensor parallelism "
            "beside sequence parallelism; set packing=False and padding_free=False"
        )
    return "context or sequence parallelism drops document boundaries"


def leave_packing(args: Any, reason: str, train: Any, evaluated: Any, collator: Any) -> None:
    """Turn `packing` off if it has our default: the run takes TRL's path, for `reason`.

    Raises:
        ValueError: a setting, weights or preparation would be ignored there.
    """
    check_is_one_set(train, reason)
    ignored = [
        f"{name}={value!r}"
        for name, value in vars(PackingOptions.of(args)).items()
        if value != getattr(PackingOptions, name) and name not in _ON_ANY_PATH
    ]
    # A collator may read weights, if `Trainer` leaves them in the rows.
    if collator is None or getattr(args, "remove_unused_columns", True):
        sets = [train, *(evaluated.values() if isinstance(evaluated, dict) else [evaluated])]
        ignored += [column for dataset in sets for column in weight_columns(dataset)]
    ignored += [f"{record.folder}, prepared for packed runs," for record in records_of(train)]
    if ignored:
        raise ValueError(
            f"{ignored[0]} does nothing on TRL's path, taken since {reason}; leave one of them out"
        )
    if getattr(args, "_packing_is_default", False):
        args.packing = False


def refuse_model_init(model_init: Any) -> None:
    """Raise ValueError for a function that makes a model: TRL prepares only the one it is given."""
    if model_init is not None:
        raise ValueError(
            "model_init makes models that TRL's trainer cannot prepare; pass `model`, and build a "
            "trainer for each trial of a search"
        )


@contextmanager
def hide_packing(args: Any) -> Iterator[None]:
    """Keep TRL's constructor from packing, and accelerate from cutting rows, inside the block."""
    hidden: dict[str, Any] = {"packing": False, "padding_free": False, "eval_packing": None}
    environment = {}
    if getattr(parallelism_of(args), "sp_enabled", False):
        hidden["parallelism_config"] = None
        environment[_FROM_LAUNCHER] = "false"
    hidden = {name: value for name, value in hidden.items() if hasattr(args, name)}
    with temporarily(args, **hidden), patch.dict(os.environ, environment):
        yield


def check_arguments(args: Any, train_dataset: Any, compute_loss_func: Any) -> None:
    """Raise ValueError for settings that packing cannot serve with this training set and loss."""
    check_device(args)
    if getattr(args, "use_liger_kernel", False) and args.device.type == "cpu":
        raise ValueError("use_liger_kernel=True needs a GPU, and the run is on a CPU; leave it out")
    if isinstance(args, SFTConfig):
        check_options(args)
        Overflow.from_args(args, args.packing)
    options = PackingOptions.of(args)
    for name in (  # they need the losses of tokens
        "loss_weighting",
        "source_column",
        "sequence_parallel_size",
        "max_tokens_in_memory",
    ):
        value = getattr(options, name)
        if compute_loss_func is not None and value != getattr(PackingOptions, name):
            raise ValueError(f"{name}={value!r} and compute_loss_func exclude each other")
    curriculum = options.curriculum
    if curriculum is not None and isinstance(train_dataset, IterableDataset):
        raise ValueError(f"curriculum={curriculum!r} cannot order a stream; load it as a Dataset")
    # On a single process the trainer turns both off.
    if isinstance(train_dataset, Dataset) and getattr(args, "world_size", 1) > 1:
        for name in ("split_batches", "dispatch_batches"):
            if getattr(getattr(args, "accelerator_config", None), name, None):
                raise ValueError(
                    f"accelerator_config.{name}=True cannot divide packed micro-batches; leave "
                    f"{name} unset"
                )


def check_ranks(args: Any, shared_by: int) -> None:
    """Raise ValueError if the ranks of a run cannot be grouped by its `sequence_parallel_size`.

    `shared_by` is the number of ranks that see the same rows by means of other libraries.
    """
    size = PackingOptions.of(args).sequence_parallel_size
    if size > 1 and shared_by > 1:
        raise ValueError(
            f"sequence_parallel_size={size} and tensor parallelism over {shared_by} ranks exclude "
            "each other; set one of them to 1"
        )
    if args.world_size % size:
        raise ValueError(
            f"sequence_parallel_size={size} does not divide the number of processes, "
            f"{args.world_size}; start a multiple of {size} (torchrun --nproc_per_node {size})"
        )


def check_set_afterwards(collator: Any, ours: PackedCollator, dataset: Any) -> None:
    """Raise ValueError for a collator or a training set that a built trainer cannot take."""
    if collator is not ours:
        raise ValueError(
            f"data_collator was set to a {type(collator).__name__} on a built trainer: set train_on"
            "='assistant' or response_template, or pass the collator to the constructor"
        )
    if not isinstance(dataset, (Dataset, IterableDataset)):
        return  # there is none, or preparation refuses it
    reason = reason_for_trl_path(dataset, None)
    if ours.images is None and {*IMAGE_COLUMNS} & {*columns_of(dataset)}:
        reason = "the data set has images"
    if reason:
        raise ValueError(
            f"train_dataset was set on a built trainer, but {reason}: pass it to the constructor"
        )


def training_template(tokenizer: Any) -> str | None:
    """Return the chat template that TRL takes for ``assistant_only_loss``; None: the tokenizer's.

    Raises:
        ValueError: TRL knows no template with marks for this tokenizer, or it has none.
    """
    if not tokenizer.chat_template:
        raise ValueError(
            "assistant_only_loss=True needs a chat template, and the tokenizer has none; set "
            f"chat_template_path, or {PASS_FAST}"
        )
    if has_generation_markers(ChatTemplate(tokenizer).source):
        return None
    try:
        return get_training_chat_template(tokenizer)
    except ValueError as error:
        raise ValueError(
            "assistant_only_loss=True needs a chat template with {% generation %} marks, and that "
            "of this tokenizer has none; set train_on='assistant' instead, which needs no marks"
        ) from error


def explain_missing_marks(args: Any, tokenizer: Any, dataset: Any) -> None:
    """Raise our ValueError, with the way out, where TRL has refused a chat template."""
    if tokenizer is None or dataset is None or not getattr(args, "assistant_only_loss", False):
        return
    if is_conversational(next(iter(dataset), {})):
        training_template(tokenizer)


def generation_config_of(model: Any, args: Any) -> Any:
    """Return the generation config of `model`, a model or its name; None without one."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    try:
        return GenerationConfig.from_pretrained(model, revision=loading_options(args)["revision"])
    except (OSError, ValueError):  # there is none, or TRL will report what is wrong with the name
        return None
