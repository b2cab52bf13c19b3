"""The settings of a run: those that packing adds to TRL's, and what is refused.

`PackingOptions` holds each with its one default and its help; docs/settings.md explains them.
`check_options` refuses values of other types, outside of choices and ranges, and settings that
exclude or need each other. Checks that need the data or the model are elsewhere.
"""

import json
import math
import os
import re
import warnings
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
import torch
from transformers import TrainingArguments
from transformers.utils import is_torch_xla_available
from trl import SFTConfig

from trl_packing.documents.weights import LOSS_WEIGHTINGS
from trl_packing.packing.bins import STRATEGIES
from trl_packing.packing.draw import LENGTH

OVERFLOWS = ("truncate", "truncate_prompt", "drop", "split", "overlap", "error")
PREFIX_SHARING = ("off", "bin", "group")
ISOLATION_CHECKS = ("error", "warn", "off")
TRAIN_ON = ("assistant", "last_assistant", "every_turn", "all")
MIXTURE_UNITS = ("documents", "tokens", "trained_tokens")


def setting(default: Any, help: str, choices: tuple[str, ...] | None = None) -> Any:
    """Return a field of a configuration, which may take one of `choices` only."""
    listed = {} if choices is None else {"choices": list(choices)}
    return field(default=default, metadata={"help": help, **listed})


@dataclass
class PackingOptions:
    """The settings that packing adds to those of TRL, each with its one default."""

    overflow: str | None = setting(
        None,
        "Documents longer than max_length. 'overlap' splits, and each piece repeats the end of the "
        "one before. Default: 'truncate', or 'split' with packing_strategy='bfd_split'.",
        OVERFLOWS,
    )
    train_on: str | None = setting(
        None,
        "Trained messages; 'every_turn' makes each turn a document, as at inference. Default: by "
        "TRL's settings, or 'assistant' if messages have 'train' or 'weight'.",
        TRAIN_ON,
    )
    response_template: list[int] | str | None = setting(  # noqa: RUF009
        None, "Train the text after this template, '### Answer:'; of tokenized data, its ids."
    )
    instruction_template: list[int] | str | None = setting(  # noqa: RUF009
        None, "With response_template: train every answer, up to the next instruction."
    )
    prompt_template: str | None = setting(
        None,
        "Make prompts from raw fields: 'alpaca', 'qa', a file, or text with columns in braces, "
        "'Question: {question}\\nAnswer: '. {query} is query, instruction or question.",
    )
    append_eos: bool = setting(False, "Append a trained EOS to documents without a stop token.")
    documents_per_step: int | None = setting(
        None, "Documents in an optimizer step, of all ranks. Default: of its bins, or as if padded."
    )
    max_tokens_per_micro_batch: int | None = setting(
        None, "Divide micro-batches with more tokens into several forwards of the same step."
    )
    max_tokens_in_memory: int | None = setting(
        None, "The same, and longer documents run in chunks of so many tokens (docs/long.md)."
    )
    loss_weighting: str = setting(
        "token",
        "Weight of a token in a step: every token equal, every 'document' equal, or in between "
        "('sqrt'). Columns loss_weight and loss_weights multiply it.",
        LOSS_WEIGHTINGS,
    )
    source_column: str | None = setting(None, "A column: losses are also reported for its values.")
    mixture: dict[str, Any] | str | None = setting(  # noqa: RUF009
        None,
        "The share of each source: {'math': {'weight': 3}, 'chat': {'epochs': 0.5}}. Sources are "
        "the names in a train_dataset that is a dictionary, or the values of source_column.",
    )
    mixture_unit: str = setting("documents", "The unit of weights in mixture.", MIXTURE_UNITS)
    curriculum: str | None = setting(
        None,
        "Order documents by 'length' or a column of numbers, in stages; '-length': descending.",
    )
    static_shapes: bool = setting(False, "Keep the shape of rows constant, for torch_compile.")
    max_patches: int | None = setting(None, "With images: most patches in a bin.")
    prefix_sharing: str = setting(
        "off",
        "Compute tokens with which documents of a micro-batch begin alike once; 'group' also "
        "plans bins by them. Losses stay those of the documents.",
        PREFIX_SHARING,
    )
    prefix_group_size: int = setting(8, "With prefix_sharing='group': most documents of a group.")
    attention: str = setting(
        "auto",
        "What keeps documents apart: 'auto', 'flash_attention_2' (3, 4), 'varlen', 'documents' or "
        "'model'. A named one that is not exact raises an error.",
    )
    sequence_parallel_size: int = setting(
        1, "Ranks that share each row, for rows that are too long for one (docs/long.md)."
    )
    isolation_check: str = setting(
        "error", "If a document affects another on this model; 'off': no check.", ISOLATION_CHECKS
    )
    run_page: bool = setting(True, "Write run.html and run.json into output_dir.")

    @staticmethod
    def of(args: Any) -> "PackingOptions":
        """Return the options that `args` has now; defaults for those that a plain config lacks."""
        ours: Any = fields(PackingOptions)
        return PackingOptions(**{f.name: getattr(args, f.name, f.default) for f in ours})

    @property
    def tokens_per_forward(self) -> int | None:
        """Most tokens of a forward in training; None: a micro-batch is one, whatever its size."""
        return self.max_tokens_per_micro_batch or self.max_tokens_in_memory

    def named_columns(self) -> list[str]:
        """Return the columns of a data set that settings name, with a value for each document."""
        order = self.curriculum and self.curriculum.removeprefix("-")
        named = (self.source_column, None if order == LENGTH else order)
        return [name for name in named if name is not None]


