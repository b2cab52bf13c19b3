"""Checks of the arguments of `PackedSFTTrainer`, and their meaning beside TRL's.

a user's data_collator, with_transform, images       TRL's path, unchanged
DataCollatorForCompletionOnlyLM                      ours: it finds the trained tokens
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor
packing_strategy, overflow, truncation_mode          one overflow policy
split_batches, dispatch_batches                      refused by name on several processes
loss_weights, loss_weight, source_column             refused where no loss can use them
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

from accelerate.logging import get_logger
from datasets import Dataset, IterableDataset
from transformers import GenerationConfig
from trl import SFTConfig
from trl.data_utils import get_dataset_column_names

from trl_packing.attention.state import temporarily
from trl_packing.config import PackingOptions, check_mixture_unit, check_options
from trl_packing.data.checks import check_not_empty
from trl_packing.data.fitting import Overflow
from trl_packing.data.prepared import records_of
from trl_packing.documents.labels import IMAGE_COLUMNS, WEIGHT_COLUMNS
from trl_packing.documents.weights import check_some_weight
from trl_packing.formatting.responses import DataCollatorForCompletionOnlyLM
from trl_packing.loss.sources import Sources
from trl_packing.loss.weights import check_weights_can_be_used
from trl_packing.packing.collator import PackedCollator
from trl_packing.packing.draw import LENGTH, column_of
from trl_packing.training.columns import columns_of, documents_of, has_weights

logger = get_logger(__name__)

_OURS = (PackedCollator, DataCollatorForCompletionOnlyLM)
_PREPARATION_OPTIONS = (
    "append_eos",
    "curriculum",
    "documents_per_step",
    "max_patches",
    "mixture",
    "mixture_temperature",
    "overflow",
    "prefix_sharing",
    "prompt_template",
    "response_template",
    "static_shapes",
    "train_on",
)


def reason_for_trl_path(
    train_dataset: Any, data_collator: Any, *, packs_images: bool = False
) -> str | None:
    """Return why a run takes TRL's path unchanged, or None if it is ours."""
    if data_collator is not None and not isinstance(data_collator, _OURS):
        return f"data_collator is your own ({type(data_collator).__name__})"
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        check_not_empty(train_dataset, "train")
        columns = get_dataset_column_names(train_dataset) or []
        if {*IMAGE_COLUMNS} & set(columns) and not packs_images:
            return "the data set has images"
    if isinstance(train_dataset, Dataset) and train_dataset.format["type"] == "custom":
        return "the data set has a transform (with_transform), so lengths are unknown"
    return None


def refuse_options(options: PackingOptions, reason: str) -> None:
    """Raise ValueError for a setting of ours that TRL's path would silently ignore."""
    default = PackingOptions()
    for name in _PREPARATION_OPTIONS:
        value = getattr(options, name)
        if value != getattr(default, name):
            raise ValueError(
                f"{name}={value!r}, but {reason}, which takes TRL's path, where it does nothing; "
                f"leave {name} out"
            )


def refuse_prepared(datasets: Iterable[Any], reason: str) -> None:
    """Raise ValueError for prepared data on TRL's path, where nothing checks that they fit."""
    for record in (record for dataset in datasets for record in records_of(dataset)):
        raise ValueError(
            f"{record.folder} holds documents for packed runs, but {reason}, which takes TRL's "
            "path; pass the rows that they were prepared from"
        )


def packs_by_default(args: Any) -> bool:
    """Return whether `packing` has the default of `PackedSFTConfig`, which is not TRL's."""
    return getattr(args, "_packing_is_default", False)


def unpack_without_capacity(args: Any) -> None:
    """Turn `packing` off if it has our default and bins would have no capacity."""
    if packs_by_default(args) and args.max_length is None:
        args.packing = False
        logger.warning(
            "max_length=None: bins have no capacity, so documents are not packed; batches are "
            "those of packing=False"
        )


@contextmanager
def hide_packing(args: Any) -> Iterator[tuple[bool, bool]]:
    """Keep TRL's constructor from packing inside the block; yields (packing, eval_packing)."""
    hidden = {"packing": False, "padding_free": False, "eval_packing": None}
    hidden = {name: value for name, value in hidden.items() if hasattr(args, name)}
    packing, eval_packing = getattr(args, "packing", False), getattr(args, "eval_packing", None)
    with temporarily(args, **hidden):
        yield packing, packing if eval_packing is None else eval_packing


