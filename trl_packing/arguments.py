"""What the arguments of `SFTTrainer` mean to `PackedSFTTrainer`, checked before anything is built.

data_collator of your own, images, with_transform    TRL's path, untouched
DataCollatorForCompletionOnlyLM                      ours: it says which tokens are trained
formatting_func                                      for one example, or for a batch as it once was
packing, padding_free, eval_packing                  ours; hidden from TRL's constructor
packing_strategy, overflow, truncation_mode          one overflow policy
split_batches, dispatch_batches                      refused by name on several processes
"""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

from datasets import Dataset, IterableDataset
from transformers import GenerationConfig
from trl import SFTConfig
from trl.chat_template_utils import supports_tool_calling
from trl.data_utils import get_dataset_column_names

from trl_packing.collator import PackedCollator
from trl_packing.config import PackedSFTConfig, PackingOptions, check_options
from trl_packing.legacy_collator import DataCollatorForCompletionOnlyLM
from trl_packing.pieces import Overflow
from trl_packing.prompt_templates import PromptTemplate
from trl_packing.supervision import Supervision, says_what_is_trained
from trl_packing.templates import Templates
from trl_packing.turns import ChatTemplate

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
        overflow_of(args, args.packing)
    # One process has nobody to share batches with: there the trainer turns both off.
    if isinstance(train_dataset, Dataset) and getattr(args, "world_size", 1) > 1:
        for name in ("split_batches", "dispatch_batches"):
            if getattr(getattr(args, "accelerator_config", None), name, None):
                raise ValueError(
                    f"accelerator_config.{name}=True cannot divide packed micro-batches, whose "
                    f"documents differ in number; leave {name} unset: ranks get their own bins"
                )
    if isinstance(train_dataset, (Dataset, IterableDataset)):
        check_not_empty(train_dataset, "train")


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


def check_not_empty(dataset: Dataset | IterableDataset, name: str) -> None:
    """Raise ValueError if `dataset` has no rows."""
    is_map_style = isinstance(dataset, Dataset)
    if (len(dataset) == 0) if is_map_style else (next(iter(dataset), None) is None):
        raise ValueError(f"the {name} dataset is empty: it has no rows; check how it was loaded")


def formatting_of_one(
    formatting_func: Callable[[Any], Any] | None, dataset: Dataset | IterableDataset
) -> Callable[[Any], Any] | None:
    """Return `formatting_func` as TRL calls it now: one example in, one text out.

    Once TRL called it with a batch: lists in, a list of texts out. The first example tells which.
    """
    if formatting_func is None or isinstance(_tried(formatting_func, next(iter(dataset))), str):
        return formatting_func
    texts = _tried(formatting_func, _batch_of_one(next(iter(dataset))))
    if isinstance(texts, list) and all(isinstance(text, str) for text in texts):
        return partial(_format_one, formatting_func)
    return formatting_func  # TRL's own call says what is wrong with it


def _tried(formatting_func: Callable[[Any], Any], example: Any) -> Any:
    """Return what the function makes of `example`, or None if it fails: it may take batches."""
    try:
        return formatting_func(example)
    except Exception:
        return None


def _batch_of_one(example: dict[str, Any]) -> dict[str, list[Any]]:
    return {name: [value] for name, value in example.items()}


def _format_one(formatting_func: Callable[[Any], Any], example: dict[str, Any]) -> str:
    texts = formatting_func(_batch_of_one(example))
    if len(texts) != 1:
        raise ValueError(
            f"formatting_func made {len(texts)} texts of one example; it must make one of each "
            "(map the data set before, to make more or fewer)"
        )
    return texts[0]


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
    # With another policy documents are not TRL's anyway.
    as_padded = not packing and policy in ("truncate", "truncate_start")
    return Overflow(policy, args.max_length, drops_as_padded=as_padded)


def supervision_of(
    args: SFTConfig,
    tokenizer: Any,
    first: dict[str, Any],
    *,
    chat_template: str | None,
    completion_only: bool,
    formatting_func: Callable[[Any], str] | None = None,
) -> Supervision:
    """Return what `args` say about which tokens of rows like `first` are trained.

    chat_template, completion_only: what TRL has made of `args` and the training set.
    Raises ValueError for templates that are empty or cannot be read.
    """
    options = PackingOptions.of(args)
    answers = prompt_template = None
    if options.response_template is not None:
        answers = Templates.of(tokenizer, options.response_template, options.instruction_template)
    if options.prompt_template is not None:
        prompt_template = PromptTemplate.of(options.prompt_template, options.query_field)
        completion_only = args.completion_only_loss is not False
    train_on = options.train_on
    if train_on is None and isinstance(args, PackedSFTConfig) and says_what_is_trained(first):
        train_on = "assistant"
    return Supervision(
        ChatTemplate(tokenizer, chat_template),
        tokenizer.eos_token,
        text_field=args.dataset_text_field,
        completion_only=completion_only,
        assistant_only=args.assistant_only_loss,
        train_on=train_on,
        answers=answers,
        prompt_template=prompt_template,
        response_field=options.response_field,
        formatting_func=formatting_func,
        calls_tools=_calls_tools(tokenizer),
    )


def _calls_tools(tokenizer: Any) -> bool:
    """Return whether the chat template renders tool calls."""
    try:
        return bool(tokenizer.chat_template) and supports_tool_calling(tokenizer)
    except Exception:  # a template raises what its author likes, and rows will say so
        return False
