"""The settings of a run: those that packing adds to TRL's, and what is refused.

    settings    `PackingOptions`, each with its one default and its help
    types       of every setting, ours and inherited, from the fields of the configurations
    ranges      choices and smallest values
    conflicts   settings that are not possible together

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

_MOST_TOKENS = 2**31 - 1


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
        "left, keep the completion whole), 'drop', 'split', 'overlap' (split into pieces that "
        "begin with the last tokens of the one before) or 'error'. Default: TRL's behavior, "
        "'truncate', or 'split' with packing_strategy='bfd_split'.",
        OVERFLOWS,
    )
    overlap_tokens: int | None = setting(
        None,
        "With overflow='overlap': tokens that a piece repeats of the one before it, as "
        "context that is not trained again. Default: an eighth of max_length.",
    )
    train_on: str | None = setting(
        None,
        "Trained messages of a conversation: 'assistant' (all of its turns), 'last_assistant', "
        "'every_turn' (all of its turns, each a document of its own, as at inference: for "
        "reasoning models) or 'all'. 'train' and 'weight' of a message take precedence. "
        "Works with any chat template. Default: TRL's behavior, by completion_only_loss and "
        "assistant_only_loss; 'assistant' if messages have 'train' or 'weight'.",
        TRAIN_ON,
    )
    response_template: str | None = setting(
        None,
        "Train the text after this template, e.g. '### Answer:', in plain text or in a "
        "rendered conversation; for a tokenized data set, it may be a list of token ids.",
    )
    instruction_template: str | None = setting(
        None,
        "With response_template: train every answer, up to the next instruction, "
        "instead of the text after the last response_template.",
    )
    prompt_template: str | None = setting(
        None,
        "Make prompts from raw fields: 'alpaca', 'qa', a file, or text with columns in "
        "braces, 'Question: {question}\\nAnswer: '. {query} is the column query, instruction "
        "or question; the answer is the column response, output, answer or completion.",
    )
    append_eos: bool = setting(
        False,
        "Append the tokenizer's EOS, trained, to documents that are trained to their "
        "end but do not end in a stop token (tokenized data, templates without one).",
    )
    documents_per_step: int | None = setting(
        None,
        "Use exactly this many documents in every optimizer step, over all ranks and "
        "accumulated micro-batches (the last step of an epoch may be smaller), divided into "
        "micro-batches of equal cost. Default: the documents in the bins of a step; with "
        "packing=False, those of a padded run.",
    )
    loss_weighting: str = setting(
        "token",
        "Weight of a token in the loss of an optimizer step: 'token' (all tokens equal), "
        "'document' (all documents equal: the mean of the documents' means) or 'sqrt' (divided by "
        "the square root of its document's trained tokens). The columns loss_weight (per document) "
        "and loss_weights (per token) multiply it.",
        LOSS_WEIGHTINGS,
    )
    source_column: str | None = setting(
        None,
        "A column of the data sets, e.g. 'source': evaluation also reports "
        "eval_loss_<source> and eval_num_documents_<source> for each of its values. If the "
        "training set has it, the training log has loss_<source> and the documents and tokens "
        "of each.",
    )
    mixture: dict[str, Any] | str | None = setting(  # noqa: RUF009
        None,
        "The share of each source in an epoch: {'math': {'weight': 3}, 'chat': "
        "{'weight': 1}} or {'math': {'epochs': 2}, 'chat': {'epochs': 0.5}}. Sources are the "
        "names of a train_dataset that is a dictionary, or the values of source_column. "
        "Those with a weight divide what they hold together, in mixture_unit; the others are "
        "drawn once. Nothing is copied.",
    )
    mixture_unit: str = setting(
        "documents",
        "With weights in mixture, or mixture_temperature: count shares in 'documents', 'tokens' or "
        "'trained_tokens'.",
        MIXTURE_UNITS,
    )
    mixture_temperature: float | None = setting(
        None,
        "Draw each source with a share of the epoch in proportion to size^(1/T), in "
        "mixture_unit: 1 draws every document once, larger values draw small sources more "
        "often. Instead of weights.",
    )
    curriculum: str | None = setting(
        None,
        "Order the documents of an epoch by their tokens ('length'), or by a column of "
        "numbers, in up to 64 stages; each stage is drawn at random. The smallest numbers come "
        "first, with a minus before the name ('-length') the largest. Default: no order.",
    )
    static_shapes: bool = setting(
        False,
        "Keep the shape of packed micro-batches constant, for torch_compile: "
        "per_device_train_batch_size × max_length tokens, filled with masked documents, and "
        "equally many boundaries. Needs packing=True. Losses and gradients stay the same.",
    )
    max_patches: int | None = setting(
        None,
        "With images: most patches of the vision tower in a bin, beside the tokens of "
        "max_length, so that no micro-batch needs much more memory than others. Default: no "
        "limit.",
    )
    prefix_sharing: str = setting(
        "off",
        "Compute tokens with which documents of a micro-batch begin alike (a system prompt, many "
        "answers to a question) once: 'off', 'bin' (no document moves, no step changes) or 'group' "
        "(bins and steps are made of groups of documents with a long common prefix). "
        "Losses and gradients of a step stay those of its documents. Models that cannot share "
        "train as with 'off'.",
        PREFIX_SHARING,
    )
    prefix_group_size: int = setting(
        8,
        "With prefix_sharing='group': most documents of a group. Larger groups compute "
        "less, smaller ones bring more different prefixes into a step.",
    )
    attention: str = setting(
        "auto",
        "Attention backend that keeps documents apart: 'auto', or one of "
        "'flash_attention_2' (3, 4), 'varlen', 'documents', 'model'. A named backend that "
        "cannot be exact raises an error.",
    )
    isolation_check: str = setting(
        "error",
        "Check on this model, before the first step, that no document affects another: 'error' "
        "stops if one does, 'warn' continues, 'off' skips the check.",
        ISOLATION_CHECKS,
    )
    run_page: bool = setting(
        True,
        "Write run.html (curves, report, settings) and run.json into output_dir while "
        "training. Nothing that is trained depends on it.",
    )

    @staticmethod
    def of(args: Any) -> "PackingOptions":
        """Return the options that `args` has now; defaults for those that a plain config lacks."""
        given: dict[str, Any] = {
            option.name: getattr(args, option.name, option.default)
            for option in fields(PackingOptions)
        }
        return PackingOptions(**given)

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
        "Leave losses that are NaN or infinite out of the logged mean. TRL's default "
        "is True, which hides them, and makes every micro-batch wait for the device.",
    )
    packing: bool = setting(  # a bool once `__post_init__` has run
        None,
        "Pack documents into bins of max_length tokens. False: padding-free, with the "
        "documents of a padded run in every optimizer step. Default: True, but False if "
        "max_length is None.",
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
        metric = args.metric_for_best_model
        if args.greater_is_better is None and isinstance(metric, str):
            args.greater_is_better = (
                False if re.search(r"(^|_)(perplexity$|loss_)", metric) else None
            )
        for name in self._VALID_DICT_FIELDS:
            value = getattr(self, name)
            if isinstance(value, str) and value.startswith("{"):
                try:
                    json.loads(value)
                except ValueError as error:  # transformers would not name the setting
                    raise ValueError(f"{name}={value!r} is not JSON ({error})") from error
        with warnings.catch_warnings():
            # TRL 1.16 always sets it, by a name that transformers 5.23 has deprecated.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            super().__post_init__()
        check_options(self)


def check_options(args: Any) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out.

    A plain `SFTConfig` does not check its settings for packing, so the trainer calls this for it.
    """
    options = PackingOptions.of(args)
    check_types(args)
    choices: dict[str, tuple[Any, ...]] = {"packing_strategy": tuple(STRATEGIES)}
    for option in fields(PackingOptions):
        if "choices" in option.metadata:
            none = () if option.default is not None else (None,)
            choices[option.name] = (*none, *option.metadata["choices"])
    for name, known in choices.items():
        value = getattr(options, name, args.packing_strategy)
        if value not in known:
            raise ValueError(f"{name}={value!r} is unknown; choose one of {known}")
    for name, least in _LEAST.items():
        value = getattr(args, name, None)
        if isinstance(value, Integral) and value < least:
            raise ValueError(f"{name}={value} must be at least {least}")
    for check in (_wrong_values, _clashes, _wrong_mixtures):
        for is_wrong, sentence in check(args, options):
            if is_wrong:
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
        if not hasattr(args, name) or any(_is(value, kind) for kind in kinds):
            continue
        words = [word for kind, word in _WORDS.items() if kind in kinds]
        if name in _TEMPLATES:
            if isinstance(value, (list, tuple)) and all(_is(token, int) for token in value):
                continue
            words.append("a list of token ids")
        or_none = ", or None" if NoneType in kinds else ""
        raise ValueError(f"{name}={value!r} must be {' or '.join(words)}{or_none}")