def check_arguments(args: Any, train_dataset: Any) -> None:
    """Raise ValueError for settings that packing cannot serve, and for an empty data set."""
    if getattr(args, "assistant_only_loss", False) and records_of(train_dataset):
        raise ValueError(
            "assistant_only_loss=True needs conversations, but the train dataset is prepared; "
            "leave it out, and prepare the data with train_on='assistant'"
        )
    if isinstance(args, SFTConfig):
        check_options(args)
        check_mixture_unit(PackingOptions.of(args))
        Overflow.from_args(args, args.packing)
    curriculum = PackingOptions.of(args).curriculum
    for record in records_of(train_dataset):
        column = curriculum and column_of(curriculum)
        if column not in (None, LENGTH, *(train_dataset.column_names or ())):
            raise ValueError(
                f"curriculum={curriculum!r}, but {record.folder} was prepared without this column; "
                f"run `trl-packing prepare` again with curriculum={curriculum!r}"
            )
    if curriculum is not None and isinstance(train_dataset, IterableDataset):
        raise ValueError(
            f"curriculum={curriculum!r} needs to know all documents before the first step, and a "
            "stream tells them only by being read; load the training set as a Dataset, or sort "
            "the files of the stream and leave curriculum out"
        )
    # On a single process the trainer turns both off.
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

    Args:
        options: the settings of packing.
        compute_loss_func: a user's loss, which may be None.
        trl_path: why the run takes TRL's path; None if it is ours.
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


def is_sharding_sequences(accelerator: Any) -> bool:
    """Return whether context or sequence parallelism cuts rows."""
    parallelism = accelerator.parallelism_config
    return parallelism is not None and (parallelism.cp_enabled or parallelism.sp_enabled)


def check_parallelism(
    args: SFTConfig,
    options: PackingOptions,
    *,
    packs: bool,
    shards_sequences: bool,
    balances_experts: bool,
    pad_to_multiple_of: int | None,
) -> None:
    """Raise ValueError for settings that documents in one row, or unequal ranks, cannot serve.

    Args:
        args: the settings of the run.
        options: the settings of packing.
        packs: whether packed or padding-free rows were requested.
        shards_sequences: whether context or sequence parallelism cuts rows.
        balances_experts: whether the loss has a term for the balance of experts.
        pad_to_multiple_of: of rows.
    """
    if shards_sequences and packs:
        raise ValueError(
            "Packing is not compatible with context parallelism (`cp_size > 1`) or sequence "
            "parallelism: sharding a row drops the boundaries between its documents. Set "
            "`packing=False` and `padding_free=False` for padded rows, or disable it."
        )
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


def check_nothing_is_weighted(datasets: Iterable[Any], options: PackingOptions) -> None:
    """Raise ValueError for weights where context or sequence parallelism cuts rows."""
    columns = {column for dataset in datasets for column in columns_of(dataset)}
    for column in WEIGHT_COLUMNS:
        if column in columns:
            raise ValueError(
                f"{column} are not applied under context or sequence parallelism; disable "
                f"it, or drop the column: dataset.remove_columns({column!r})"
            )
    check_loss_options(options, None, "context or sequence parallelism drops document boundaries")


def check_weights_and_sources(
    train_dataset: Any, eval_datasets: list[Any], options: PackingOptions, compute_loss_func: Any
) -> None:
    """Raise ValueError for weights that no loss can use, and for sources that are not there."""
    if compute_loss_func is not None:
        for dataset in [train_dataset, *eval_datasets]:
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
    if any(records_of(dataset) for dataset in datasets):
        raise ValueError(
            "skip_prepare_dataset=True skips the check that prepared data fit this run; leave it "
            "out (they are not prepared again)"
        )
    if completion_only is not None:
        raise ValueError(
            "skip_prepare_dataset=True skips the labels that DataCollatorForCompletionOnlyLM "
            "finds; leave it out (a tokenized data set is not tokenized again)"
        )
    if options.append_eos:
        raise ValueError(
            "skip_prepare_dataset=True skips append_eos=True; leave one of them out (a "
            "tokenized data set is not tokenized again)"
        )


def check_some_weights(datasets: Iterable[Any], compute_loss_func: Any) -> None:
    """Raise ValueError for a set whose weights are all 0: it would train or report nothing."""
    for dataset in datasets:
        if isinstance(dataset, Dataset) and has_weights(dataset):
            check_some_weight(documents_of(dataset, compute_loss_func))


def generation_config_of(model: Any, args: Any) -> Any:
    """Return the generation config of `model`, a model or its name; None without one."""
    if not isinstance(model, str):
        return getattr(model, "generation_config", None)
    revision = (getattr(args, "model_init_kwargs", None) or {}).get("revision") or "main"
    try:
        return GenerationConfig.from_pretrained(model, revision=revision)
    except (OSError, ValueError):  # there is none, or TRL will report what is wrong with the name
        return None
