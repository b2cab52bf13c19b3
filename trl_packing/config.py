"""The settings of a run: those that packing adds to TRL's, and what is refused.

    settings    `PackingOptions`, each with its one default and its help
    types       of every setting, ours and inherited, from the fields of the configurations
    ranges      choices and smallest values
    conflicts   settings that need another one, or exclude it

Every check raises an error that names the setting, its value and the way out. Checks that need the
data or the model are elsewhere.
"""

import json
import math
import os
import re
import warnings
from collections.abc import Iterator
from dataclasses import dataclass, field, fields
from functools import cache
from numbers import Integral, Real
from types import NoneType
from typing import Any, get_args, get_type_hints

import numpy as np
from transformers import TrainingArguments
from trl import SFTConfig

from trl_packing.documents.weights import LOSS_WEIGHTINGS
from trl_packing.packing.bins import STRATEGIES
from trl_packing.packing.draw import LENGTH, column_of

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
        "Documents longer than max_length: 'truncate', 'truncate_prompt' (cut the prompt from the "
        "left), 'drop', 'split', 'overlap' (split, each piece beginning with the last tokens of "
        "the one before) or 'error'. Default: 'truncate', as in TRL, or 'split' with "
        "packing_strategy='bfd_split'.",
        OVERFLOWS,
    )
    train_on: str | None = setting(
        None,
        "Trained messages of a conversation: 'assistant' (all of its turns), 'last_assistant', "
        "'every_turn' (each turn a document of its own, as at inference: for reasoning models) or "
        "'all'; 'train' and 'weight' of a message take precedence. Default: TRL's behavior, by "
        "completion_only_loss and assistant_only_loss; 'assistant' if messages have 'train' or "
        "'weight'.",
        TRAIN_ON,
    )
    response_template: str | None = setting(
        None,
        "Train the text after this template, e.g. '### Answer:', in plain text or in a rendered "
        "conversation; for a tokenized data set, it may be a list of token ids.",
    )
    instruction_template: str | None = setting(
        None,
        "With response_template: train every answer, up to the next instruction, instead of the "
        "text after the last response_template.",
    )
    prompt_template: str | None = setting(
        None,
        "Make prompts from raw fields: 'alpaca', 'qa', a file, or text with columns in braces, "
        "'Question: {question}\\nAnswer: '. {query} is the column query, instruction or question; "
        "the answer is the column response, output, answer or completion.",
    )
    append_eos: bool = setting(
        False,
        "Append the tokenizer's EOS, trained, to documents that are trained to their end but do "
        "not end in a stop token (tokenized data, templates without one).",
    )
    documents_per_step: int | None = setting(
        None,
        "Use exactly this many documents in every optimizer step (the last of an epoch may be "
        "smaller), over all ranks and micro-batches, which get equal costs. Default: the documents "
        "in the bins of a step; with packing=False, those of a padded run.",
    )
    loss_weighting: str = setting(
        "token",
        "Weight of a token in the loss of an optimizer step: 'token' (all tokens equal), "
        "'document' (all documents equal) or 'sqrt' (divided by the square root of its document's "
        "trained tokens). The columns loss_weight (per document) and loss_weights (per token) "
        "multiply it.",
        LOSS_WEIGHTINGS,
    )
    source_column: str | None = setting(
        None,
        "A column of the data sets, e.g. 'source': evaluation also reports eval_loss_<source> and "
        "eval_num_documents_<source> for each of its values. If the training set has it, so does "
        "the training log, with the documents and tokens of each.",
    )
    mixture: dict[str, Any] | str | None = setting(  # noqa: RUF009
        None,
        "The share of each source in an epoch: {'math': {'weight': 3}, 'chat': {'epochs': 0.5}}. "
        "Sources are the names of a train_dataset that is a dictionary, or the values of "
        "source_column. Those with a weight divide what they hold together, in mixture_unit; the "
        "others are drawn once. Nothing is copied.",
    )
    mixture_unit: str = setting(
        "documents",
        "With weights in mixture: count shares in 'documents', 'tokens' or 'trained_tokens'.",
        MIXTURE_UNITS,
    )
    curriculum: str | None = setting(
        None,
        "Order the documents of an epoch by their tokens ('length'), or by a column of numbers, in "
        "up to 64 stages, each drawn at random. The smallest numbers come first, with a minus "
        "before the name ('-length') the largest. Default: no order.",
    )
    static_shapes: bool = setting(
        False,
        "Keep the shape of packed micro-batches constant, for torch_compile: rows are filled with "
        "masked documents up to per_device_train_batch_size × max_length tokens. Losses and "
        "gradients stay the same.",
    )
    max_patches: int | None = setting(
        None,
        "With images: most patches of the vision tower in a bin, beside the tokens of max_length, "
        "so that no micro-batch needs much more memory than others. Default: no limit.",
    )
    prefix_sharing: str = setting(
        "off",
        "Compute tokens with which documents of a micro-batch begin alike (a system prompt, many "
        "answers to a question) once: 'off', 'bin' (no step changes) or 'group' (bins and steps "
        "are made of groups with a long common prefix). Losses and gradients stay those of the "
        "documents; models that cannot share train as with 'off'.",
        PREFIX_SHARING,
    )
    prefix_group_size: int = setting(
        8,
        "With prefix_sharing='group': most documents of a group. Larger groups compute less, "
        "smaller ones bring more different prefixes into a step.",
    )
    attention: str = setting(
        "auto",
        "Attention backend that keeps documents apart: 'auto', or one of 'flash_attention_2' "
        "(3, 4), 'varlen', 'documents', 'model'. A named one that is not exact raises an error.",
    )
    isolation_check: str = setting(
        "error",
        "Check on this model, before the first step, that no document affects another: 'error' "
        "stops if one does, 'warn' continues, 'off' skips the check.",
        ISOLATION_CHECKS,
    )
    run_page: bool = setting(
        True,
        "Write run.html (curves, report, settings) and run.json into output_dir while training. "
        "Nothing that is trained depends on it.",
    )

    @staticmethod
    def of(args: Any) -> "PackingOptions":
        """Return the options that `args` has now; defaults for those that a plain config lacks."""
        ours: dict[str, Any] = {f.name: f.default for f in fields(PackingOptions)}
        return PackingOptions(**{name: getattr(args, name, ours[name]) for name in ours})

    def named_columns(self) -> list[str]:
        """Return the columns of a data set that settings name, with a value for each document."""
        order = self.curriculum and column_of(self.curriculum)
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
        False,
        "Leave losses that are NaN or infinite out of the logged mean. TRL's default is True, "
        "which hides them, and makes every micro-batch wait for the device.",
    )
    packing: bool = setting(  # a bool once `__post_init__` has run
        None,
        "Pack documents into bins of max_length tokens. False: padding-free, with the documents of "
        "a padded run in every optimizer step. Default: True, but False if max_length is None.",
    )
    packing_strategy: str = setting(
        "bfd",
        "Packing strategy: 'bfd' (best-fit decreasing over the whole data set), 'bfd_split' (the "
        "same, with overflow='split'), 'next_fit', 'greedy' (sorted, sequential), 'wrapped' "
        "(documents end to end, cut at max_length; the pieces stay isolated).",
        tuple(STRATEGIES),
    )

    def __post_init__(self) -> None:
        args: Any = self  # its fields are TRL's
        self._packing_is_default = self.packing is None
        if self.packing is None:
            self.packing = self.max_length is not None
        check_types(self)
        # transformers 5.23 recognizes only names that end in "loss". By the loss of a source, or a
        # perplexity, it would keep the worst model.
        is_loss = re.search(r"(^|_)(perplexity$|loss_)", str(args.metric_for_best_model))
        if args.greater_is_better is None and is_loss:
            args.greater_is_better = False
        try:
            with warnings.catch_warnings():
                # TRL 1.16 always sets it, by a name that transformers 5.23 has deprecated.
                warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
                super().__post_init__()
        except json.JSONDecodeError as error:  # transformers does not name the setting
            wrong = next(n for n in self._VALID_DICT_FIELDS if getattr(self, n) == error.doc)
            raise ValueError(f"{wrong}={error.doc!r} is not JSON ({error})") from error
        check_options(self, is_final=False)


