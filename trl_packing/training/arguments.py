"""Checks of the arguments of `PackedSFTTrainer`, and the path of a run: ours, or TRL's.

a user's data_collator, with_transform, images       TRL's path, unchanged
context or sequence parallelism                      the same
DataCollatorForCompletionOnlyLM                      ours: it finds the trained tokens
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor
split_batches, dispatch_batches                      refused by name on several processes
loss_weights, loss_weight, source_column             refused where no loss can use them

The path is decided before anything else exists. Afterwards another training set is prepared as the
first was, and another collator is refused.
"""

import os
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import fields
from typing import Any

from accelerate import ParallelismConfig
from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import GenerationConfig
from trl import SFTConfig

from trl_packing.attention.state import temporarily
from trl_packing.config import PackingOptions, check_options
from trl_packing.data.checks import check_is_one_set, check_not_empty
from trl_packing.data.fitting import Overflow
from trl_packing.data.prepared import records_of
from trl_packing.data.responses import DataCollatorForCompletionOnlyLM
from trl_packing.documents.labels import IMAGE_COLUMNS, WEIGHT_COLUMNS
from trl_packing.documents.weights import check_some_weight
from trl_packing.loss.sums import Sources, check_weights_can_be_used
from trl_packing.packing.collator import PackedCollator
from trl_packing.training.columns import columns_of, documents_of, has_weights

logger = get_logger(__name__)

# Settings that do something on TRL's path too, or nothing without another one.
_ON_ANY_PATH = ("attention", "isolation_check", "run_page", "mixture_unit", "instruction_template")


# --- TRL's path -----------------------------------------------------------------------------------


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


def reason_to_keep_rows_apart(args: Any) -> str | None:
    """Return that context or sequence parallelism cuts rows, or None.

    Raises:
        ValueError: packed or padding-free rows are asked for all the same.
    """
    parallelism = getattr(args, "parallelism_config", None)
    if parallelism is None and os.environ.get("ACCELERATE_USE_PARALLELISM_CONFIG") == "true":
        parallelism = ParallelismConfig()
    if parallelism is None or not (parallelism.cp_enabled or parallelism.sp_enabled):
        return None
    packs = getattr(args, "packing", False) and not packs_by_default(args)
    if packs or getattr(args, "eval_packing", False) or getattr(args, "padding_free", False):
        raise ValueError(
            "Packing is not compatible with context parallelism (`cp_size > 1`) or sequence "
            "parallelism: sharding a row drops the boundaries between its documents. Set "
            "`packing=False` and `padding_free=False` for padded rows, or disable it."
        )
    return "context or sequence parallelism drops document boundaries"


def leave_packing(args: Any, reason: str, train: Any, evaluated: Any, collator: Any) -> None:
    """Make the settings of a run those of TRL's path, with a warning.

    Args:
        args: the settings; `packing` is turned off if it has our default.
        reason: for TRL's path.
        train: the training set. One that was prepared for packing may not fit there.
        evaluated: the evaluation sets, which may be None.
        collator: the user's, which may use weights by itself; None without one.

    Raises:
        ValueError: a setting, weights or preparation would be ignored there.
    """
    check_is_one_set(train, reason)
    options, columns = PackingOptions.of(args), set()
    if collator is None:
        sets = evaluated.values() if isinstance(evaluated, dict) else [evaluated]
        columns = {column for dataset in [train, *sets] for column in columns_of(dataset)}
    ignored = [
        (f"{option.name}={getattr(options, option.name)!r}", f"leave {option.name} out")
        for option in fields(options)
        if getattr(options, option.name) != option.default and option.name not in _ON_ANY_PATH
    ]
    ignored += [
        (f"a data set has {column!r}", f"drop the column: dataset.remove_columns({column!r})")
        for column in WEIGHT_COLUMNS
        if column in columns
    ]
    ignored += [
        (f"{record.folder} holds documents for packed runs", "pass the rows they were made from")
        for record in records_of(train)
    ]
    for what, way_out in ignored:
        raise ValueError(
            f"{what}, but {reason}, which takes TRL's path, where it does nothing; {way_out}"
        )
    if packs_by_default(args):
        args.packing = False
    logger.warning(f"{reason}: taking TRL's path unchanged, without packing by us")


def packs_by_default(args: Any) -> bool:
    """Return whether `packing` has the default of `PackedSFTConfig`, which is not TRL's."""
    return getattr(args, "_packing_is_default", False)


# --- our path -------------------------------------------------------------------------------------


@contextmanager
def hide_packing(args: Any) -> Iterator[tuple[bool, bool]]:
    """Keep TRL's constructor from packing inside the block; yields (packing, eval_packing)."""
    hidden = {"packing": False, "padding_free": False, "eval_packing": None}
    hidden = {name: value for name, value in hidden.items() if hasattr(args, name)}
    packing, eval_packing = getattr(args, "packing", False), getattr(args, "eval_packing", None)
    with temporarily(args, **hidden):
        yield packing, packing if eval_packing is None else eval_packing


