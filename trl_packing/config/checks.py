"""Settings that no run can use raise an error with the way out.

types       of every setting, ours and inherited, from the fields of the configurations
ranges      choices and smallest values
conflicts   settings that are not possible together
"""

import math
import os
from collections.abc import Iterator
from dataclasses import fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
from transformers import TrainingArguments
from trl import SFTConfig

from trl_packing.config.options import PackingOptions
from trl_packing.packing.bins import STRATEGIES, find_strategy

_MOST_TOKENS = 2**31 - 1


def check_options(args: Any) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out.

    A plain `SFTConfig` does not check its settings for packing, so the trainer calls this for it.
    """
    options = PackingOptions.of(args)
    check_types(args)
    if isinstance(args.pad_to_multiple_of, str):  # TRL reads its texts while it makes a config
        raise ValueError(
            f"pad_to_multiple_of={args.pad_to_multiple_of!r} must be a whole number, or None"
        )
    _check_choices(args, options)
    _check_ranges(args, options)
    for conflicts in (
        _conflicts_of_labels,
        _conflicts_of_shapes,
        _conflicts_of_groups,
        _conflicts_of_mixtures,
        _conflicts_of_overlap,
        _conflicts_of_curriculum,
        _conflicts_of_patches,
    ):
        for sentence in conflicts(args, options):
            raise ValueError(sentence)


def check_mixture_unit(options: PackingOptions) -> None:
    """Raise ValueError for a unit without a mixture, which may be set after the configuration."""
    is_mixed = options.mixture is not None or options.mixture_temperature is not None
    if options.mixture_unit != PackingOptions.mixture_unit and not is_mixed:
        raise ValueError(
            f"mixture_unit={options.mixture_unit!r} has no effect without mixture and "
            "mixture_temperature; set one of them, or leave mixture_unit out"
        )


# --- types ----------------------------------------------------------------------------------------

_WORDS = {bool: "True or False", int: "a whole number", float: "a number", str: "a text"}
_TEMPLATES = ("response_template", "instruction_template")


def check_types(args: Any) -> None:
    """Raise ValueError for the first setting whose value is not of the type of its field.

    Fields that also take dictionaries, lists or names of enumerations are left to transformers, and
    so are its texts, which often take more than they say.
    """
    for name, kinds in _types().items():
        value: Any = getattr(args, name, None)
        is_list = name in _TEMPLATES and isinstance(value, (list, tuple))
        if not hasattr(args, name) or any(_is(value, kind) for kind in kinds):
            continue
        if is_list and all(_is(token, int) for token in value):
            continue
        words = " or ".join(word for kind, word in _WORDS.items() if kind in kinds)
        words += " or a list of token ids" * (name in _TEMPLATES) + ", or None" * (
            NoneType in kinds
        )
        raise ValueError(f"{name}={value!r} must be {words}")


@cache
def _types() -> dict[str, tuple[type, ...]]:
    """Return the types of each setting that takes numbers, texts, True and False only."""
    hints = get_type_hints(SFTConfig) | get_type_hints(PackingOptions)
    inherited = {field.name for field in fields(TrainingArguments)}
    found = {}
    for field in (*fields(SFTConfig), *fields(PackingOptions)):
        kinds = get_args(hints[field.name]) or (hints[field.name],)
        if {*kinds} <= {*_WORDS, NoneType} and not (str in kinds and field.name in inherited):
            found[field.name] = kinds
    return found


def _is(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return _is_number(value) and not math.isnan(value)
    return value is None


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


# --- choices and ranges ---------------------------------------------------------------------------


def _check_choices(args: Any, options: PackingOptions) -> None:
    """Raise ValueError for a value that is none of its setting's choices."""
    choices = {"packing_strategy": (args.packing_strategy, tuple(STRATEGIES))}
    for field in fields(PackingOptions):
        if "choices" in field.metadata:
            known = (None,) * (field.default is None) + tuple(field.metadata["choices"])
            choices[field.name] = getattr(options, field.name), known
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {known}")