@dataclass
class PackedSFTConfig(PackingOptions, SFTConfig):
    """Configuration of `PackedSFTTrainer`; every field of `trl.SFTConfig` keeps its meaning.

    Raises:
        ValueError: a value is not among the choices, or ``packing=True`` without a `max_length`.
    """

    # Fields that transformers reads as JSON on a command line.
    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "mixture"]  # noqa: RUF012

    logging_nan_inf_filter: bool = setting(
        False, "Leave losses that are NaN or infinite out of the logged mean, as TRL does."
    )
    packing: bool = setting(  # a bool once `__post_init__` has run
        None, "Pack documents into bins of max_length tokens. Default: True if max_length is set."
    )
    packing_strategy: str = setting(
        "bfd",
        "'bfd' (best-fit decreasing), 'bfd_split' (the same, with overflow='split'), 'next_fit', "
        "'greedy' (sorted, sequential), 'wrapped' (documents end to end, cut at max_length).",
        tuple(STRATEGIES),
    )

    def __post_init__(self) -> None:
        args: Any = self  # its fields are TRL's
        self._packing_is_default = self.packing is None
        if self.packing is None:
            self.packing = self.max_length is not None
        check_types(self)
        check_device(self)
        self._leaves_bf16_out = args.bf16 is None and not args.fp16 and _is_float32_better(args)
        if self._leaves_bf16_out:
            self.bf16 = False
        # transformers 5.23 recognizes only names that end in "loss". By the loss of a source, or a
        # perplexity, it would keep the worst model.
        is_loss = re.search(r"(^|_)(perplexity$|loss_)", str(args.metric_for_best_model))
        if args.greater_is_better is None and is_loss:
            args.greater_is_better = False
        with warnings.catch_warnings():
            # TRL 1.16 always sets it, by a name that transformers 5.23 has deprecated.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            try:
                super().__post_init__()
            except json.JSONDecodeError as error:  # transformers does not name the setting
                raise ValueError(f"{error.doc!r} is given to a setting, and is no JSON") from error
        check_options(self)