@cache
def _types() -> dict[str, tuple[type, ...]]:
    """Return the types of each setting that takes numbers, texts, True and False only."""
    hints = get_type_hints(SFTConfig) | get_type_hints(PackingOptions)
    inherited = {field.name for field in fields(TrainingArguments)}
    found = {}
    for option in (*fields(SFTConfig), *fields(PackingOptions)):
        kinds = get_args(hints[option.name]) or (hints[option.name],)
        if {*kinds} <= {*_WORDS, NoneType} and not (str in kinds and option.name in inherited):
            found[option.name] = kinds
    return found


def _is(value: Any, kind: type) -> bool:
    if kind is bool:
        return isinstance(value, (bool, np.bool_)) or (type(value) is int and value in (0, 1))
    if kind is str:
        return isinstance(value, (str, os.PathLike))
    if kind is int:
        return isinstance(value, Integral) and not isinstance(value, bool)
    if kind is float:
        return isinstance(value, Real) and not isinstance(value, bool) and not math.isnan(value)
    return value is None


# --- ranges and conflicts -------------------------------------------------------------------------

_LEAST = {  # transformers does not check its own
    "per_device_train_batch_size": 1,
    "gradient_accumulation_steps": 1,
    "seed": 0,
    "data_seed": 0,
    "documents_per_step": 1,
    "pad_to_multiple_of": 1,
    "max_patches": 1,
}