_LEAST = {  # transformers does not check its own
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "data_seed": 0,
    "documents_per_step": 1,
    "pad_to_multiple_of": 1,
    "max_patches": 1,
}


def _check_ranges(args: Any, options: PackingOptions) -> None:
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if isinstance(value, Integral) and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    if math.isinf(args.num_train_epochs):
        raise ValueError(f"num_train_epochs={args.num_train_epochs} has no end; set max_steps")
    if args.max_length is not None and args.max_length <= 0:
        raise ValueError(f"max_length={args.max_length} must be positive, or None without packing")
    if (args.packing or args.eval_packing) and args.max_length is None:
        raise ValueError(
            "When packing is enabled, `max_length` can't be `None`: it is the capacity of a bin. "
            "Set max_length, or packing=False and eval_packing=False."
        )
    if (args.packing or args.eval_packing) and args.max_length > _MOST_TOKENS:
        raise ValueError(
            f"max_length={args.max_length} must be at most {_MOST_TOKENS}, because kernels count "
            "the tokens of a row in 32 bits; lower it"
        )


# --- conflicts ------------------------------------------------------------------------------------


def _conflicts_of_labels(args: Any, options: PackingOptions) -> Iterator[str]:
    train_on, template = options.train_on, options.response_template
    if train_on and args.assistant_only_loss:
        yield (
            f"train_on={train_on!r} and assistant_only_loss=True both say what is trained; "
            "leave assistant_only_loss out"
        )
    if options.instruction_template is not None and template is None:
        yield "instruction_template needs response_template: set both, or neither"
    if template is not None and (train_on or args.assistant_only_loss):
        other = f"train_on={train_on!r}" if train_on else "assistant_only_loss=True"
        yield f"response_template and {other} both say what is trained; set one of them"


def _conflicts_of_shapes(args: Any, options: PackingOptions) -> Iterator[str]:
    if not options.static_shapes:
        return
    if not args.packing:
        yield (
            "static_shapes=True needs packing=True: without packing, the number of tokens differs "
            "from step to step; set packing=True, or leave static_shapes out"
        )
    if options.documents_per_step is not None:
        yield (
            f"static_shapes=True and documents_per_step={options.documents_per_step}: documents "
            "differ in length, so micro-batches would too; leave one of them out"
        )
    if options.prefix_sharing != "off":
        yield (
            f"static_shapes=True and prefix_sharing={options.prefix_sharing!r}: rows with shared "
            "prefixes differ in length; leave one of them out"
        )
    if options.attention in ("padded", "equal_lengths"):
        yield (
            f"static_shapes=True with attention={options.attention!r} would have no effect: the "
            "shapes of padded rows depend on the documents; leave one of them out"
        )


