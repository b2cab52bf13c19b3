"""What the arguments of `SFTTrainer` mean to `PackedSFTTrainer`, checked before anything is built.

data_collator of your own, images, with_transform    TRL's path, untouched
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor
packing_strategy, overflow, truncation_mode          one overflow policy
split_batches, dispatch_batches                      refused by name
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from datasets import Dataset, IterableDataset
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from trl_packing.collator import PackedCollator
from trl_packing.config import PackingOptions, check_options
from trl_packing.prepare import Overflow


def reason_for_trl_path(train_dataset: Any, data_collator: Any) -> str | None:
    """Return why a run takes TRL's path unchanged, or None if it is ours."""
    if data_collator is not None and not isinstance(data_collator, PackedCollator):
        return f"data_collator is your own ({type(data_collator).__name__})"
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        columns = get_dataset_column_names(train_dataset) or []
        if {"image", "images"} & set(columns):
            return "the data set has images"
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return "the data set has a transform (with_transform), so lengths are unknown"
    return None


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
        overflow_of(args, args.packing)
    if isinstance(train_dataset, Dataset):
        for name in ("split_batches", "dispatch_batches"):
            if getattr(getattr(args, "accelerator_config", None), name, None):
                raise ValueError(
                    f"accelerator_config.{name}=True cannot divide packed micro-batches, whose "
                    f"documents differ in number; leave {name} unset: ranks get their own bins"
                )
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        check_not_empty(train_dataset, "train")


def check_not_empty(dataset: Dataset | IterableDataset, name: str) -> None:
    """Raise ValueError if `dataset` has no rows."""
    is_map_style = isinstance(dataset, Dataset)
    if (len(dataset) == 0) if is_map_style else (next(iter(dataset), None) is None):
        raise ValueError(f"the {name} dataset is empty: it has no rows; check how it was loaded")


def overflow_of(args: SFTConfig, packing: bool) -> Overflow:
    """Return the overflow policy that `args` ask for, in TRL's terms and ours.

    Raises ValueError for a truncation_mode that does not exist.
    """
    if args.truncation_mode not in ("keep_start", "keep_end"):
        raise ValueError(
            f"Unsupported truncation mode: {args.truncation_mode}, expected 'keep_start' or "
            "'keep_end'"
        )
    policy = PackingOptions.of(args).overflow
    if packing and args.packing_strategy == "wrapped":
        policy = "wrapped"
    elif policy is None:
        policy = "split" if packing and args.packing_strategy == "bfd_split" else "truncate"
    if policy == "truncate" and args.truncation_mode == "keep_end":
        policy = "truncate_start"
    return Overflow(policy, args.max_length)