def check_options(args: Any, *, is_final: bool = True) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out.

    A plain `SFTConfig` does not check its settings for packing, so the trainer calls this for it.

    Args:
        args: the settings.
        is_final: whether all settings are known, so that one may have no effect beside the others.
    """
    options = PackingOptions.of(args)
    check_types(args)
    for option in fields(PackedSFTConfig):
        known = option.metadata.get("choices")
        is_ours = hasattr(options, option.name) or option.name == "packing_strategy"
        value = getattr(args, option.name, option.default)
        if is_ours and known and value not in (known if option.default else [None, *known]):
            raise ValueError(f"{option.name}={value!r} is unknown; choose one of {known}")
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if isinstance(value, Integral) and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    without_effect = [_without_effect] * is_final
    for check in (_wrong_lengths, _clashes, _wrong_mixtures, *without_effect):
        for is_wrong, sentence in check(args, options):
            if is_wrong:
                raise ValueError(sentence)


# --- types ----------------------------------------------------------------------------------------

_WORDS = {
    bool: "True or False",
    int: "a whole number",
    float: "a number",
    str: "a text",
    list: "a list of token ids",
    NoneType: "None",
}
_CLASSES: dict[Any, Any] = {int: Integral, float: Real, str: (str, os.PathLike), NoneType: NoneType}


def check_types(args: Any) -> None:
    """Raise ValueError for the first setting whose value is not of the type of its field.

    Fields that also take dictionaries, lists or names of enumerations are left to transformers, and
    so are its texts, which often take more than they say.
    """
    for name, kinds in _types().items():
        value: Any = getattr(args, name, None)
        if hasattr(args, name) and not any(_is(value, kind) for kind in kinds):
            words = [word for kind, word in _WORDS.items() if kind in kinds]
            raise ValueError(f"{name}={value!r} must be {' or '.join(words)}")


@cache
def _types() -> dict[str, tuple[type, ...]]:
    """Return the types of each setting that takes numbers, texts, True and False only."""
    hints = get_type_hints(SFTConfig) | get_type_hints(PackingOptions)
    inherited = {field.name for field in fields(TrainingArguments)}
    kinds = {name: get_args(hint) or (hint,) for name, hint in hints.items()}
    simple = {n: of for n, of in kinds.items() if {*of} <= {*_WORDS} - {list}}
    found = {n: of for n, of in simple.items() if not (str in of and n in inherited)}
    templates = ("response_template", "instruction_template")
    return found | {name: (*found[name], list) for name in templates}


def _is(value: Any, kind: Any) -> bool:
    if kind is bool:
        return isinstance(value, (bool, np.bool_, int)) and value in (0, 1)
    if kind is list:
        return isinstance(value, (list, tuple)) and all(_is(token, int) for token in value)
    is_nan = isinstance(value, Real) and math.isnan(value)
    return isinstance(value, _CLASSES[kind]) and not (isinstance(value, bool) or is_nan)


# --- ranges and conflicts -------------------------------------------------------------------------

_FROM_ONE = (
    *("per_device_train_batch_size", "gradient_accumulation_steps", "documents_per_step"),
    *("max_length", "pad_to_multiple_of", "max_patches"),
)
# transformers does not check its own.
_LEAST = dict.fromkeys(_FROM_ONE, 1) | {"seed": 0, "data_seed": 0, "prefix_group_size": 2}
_MOST_TOKENS = 2**31 - 1

# Settings that do nothing without one of these others; None stands for any value.
_NEEDS: dict[str, dict[str, str | None]] = {
    "prefix_group_size": {"prefix_sharing": "group"},
    "instruction_template": {"response_template": None},
    "mixture_unit": {"mixture": None},
}
_TRAINED = "both say what is trained"
_DRAWN = "a mixture draws single documents at random"
_TOGETHER = "both say which documents come together"
_CUT = "pieces are cut where rows end, in the order of the data set"
_NO_BINS = "max_patches limits bins, and there are none"
# Two settings that are not possible together, and why. Values are named where some are possible.
_CLASHES: tuple[tuple[str, tuple[Any, ...], str, tuple[Any, ...], str], ...] = (
    ("train_on", (), "assistant_only_loss", (True,), _TRAINED),
    ("response_template", (), "train_on", (), _TRAINED),
    ("response_template", (), "assistant_only_loss", (True,), _TRAINED),
    ("static_shapes", (True,), "packing", (False,), "steps then differ in their tokens"),
    ("static_shapes", (True,), "documents_per_step", (), "documents differ in length"),
    ("static_shapes", (True,), "prefix_sharing", ("bin", "group"), "shared rows differ in length"),
    ("static_shapes", (True,), "attention", ("padded", "equal_lengths"), "rows are padded anyway"),
    ("prefix_sharing", ("group",), "packing_strategy", ("wrapped",), _CUT),
    ("overflow", ("overlap",), "packing_strategy", ("wrapped",), _CUT),
    ("curriculum", (), "prefix_sharing", ("group",), _TOGETHER),
    ("curriculum", (), "train_sampling_strategy", ("sequential", "group_by_length"), _TOGETHER),
    ("curriculum", (), "packing_strategy", ("wrapped",), _TOGETHER),
    ("max_patches", (), "documents_per_step", (), _NO_BINS),
    ("max_patches", (), "packing", (False,), _NO_BINS),
    ("mixture", (), "train_sampling_strategy", ("sequential",), _DRAWN),
    ("mixture", (), "prefix_sharing", ("group",), _DRAWN),
    ("mixture", (), "curriculum", (), _DRAWN),
    ("mixture", (), "packing_strategy", ("wrapped",), _DRAWN),
)

# Whether a setting is wrong, and the sentence that says so.
Checks = Iterator[tuple[Any, str]]


def _wrong_lengths(args: Any, options: PackingOptions) -> Checks:
    capacity, packs = args.max_length, args.packing or args.eval_packing
    yield (
        packs and capacity is None,
        "When packing is enabled, `max_length` can't be `None`: it is the capacity of a bin. Set "
        "max_length, or packing=False and eval_packing=False.",
    )
    yield (
        packs and capacity > _MOST_TOKENS,
        f"max_length={capacity} must be at most {_MOST_TOKENS}, because kernels count the tokens "
        "of a row in 32 bits; lower it",
    )


def _without_effect(args: Any, options: PackingOptions) -> Checks:
    for name, others in _NEEDS.items():
        value, found = getattr(options, name), [getattr(options, other) for other in others]
        pairs = zip(found, others.values(), strict=True)
        is_met = any(now is not None and needed in (None, now) for now, needed in pairs)
        needs = " or ".join(
            n if needed is None else f"{n}={needed!r}" for n, needed in others.items()
        )
        yield (
            value != getattr(PackingOptions, name) and not is_met,
            f"{name}={value!r} has no effect without {needs}; set it, or leave {name} out",
        )


def _clashes(args: Any, options: PackingOptions) -> Checks:
    def value_of(name: str) -> Any:
        if name == "packing_strategy" and not args.packing:
            return None
        value = getattr(options, name, getattr(args, name, None))
        return str(value) if name == "train_sampling_strategy" else value

    for name, values, other, others, why in _CLASHES:
        one, two = value_of(name), value_of(other)
        yield (
            (one in values if values else one is not None)
            and (two in others if others else two is not None),
            f"{name}={one!r} and {other}={two!r}: {why}; leave one of them out",
        )


def _wrong_mixtures(args: Any, options: PackingOptions) -> Checks:
    mixture = options.mixture
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    yield (
        mixture is not None and not (isinstance(mixture, dict) and mixture),
        f"mixture={mixture!r} must name sources, as in {example}",
    )
    for source, share in mixture.items() if isinstance(mixture, dict) else ():
        is_share = isinstance(share, dict) and {*share} in ({"weight"}, {"epochs"})
        yield (
            not is_share or not all(_is(n, float) and 0 <= n < math.inf for n in share.values()),
            f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs' from 0, as in "
            f"{example}",
        )