def _conflicts_of_groups(args: Any, options: PackingOptions) -> Iterator[str]:
    size, mode = options.prefix_group_size, options.prefix_sharing
    if mode != "group":
        if size != PackingOptions.prefix_group_size:
            yield (
                f"prefix_group_size={size} has no effect with prefix_sharing={mode!r}; set "
                "prefix_sharing='group', or leave prefix_group_size out"
            )
        return
    if size < 2:
        yield (
            f"prefix_group_size={size} must be at least 2; to share only what lies in one bin "
            "anyway, set prefix_sharing='bin'"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        yield (
            f"prefix_sharing='group' with packing_strategy={args.packing_strategy!r}: pieces are "
            "cut where rows end, in the order of the data set, which groups would change; set "
            "prefix_sharing='bin', or another packing_strategy"
        )


def _conflicts_of_mixtures(args: Any, options: PackingOptions) -> Iterator[str]:
    mixture: Any = options.mixture
    temperature = options.mixture_temperature
    if mixture is None and temperature is None:
        return
    if mixture is not None:
        yield from _wrong_shares(mixture)
        weighted = [name for name, share in mixture.items() if "weight" in share]
        if temperature is not None and weighted:
            yield (
                f"mixture_temperature={temperature} and a weight of {weighted[0]!r} in mixture "
                "both say how often sources are drawn; leave one of them out"
            )
    if temperature is not None and temperature <= 0:
        yield f"mixture_temperature={temperature!r} must be above 0, or None"
    name = "mixture" if mixture is not None else "mixture_temperature"
    if args.train_sampling_strategy == "sequential":
        yield (
            f"{name} draws documents at random, and train_sampling_strategy='sequential' keeps "
            "their order; leave one of them out"
        )
    if options.prefix_sharing == "group":
        yield (
            f"{name} draws single documents, and prefix_sharing='group' groups of them; set "
            f"prefix_sharing='bin', or leave {name} out"
        )
    if options.curriculum is not None:
        yield (
            f"{name} draws documents at random, and curriculum={options.curriculum!r} orders them; "
            "leave one of them out"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        yield (
            f"{name} with packing_strategy={args.packing_strategy!r}: pieces are cut where rows "
            "end, in the order of the data set, which a mixture changes; set another "
            "packing_strategy"
        )


def _wrong_shares(mixture: Any) -> Iterator[str]:
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    if not isinstance(mixture, dict) or not mixture:
        yield f"mixture={mixture!r} must name sources, as in {example}"
    for source, share in mixture.items():
        if not (isinstance(share, dict) and len(share) == 1 and {*share} <= {"weight", "epochs"}):
            yield f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs', as in {example}"
        ((kind, value),) = share.items()
        if not (_is_number(value) and 0 <= value < float("inf")):
            yield f"{kind}={value!r} of {source!r} in mixture must be a number from 0"


def _conflicts_of_overlap(args: Any, options: PackingOptions) -> Iterator[str]:
    overlap, capacity = options.overlap_tokens, args.max_length
    if options.overflow != "overlap":
        if overlap is not None:
            yield (
                f"overlap_tokens={overlap} has no effect with overflow={options.overflow!r}; set "
                "overflow='overlap', or leave overlap_tokens out"
            )
        return
    if capacity is None:
        yield (
            "overflow='overlap' with max_length=None: no document is too long; set max_length, or "
            "leave overflow out"
        )
    if args.packing and find_strategy(args.packing_strategy).overflow == "wrapped":
        yield (
            f"overflow='overlap' with packing_strategy={args.packing_strategy!r}: its pieces are "
            "cut where rows end, and do not overlap; leave one of them out"
        )
    if overlap is not None and not 1 <= overlap <= capacity // 2:
        yield (
            f"overlap_tokens={overlap} must be at least 1 and at most half of max_length="
            f"{capacity}: with more, most tokens would be computed more than twice"
        )


def _conflicts_of_curriculum(args: Any, options: PackingOptions) -> Iterator[str]:
    others = {
        "prefix_sharing": (options.prefix_sharing, ("group",)),
        "train_sampling_strategy": (
            str(args.train_sampling_strategy),
            ("sequential", "group_by_length"),
        ),
        "packing_strategy": (args.packing and args.packing_strategy, ("wrapped",)),
    }
    for name, (value, refused) in others.items():
        if options.curriculum is not None and value in refused:
            yield (
                f"curriculum={options.curriculum!r} and {name}={value!r} both say which documents "
                "come together; leave one of them out"
            )


def _conflicts_of_patches(args: Any, options: PackingOptions) -> Iterator[str]:
    per_step = options.documents_per_step
    if options.max_patches is not None and (per_step is not None or not args.packing):
        other = f"documents_per_step={per_step}" if per_step is not None else "packing=False"
        yield (
            f"max_patches={options.max_patches} limits bins, and {other} makes none; leave "
            "max_patches out, and raise gradient_accumulation_steps for smaller micro-batches"
        )