def check_arguments(args: Any, train_dataset: Any) -> None:
    """Raise ValueError for settings that packing cannot serve with this training set."""
    if isinstance(args, SFTConfig):
        check_options(args)
        Overflow.from_args(args, args.packing)
    records, curriculum = records_of(train_dataset), PackingOptions.of(args).curriculum
    if getattr(args, "assistant_only_loss", False) and records:
        raise ValueError(
            "assistant_only_loss=True needs conversations, but the train dataset is prepared; "
            "leave it out, and prepare the data with train_on='assistant'"
        )
    if curriculum is not None and isinstance(train_dataset, IterableDataset):
        raise ValueError(
            f"curriculum={curriculum!r} needs to know all documents before the first step; load "
            "the stream as a Dataset, or sort its files and leave curriculum out"
        )
    # On a single process the trainer turns both off.
    if isinstance(train_dataset, Dataset) and getattr(args, "world_size", 1) > 1:
        for name in ("split_batches", "dispatch_batches"):
            if getattr(getattr(args, "accelerator_config", None), name, None):
                raise ValueError(
                    f"accelerator_config.{name}=True cannot divide packed micro-batches, whose "
                    f"documents differ in number; leave {name} unset: ranks get their own bins"
                )


def check_loss_options(options: PackingOptions, compute_loss_func: Any) -> None:
    """Raise ValueError for settings that need the losses of tokens, beside a user's loss."""
    for name in ("loss_weighting", "source_column"):
        value = getattr(options, name)
        if compute_loss_func is not None and value != getattr(PackingOptions, name):
            raise ValueError(
                f"{name}={value!r} cannot tell tokens apart where compute_loss_func computes the "
                f"loss; leave that out, or leave {name} out"
            )


def check_ranks_and_padding(
    args: SFTConfig, options: PackingOptions, balances_experts: bool, pad_to_multiple_of: int | None
) -> None:
    """Raise ValueError for settings that padded rows, or unequal ranks, cannot serve."""
    settings = {"pad_to_multiple_of": pad_to_multiple_of, "static_shapes": options.static_shapes}
    for name, value in settings.items():
        if balances_experts and value:
            raise ValueError(
                f"{name}={value} would let padding take part in the balance of experts; leave "
                "it unset, or set router_aux_loss_coef=0.0"
            )
    if args.world_size > 1 and not args.average_tokens_across_devices:
        raise ValueError(
            "average_tokens_across_devices=False weights a token by the rank that it falls on, "
            "and packed ranks hold unequal numbers of trained tokens; leave it True"
        )


def check_weights_and_sources(
    train_dataset: Any, eval_datasets: list[Any], options: PackingOptions, compute_loss_func: Any
) -> None:
    """Raise ValueError for weights that no loss can use, and for sources that are not there."""
    for dataset in [train_dataset, *eval_datasets] if compute_loss_func is not None else ():
        check_weights_can_be_used(compute_loss_func, columns_of(dataset))
    for dataset in eval_datasets:
        if options.source_column is not None and dataset is not None:
            Sources.of(dataset, options.source_column)  # refuses missing ones
        if isinstance(dataset, Dataset):
            documents_of(dataset, compute_loss_func)  # refuses damaged weights


def check_nothing_is_skipped(
    options: PackingOptions, completion_only: Any, datasets: Iterable[Any]
) -> None:
    """Raise ValueError for changes and checks that ``skip_prepare_dataset=True`` skips."""
    skipped = {
        "the check that prepared data fit this run": any(map(records_of, datasets)),
        "the labels that DataCollatorForCompletionOnlyLM finds": completion_only is not None,
        "append_eos=True": options.append_eos,
    }
    for what, is_skipped in skipped.items():
        if is_skipped:
            raise ValueError(
                f"skip_prepare_dataset=True skips {what}; leave it out (tokenized or prepared data "
                "are not tokenized again)"
            )


def check_some_weights(datasets: Iterable[Any], compute_loss_func: Any) -> None:
    """Raise ValueError for a set whose weights are all 0: it would train or report nothing."""
    for dataset in datasets:
        if isinstance(dataset, Dataset) and has_weights(dataset):
            check_some_weight(documents_of(dataset, compute_loss_func))


def check_set_afterwards(collator: Any, ours: PackedCollator, dataset: Any) -> None:
    """Raise ValueError for a collator or a training set that a built trainer cannot take.

    Args:
        collator: `data_collator` of the trainer.
        ours: the one that the trainer was built with.
        dataset: `train_dataset` of the trainer.
    """
    if collator is not ours:
        raise ValueError(
            f"data_collator was set to a {type(collator).__name__} on a built trainer, whose rows "
            "are packed by its own. To train on answers alone, set train_on='assistant' or "
            "response_template in the config (labels of a data set are kept); to change batches, "
            "pass a subclass of PackedCollator, or a padding collator, to the constructor"
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


def generation_config_of(model: Any, args: Any) -> Any:
    """Return the generation config of `model`, a model or its name; None without one."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision") or "main"
    try:
        return GenerationConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError):  # there is none, or TRL will report what is wrong with the name
        return None