def _is_float32_better(args: Any) -> bool:
    """Return whether a run is on a CPU where bf16 is slow or refused, and nobody asked for it."""
    given = os.environ.get("ACCELERATE_MIXED_PRECISION", "no")
    has_device = torch.accelerator.is_available() or is_torch_xla_available()
    if given != "no" or (has_device and not args.use_cpu):
        return False
    if not args.use_cpu:
        return True  # transformers refuses bf16 there
    # torch 2.10 has no such function; float32 is then right on any CPU.
    capabilities: Any = getattr(torch.cpu, "get_capabilities", dict)()
    return not capabilities.get("amx_bf16")


# Smallest values; transformers does not check its own.
_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "documents_per_step": 1,
    "max_tokens_per_micro_batch": 1,
    "max_tokens_in_memory": 1,
    "sequence_parallel_size": 1,
    "max_length": 1,
    "pad_to_multiple_of": 1,
    "max_patches": 1,
    "seed": 0,
    "data_seed": 0,
    "prefix_group_size": 2,
}


_ANY: tuple[Any, ...] = ()
_WRAPPED = ("wrapped",)
_SHARES = ("bin", "group")

# Settings, or one value of them, and the values of others that are refused beside them.
_EXCLUDED: dict[tuple[str, ...], dict[str, tuple[Any, ...]]] = {
    ("train_on",): {"assistant_only_loss": (True,)},
    ("response_template",): {"train_on": _ANY, "assistant_only_loss": (True,)},
    ("static_shapes",): {
        "packing": (False,),
        "documents_per_step": _ANY,
        "prefix_sharing": _SHARES,
        "attention": ("padded", "equal_lengths"),
    },
    ("max_tokens_per_micro_batch",): {"prefix_sharing": _SHARES, "static_shapes": (True,)},
    ("max_tokens_in_memory",): {
        "max_tokens_per_micro_batch": _ANY,
        "sequence_parallel_size": _ANY,
        "prefix_sharing": _SHARES,
        "static_shapes": (True,),
        "neftune_noise_alpha": _ANY,
        "torch_compile": (True,),
    },
    ("sequence_parallel_size",): {
        "prefix_sharing": _SHARES,
        "neftune_noise_alpha": _ANY,
        "torch_compile": (True,),
        "attention": ("model", "mask", "by_document", "padded", "equal_lengths"),
    },
    ("pad_to_multiple_of",): {"prefix_sharing": _SHARES},
    ("max_patches",): {"packing": (False,), "documents_per_step": _ANY},
    ("curriculum",): {
        "packing_strategy": _WRAPPED,
        "prefix_sharing": ("group",),
        "train_sampling_strategy": ("sequential", "group_by_length"),
    },
    ("mixture",): {
        "packing_strategy": _WRAPPED,
        "prefix_sharing": ("group",),
        "train_sampling_strategy": ("sequential",),
        "curriculum": _ANY,
    },
    ("prefix_sharing", "group"): {
        "packing": (False,),
        "documents_per_step": _ANY,
        "packing_strategy": _WRAPPED,
    },
    ("overflow", "overlap"): {"packing_strategy": _WRAPPED},
}


def is_launched_on_gpus() -> bool:
    """Whether `accelerate launch` started several processes, one a GPU; torchrun says nothing."""
    is_launched = {"ACCELERATE_MIXED_PRECISION", "LOCAL_RANK"} <= os.environ.keys()
    return is_launched and "ACCELERATE_USE_CPU" not in os.environ


def check_device(args: Any) -> None:
    """Raise ValueError for a run that is launched on GPUs where torch finds none."""
    is_served = getattr(args, "use_cpu", False) or torch.accelerator.is_available()
    if is_launched_on_gpus() and not is_served:
        raise ValueError(
            "accelerate launched this run on GPUs (--multi_gpu, or distributed_type of its config),"
            " but torch finds none; run `trl-packing doctor` on this machine, or set use_cpu=True "
            "(--use_cpu true) to train on CPUs"
        )


