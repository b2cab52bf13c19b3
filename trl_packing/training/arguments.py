"""What the arguments of `SFTTrainer` mean to `PackedSFTTrainer`, checked before anything is built.

data_collator of your own, images, with_transform    TRL's path, untouched
DataCollatorForCompletionOnlyLM                      ours: it says which tokens are trained
formatting_func                                      for one example, or for a batch as it once was
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor
packing_strategy, overflow, truncation_mode          one overflow policy
split_batches, dispatch_batches                      refused by name on several processes
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import GenerationConfig
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from trl_packing.config import PackingOptions, check_options
from trl_packing.data.checks import check_not_empty
from trl_packing.data.overflow import Overflow
from trl_packing.formatting.completion_only_collator import DataCollatorForCompletionOnlyLM
from trl_packing.packing.collator import PackedCollator

_OURS = (PackedCollator, DataCollatorForCompletionOnlyLM)
_PREPARATION_OPTIONS = (
    "append_eos",
    "documents_per_step",
    "overflow",
    "prompt_template",
    "response_template",
    "static_shapes",
    "train_on",
)


def reason_for_trl_path(train_dataset: Any, data_collator: Any) -> str | None:
    """Return why a run takes TRL's path unchanged, or None if it is ours."""
    if data_collator is not None and not isinstance(data_collator, _OURS):
        return f"data_collator is your own ({type(data_collator).__name__})"
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        check_not_empty(train_dataset, "train")
        columns = get_dataset_column_names(train_dataset) or []
        if {"image", "images"} & set(columns):
            return "the data set has images"
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return "the data set has a transform (with_transform), so lengths are unknown"
    return None


def refuse_options(options: PackingOptions, reason: str) -> None:
    """Raise ValueError for a setting of ours that TRL's path would ignore without a word."""
    default = PackingOptions()
    for name in _PREPARATION_OPTIONS:
        value = getattr(options, name)
        if value != getattr(default, name):
            raise ValueError(
                f"{name}={value!r}, but {reason}, which takes TRL's path, where it does nothing; "
                f"leave {name} out"
            )


def packs_by_default(args: Any) -> bool:
    """Return whether `packing` has the default of `PackedSFTConfig`, which is not TRL's."""
    return getattr(args, "_packing_is_default", False)


@contextmanager
def packing_hidden(args: Any) -> Iterator[tuple[bool, bool]]:
    """Keep TRL from packing while its constructor runs; yields (packing, eval_packing)."""
    hidden = {"packing": False, "padding_free": False, "eval_packing": None}
    before = {name: getattr(args, name) for name in hidden if hasattr(args, name)}
    packing, eval_packing = before.get("packing", False), before.get("eval_packing")
    for name in before:
        setattr(args, name, hidden[name])
    try:
        yield packing, packing if eval_packing is None else eval_packing
    finally:
        for name, value in before.items():
            setattr(args, name, value)


def check_arguments(args: Any, train_dataset: Any) -> None:
    """Raise ValueError for settings that packing cannot serve, and for an empty data set."""
    if isinstance(args, SFTConfig):
        check_options(args)
        Overflow.from_args(args, args.packing)
    # One process has nobody to share batches with: there the trainer turns both off.
    if isinstance(train_dataset, Dataset) and getattr(args, "world_size", 1) > 1:
        for name in ("split_batches", "dispatch_batches"):
            if getattr(getattr(args, "accelerator_config", None), name, None):
                raise ValueError(
                    f"accelerator_config.{name}=True cannot divide packed micro-batches, whose "
                    f"documents differ in number; leave {name} unset: ranks get their own bins"
                )


def check_loss_options(
    options: PackingOptions, compute_loss_func: Any, trl_path: str | None = None
) -> None:
    """Raise ValueError for `loss_weighting` and `source_column` where tokens cannot be told apart.

    trl_path: why the run takes TRL's path, if it does.
    """
    if compute_loss_func is not None:
        reason = "compute_loss_func computes the loss; leave that out, or"
    elif trl_path:
        reason = f"{trl_path}, which takes TRL's path;"
    else:
        return
    if options.loss_weighting != "token":
        raise ValueError(
            f"loss_weighting={options.loss_weighting!r} cannot weigh tokens where {reason} leave "
            "loss_weighting='token'"
        )
    if options.source_column is not None:
        raise ValueError(
            f"source_column={options.source_column!r} cannot tell losses apart where {reason} "
            "leave source_column out"
        )


def generation_config_of(model: Any, args: Any) -> Any:
    """Return the generation config of `model`, an object or the name of one; None without one."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision") or "main"
    try:
        return GenerationConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError):  # it has none, or TRL will say what is wrong with the name
        return None
