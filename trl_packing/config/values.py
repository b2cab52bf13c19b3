"""Settings that are wrong whatever the others are: values of another type, numbers out of range."""

from numbers import Integral
from typing import Any

from trl_packing.config.options import (
    ISOLATION_CHECKS,
    MIXTURE_UNITS,
    OVERFLOWS,
    PREFIX_SHARING,
    TRAIN_ON,
    PackingOptions,
)
from trl_packing.documents.weights import LOSS_WEIGHTINGS
from trl_packing.packing.bins import STRATEGIES
from trl_packing.packing.curriculum import ORDERS

_MOST_TOKENS = 2**31 - 1


def check_values(args: Any, options: PackingOptions) -> None:
    """Raise ValueError for the first value of `args` that no run can use, with the way out."""
    _check_types(args)
    _check_choices(args, options)
    _check_least(args)
    if options.documents_per_step is not None and options.documents_per_step < 1:
        raise ValueError(
            f"documents_per_step={options.documents_per_step} must be at least 1, or None"
        )
    if args.max_length is not None and args.max_length <= 0:
        raise ValueError(f"max_length={args.max_length} must be positive, or None without packing")
    if args.pad_to_multiple_of is not None and args.pad_to_multiple_of < 1:
        raise ValueError(
            f"pad_to_multiple_of={args.pad_to_multiple_of} must be at least 1, or None"
        )
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


_WHOLE, _YES_OR_NO, _TEXT = "a whole number", "True or False", "a text"
_TEMPLATE = "a text or a list of token ids"

# name -> (expected type, whether None is allowed)
_TYPES = {
    "max_length": (_WHOLE, True),
    "pad_to_multiple_of": (_WHOLE, True),
    "documents_per_step": (_WHOLE, True),
    "prefix_group_size": (_WHOLE, False),
    "overlap_tokens": (_WHOLE, True),
    "curriculum": (_TEXT, True),
    "max_patches": (_WHOLE, True),
    "packing": (_YES_OR_NO, False),
    "eval_packing": (_YES_OR_NO, True),
    "append_eos": (_YES_OR_NO, False),
    "static_shapes": (_YES_OR_NO, False),
    "run_page": (_YES_OR_NO, False),
    "response_template": (_TEMPLATE, True),
    "instruction_template": (_TEMPLATE, True),
    "prompt_template": (_TEXT, True),
    "source_column": (_TEXT, True),
    "query_field": (_TEXT, False),
    "response_field": (_TEXT, False),
    "attention": (_TEXT, False),
}


def _check_types(args: Any) -> None:
    """Raise ValueError for a value of a wrong type, as a YAML file or a shell may pass."""
    for name, (expected, optional) in _TYPES.items():
        value = getattr(args, name, getattr(PackingOptions, name, None))
        if not (value is None and optional) and not _is(value, expected):
            raise ValueError(f"{name}={value!r} must be {expected}" + ", or None" * optional)


def _is(value: Any, expected: str) -> bool:
    if expected == _YES_OR_NO:
        return isinstance(value, bool)
    if expected == _WHOLE:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if isinstance(value, str):
        return True
    ids = value if expected == _TEMPLATE and isinstance(value, (list, tuple)) else None
    return ids is not None and all(_is(token, _WHOLE) for token in ids)


def _check_choices(args: Any, options: PackingOptions) -> None:
    """Raise ValueError for a value that is none of its setting's choices."""
    choices = {
        "packing_strategy": (args.packing_strategy, tuple(STRATEGIES)),
        "overflow": (options.overflow, (None, *OVERFLOWS)),
        "isolation_check": (options.isolation_check, ISOLATION_CHECKS),
        "train_on": (options.train_on, (None, *TRAIN_ON)),
        "loss_weighting": (options.loss_weighting, LOSS_WEIGHTINGS),
        "prefix_sharing": (options.prefix_sharing, PREFIX_SHARING),
        "mixture_unit": (options.mixture_unit, MIXTURE_UNITS),
        "curriculum_order": (options.curriculum_order, ORDERS),
    }
    for name, (value, known) in choices.items():
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {known}")


# Numbers of transformers that it does not check itself.
_LEAST = {
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "data_seed": 0,
}


def _check_least(args: Any) -> None:
    """Raise ValueError for a number that is too small."""
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if isinstance(value, int) and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