def check_options(args: Any) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out."""
    options = PackingOptions.of(args)
    check_types(args)
    for option in fields(PackedSFTConfig):
        name = option.name
        value = getattr(args, name, None)
        is_ours = hasattr(options, name) or name == "packing_strategy"
        known = option.metadata.get("choices") if is_ours else None
        if known and value not in (None, *known):
            raise ValueError(f"{name}={value!r} is unknown; choose one of {known}")
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if isinstance(value, Integral) and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if (args.packing or args.eval_packing) and args.max_length is None:
        raise ValueError(
            "When packing is enabled, `max_length` can't be `None`; set it, or packing=False and "
            "eval_packing=False"
        )
    _check_exclusions(args, options)
    _check_mixture(options.mixture)
    number = options.documents_per_step
    if args.auto_find_batch_size and number and options.max_tokens_per_micro_batch is None:
        raise ValueError(
            f"auto_find_batch_size=True changes nothing beside documents_per_step={number}; set "
            "max_tokens_per_micro_batch, which it halves, or leave one of them out"
        )
    if options.instruction_template is not None and options.response_template is None:
        raise ValueError("instruction_template has no effect without response_template")


def _check_exclusions(args: Any, options: PackingOptions) -> None:
    values = vars(args) | vars(options)
    values["train_sampling_strategy"] = str(values.get("train_sampling_strategy"))
    if not args.packing:
        values["packing_strategy"] = None
    if options.sequence_parallel_size == 1:
        values["sequence_parallel_size"] = None
    for (name, *own), excluded in _EXCLUDED.items():
        one = values[name]
        if one in (None, False) or (own and one not in own):
            continue
        for other, others in excluded.items():
            two = values.get(other)
            if two is not None and (not others or two in others):
                raise ValueError(
                    f"{name}={one!r} and {other}={two!r} exclude each other; leave one of them out"
                )


def _check_mixture(mixture: Any) -> None:
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    if mixture is not None and not (isinstance(mixture, dict) and mixture):
        raise ValueError(f"mixture={mixture!r} must name sources, as in {example}")
    for source, share in (mixture or {}).items():
        is_share = isinstance(share, dict) and {*share} in ({"weight"}, {"epochs"})
        if not is_share or not all(_is(n, float) and 0 <= n < math.inf for n in share.values()):
            raise ValueError(
                f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs' from 0, as in "
                f"{example}"
            )


_WORDS: dict[Any, str] = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list[int]: "a list of token ids",
    NoneType: "None",
}
_CLASSES: dict[Any, Any] = {int: Integral, float: Real, str: (str, os.PathLike), NoneType: NoneType}


def check_types(args: Any) -> None:
    """Raise ValueError for the first setting whose value is not of the type of its field."""
    for name, kinds in _types().items():
        value: Any = getattr(args, name, None)
        if hasattr(args, name) and not any(_is(value, kind) for kind in kinds):
            words = [word for kind, word in _WORDS.items() if kind in kinds]
            raise ValueError(f"{name}={value!r} must be {' or '.join(words)}")


@cache
def _types() -> dict[str, tuple[Any, ...]]:
    """Return the types of each setting that takes only those of `_WORDS`.

    Texts of transformers are left to it: they often take more than they say.
    """
    hints = get_type_hints(SFTConfig) | get_type_hints(PackingOptions)
    inherited = {field.name for field in fields(TrainingArguments)}
    found = {}
    for name, hint in hints.items():
        kinds = get_args(hint) or (hint,)
        if {*kinds} <= {*_WORDS} and not (str in kinds and name in inherited):
            found[name] = kinds
    return found


def _is(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, (bool, np.bool_, int)) and value in (0, 1)
    if kind == list[int]:
        return isinstance(value, (list, tuple)) and all(_is(token, int) for token in value)
    is_nan = isinstance(value, Real) and math.isnan(value)
    return isinstance(value, _CLASSES[kind]) and not (isinstance(value, bool) or is_nan)