# Whether a setting is wrong, and the sentence that says so.
Checks = Iterator[tuple[Any, str]]


def _wrong_values(args: Any, options: PackingOptions) -> Checks:
    multiple, capacity = args.pad_to_multiple_of, args.max_length
    packs = args.packing or args.eval_packing
    yield (  # TRL reads its texts while it makes a config
        isinstance(multiple, str),
        f"pad_to_multiple_of={multiple!r} must be a whole number, or None",
    )
    yield (
        math.isinf(args.num_train_epochs),
        f"num_train_epochs={args.num_train_epochs} has no end; set max_steps",
    )
    yield (
        capacity is not None and capacity <= 0,
        f"max_length={capacity} must be positive, or None without packing",
    )
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

    groups, size = options.prefix_sharing == "group", options.prefix_group_size
    yield (
        not groups and size != PackingOptions.prefix_group_size,
        f"prefix_group_size={size} has no effect with prefix_sharing={options.prefix_sharing!r}; "
        "set prefix_sharing='group', or leave prefix_group_size out",
    )
    yield (
        groups and size < 2,
        f"prefix_group_size={size} must be at least 2; to share only what lies in one bin anyway, "
        "set prefix_sharing='bin'",
    )
    overlaps, overlap = options.overflow == "overlap", options.overlap_tokens
    yield (
        not overlaps and overlap is not None,
        f"overlap_tokens={overlap} has no effect with overflow={options.overflow!r}; set "
        "overflow='overlap', or leave overlap_tokens out",
    )
    yield (
        overlaps and capacity is None,
        "overflow='overlap' with max_length=None: no document is too long; leave overflow out",
    )
    yield (
        overlaps and overlap is not None and not 1 <= overlap <= capacity // 2,
        f"overlap_tokens={overlap} must be at least 1 and at most half of max_length={capacity}: "
        "with more, most tokens would be computed more than twice",
    )
    yield (
        options.instruction_template is not None and options.response_template is None,
        "instruction_template needs response_template: set both, or neither",
    )


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
    *(
        (mixture, (), name, values, _DRAWN)
        for mixture in ("mixture", "mixture_temperature")
        for name, values in (
            ("train_sampling_strategy", ("sequential",)),
            ("prefix_sharing", ("group",)),
            ("curriculum", ()),
            ("packing_strategy", ("wrapped",)),
        )
    ),
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
    mixture: Any = options.mixture
    temperature = options.mixture_temperature
    if mixture is None and temperature is None:
        return
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    if mixture is not None:
        yield (
            not isinstance(mixture, dict) or not mixture,
            f"mixture={mixture!r} must name sources, as in {example}",
        )
        for source, share in mixture.items():
            is_share = isinstance(share, dict) and len(share) == 1
            yield (
                not (is_share and {*share} <= {"weight", "epochs"}),
                f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs', as in {example}",
            )
            ((kind, value),) = share.items()
            yield (
                not (_is(value, float) and 0 <= value < math.inf),
                f"{kind}={value!r} of {source!r} in mixture must be a number from 0",
            )
            yield (
                kind == "weight" and temperature is not None,
                f"mixture_temperature={temperature} and a weight of {source!r} in mixture both say "
                "how often sources are drawn; leave one of them out",
            )
    yield (
        temperature is not None and temperature <= 0,
        f"mixture_temperature={temperature!r} must be above 0, or None",
    )
