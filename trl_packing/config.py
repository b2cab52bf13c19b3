"""`PackedSFTConfig`: TRL's `SFTConfig` with packing on, plus the settings that packing adds."""

import re
import warnings
from dataclasses import dataclass, field, fields
from numbers import Integral, Real
from typing import Any

from trl import SFTConfig

from trl_packing.documents.weights import LOSS_WEIGHTINGS
from trl_packing.packing.bins import STRATEGIES, find_strategy
from trl_packing.packing.curriculum import LENGTH, ORDERS

OVERFLOWS = ("truncate", "truncate_prompt", "drop", "split", "overlap", "error")
PREFIX_SHARING = ("off", "bin", "group")
ISOLATION_CHECKS = ("error", "warn", "off")
TRAIN_ON = ("assistant", "last_assistant", "every_turn", "all")
MIXTURE_UNITS = ("documents", "tokens", "trained_tokens")


def _choice(default: Any, help: str, choices: tuple[str, ...]) -> Any:
    return field(default=default, metadata={"help": help, "choices": list(choices)})


@dataclass
class PackingOptions:
    """The settings that packing adds to those of TRL, each with its one default."""

    overflow: str | None = _choice(
        None,
        "Documents longer than max_length: 'truncate', 'truncate_prompt' (cut the prompt from the "
        "left, keep the completion whole), 'drop', 'split', 'overlap' (split into pieces that "
        "begin with the last tokens of the one before) or 'error'. Default: TRL's behavior, "
        "'truncate', or 'split' with packing_strategy='bfd_split'.",
        OVERFLOWS,
    )
    overlap_tokens: int | None = field(
        default=None,
        metadata={
            "help": "With overflow='overlap': tokens that a piece repeats of the one before it, as "
            "context that is not trained again. Default: an eighth of max_length."
        },
    )
    train_on: str | None = _choice(
        None,
        "Trained messages of a conversation: 'assistant' (all of its turns), 'last_assistant', "
        "'every_turn' (all of its turns, each a document of its own, as at inference: for models "
        "that think) or 'all'. 'train' (true, false) and 'weight' of a message take precedence. "
        "Works with any chat template. Default: TRL's behavior, by completion_only_loss and "
        "assistant_only_loss; 'assistant' if messages have 'train' or 'weight'.",
        TRAIN_ON,
    )
    response_template: str | None = field(
        default=None,
        metadata={
            "help": "Train the text after this template, e.g. '### Answer:', in plain text or in a "
            "rendered conversation; for a tokenized data set, it may be a list of token ids."
        },
    )
    instruction_template: str | None = field(
        default=None,
        metadata={
            "help": "With response_template: train every answer, up to the next instruction, "
            "instead of the text after the last response_template."
        },
    )
    prompt_template: str | None = field(
        default=None,
        metadata={
            "help": "Make prompts from raw fields: 'alpaca', 'qa', a file, or text with columns in "
            "braces, 'Question: {question}\\nAnswer: '. {query} is the column of query_field."
        },
    )
    query_field: str = field(
        default="query", metadata={"help": "With prompt_template: the column of the question."}
    )
    response_field: str = field(
        default="response", metadata={"help": "With prompt_template: the column of the answer."}
    )
    append_eos: bool = field(
        default=False,
        metadata={
            "help": "Append the tokenizer's EOS, trained, to documents that are trained to their "
            "end but do not end in a stop token (tokenized data, templates without one)."
        },
    )
    documents_per_step: int | None = field(
        default=None,
        metadata={
            "help": "Use exactly this many documents in every optimizer step, over all ranks and "
            "accumulated micro-batches (the last step of an epoch may be smaller), divided into "
            "micro-batches of equal cost. Default: the documents in the bins of a step; with "
            "packing=False, those of a padded run."
        },
    )
    loss_weighting: str = _choice(
        "token",
        "Weight of a token in the loss of an optimizer step: 'token' (all tokens equal), "
        "'document' (all documents equal: the mean of the documents' means) or 'sqrt' (divided by "
        "the square root of its document's trained tokens). The columns loss_weight (per document) "
        "and loss_weights (per token) multiply it.",
        LOSS_WEIGHTINGS,
    )
    source_column: str | None = field(
        default=None,
        metadata={
            "help": "A column of the data sets, e.g. 'source': evaluation also reports "
            "eval_loss_<source> and eval_num_documents_<source> for each of its values. If the "
            "training set has it, the training log has loss_<source> and the documents and tokens "
            "of each."
        },
    )
    mixture: dict[str, Any] | str | None = field(
        default=None,
        metadata={
            "help": "How much of each source an epoch draws, by the names of a train_dataset that "
            "is a dictionary, or by the values of source_column: {'math': {'weight': 3}, 'chat': "
            "{'weight': 1}} or {'math': {'epochs': 2}, 'chat': {'epochs': 0.5}}. Sources with a "
            "weight share what they hold together, in mixture_unit; the others are drawn once. "
            "Nothing is copied."
        },
    )
    mixture_unit: str = _choice(
        "documents",
        "With weights in mixture, or mixture_temperature: count shares in 'documents', 'tokens' or "
        "'trained_tokens'.",
        MIXTURE_UNITS,
    )
    mixture_temperature: float | None = field(
        default=None,
        metadata={
            "help": "Draw each source with a share of the epoch in proportion to size^(1/T), in "
            "mixture_unit: 1 draws every document once, larger values draw small sources more "
            "often. Instead of weights."
        },
    )
    curriculum: str | None = field(
        default=None,
        metadata={
            "help": "Order the documents of an epoch by their tokens ('length'), or by a column of "
            "numbers, in up to 64 stages; each stage is drawn at random. Default: no order."
        },
    )
    curriculum_order: str = _choice(
        "ascending",
        "With curriculum: 'ascending' begins with the smallest numbers, 'descending' with the "
        "largest.",
        ORDERS,
    )
    static_shapes: bool = field(
        default=False,
        metadata={
            "help": "Keep the shape of packed micro-batches constant, for torch_compile: "
            "per_device_train_batch_size × max_length tokens, filled with masked documents, and "
            "equally many boundaries. Needs packing=True. Losses and gradients stay the same."
        },
    )
    max_patches: int | None = field(
        default=None,
        metadata={
            "help": "With images: most patches of the vision tower in a bin, beside the tokens of "
            "max_length, so that no micro-batch needs much more memory than others. Default: the "
            "fewest to which bins can be limited with at most one percent more of them."
        },
    )
    prefix_sharing: str = _choice(
        "off",
        "Compute tokens with which documents of a micro-batch begin alike (a system prompt, many "
        "answers to a question) once: 'off', 'bin' (no document moves, no step changes) or 'group' "
        "(bins and steps are made of groups of documents with a long common prefix). "
        "Losses and gradients of a step stay those of its documents. Models that cannot share "
        "train as with 'off'.",
        PREFIX_SHARING,
    )
    prefix_group_size: int = field(
        default=8,
        metadata={
            "help": "With prefix_sharing='group': most documents of a group. Larger groups compute "
            "less, smaller ones bring more different prefixes into a step."
        },
    )
    attention: str = field(
        default="auto",
        metadata={
            "help": "Attention backend that keeps documents apart: 'auto', or one of "
            "'flash_attention_2' (3, 4), 'varlen', 'documents', 'model'. A named backend that "
            "cannot be exact raises an error."
        },
    )
    isolation_check: str = _choice(
        "error",
        "Check on this model, before the first step, that no document affects another: 'error' "
        "stops if one does, 'warn' continues, 'off' skips the check.",
        ISOLATION_CHECKS,
    )

    run_page: bool = field(
        default=True,
        metadata={
            "help": "Write run.html (curves, report, settings) and run.json into output_dir while "
            "training. Nothing that is trained depends on it."
        },
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
        order = None if self.curriculum == LENGTH else self.curriculum
        return [name for name in (self.source_column, order) if name is not None]


@dataclass
class PackedSFTConfig(PackingOptions, SFTConfig):
    """Configuration of `PackedSFTTrainer`; every field of `trl.SFTConfig` keeps its meaning.

    Raises:
        ValueError: a value is not among the choices, or ``packing=True`` without a `max_length`.
    """

    # Fields that transformers reads as JSON on a command line.
    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "mixture"]  # noqa: RUF012

    packing: bool = field(  # a bool once `__post_init__` has run
        default=None,  # type: ignore[assignment]
        metadata={
            "help": "Pack documents into bins of max_length tokens. False: padding-free, with the "
            "documents of a padded run in every optimizer step. Default: True, but False if "
            "max_length is None."
        },
    )
    packing_strategy: str = _choice(
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
        if args.greater_is_better is None and _names_a_loss(args.metric_for_best_model):
            args.greater_is_better = False
        with warnings.catch_warnings():
            # TRL 1.16 always sets it, by a name that transformers 5.23 has deprecated.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            super().__post_init__()
        check_options(self)


def _names_a_loss(metric: str | None) -> bool:
    """Whether `metric` is a perplexity, or the loss of a source, so that smaller is better.

    transformers 5.23 recognizes only names that end in "loss". By other losses, it would keep the
    worst model.
    """
    return metric is not None and re.search(r"(^|_)(perplexity$|loss_)", metric) is not None


def check_options(args: Any) -> None:
    """Raise ValueError for the first setting of `args` that is not possible, with the way out.

    A plain `SFTConfig` does not check its settings for packing, so the trainer calls this for it.
    """
    options = PackingOptions.of(args)
    _check_types(args)
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
    _check_supervision(args, options)
    _check_static_shapes(args, options)
    _check_groups(args, options)
    _check_mixture(args, options)
    _check_overlap(args, options)
    _check_curriculum(args, options)
    _check_patches(args, options)
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


def _check_static_shapes(args: Any, options: PackingOptions) -> None:
    if not options.static_shapes:
        return
    if not args.packing:
        raise ValueError(
            "static_shapes=True needs packing=True: without packing, the number of tokens differs "
            "from step to step; set packing=True, or leave static_shapes out"
        )
    if options.documents_per_step is not None:
        raise ValueError(
            f"static_shapes=True and documents_per_step={options.documents_per_step}: documents "
            "differ in length, so micro-batches would too; leave one of them out"
        )
    if options.prefix_sharing not in ("off", PackingOptions.prefix_sharing):
        raise ValueError(
            f"static_shapes=True and prefix_sharing={options.prefix_sharing!r}: rows with shared "
            "prefixes differ in length; leave one of them out"
        )
    if options.attention in ("padded", "equal_lengths"):
        raise ValueError(
            f"static_shapes=True with attention={options.attention!r} would have no effect: the "
            "shapes of padded rows depend on the documents; leave one of them out"
        )


def _check_groups(args: Any, options: PackingOptions) -> None:
    size, mode = options.prefix_group_size, options.prefix_sharing
    if mode != "group":
        if size != PackingOptions.prefix_group_size:
            raise ValueError(
                f"prefix_group_size={size} has no effect with prefix_sharing={mode!r}; set "
                "prefix_sharing='group', or leave prefix_group_size out"
            )
        return
    if size < 2:
        raise ValueError(
            f"prefix_group_size={size} must be at least 2; to share only what lies in one bin "
            "anyway, set prefix_sharing='bin'"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        raise ValueError(
            f"prefix_sharing='group' with packing_strategy={args.packing_strategy!r}: pieces are "
            "cut where rows end, in the order of the data set, which groups would change; set "
            "prefix_sharing='bin', or another packing_strategy"
        )


def _check_mixture(args: Any, options: PackingOptions) -> None:
    temperature: Any = options.mixture_temperature
    mixture: Any = options.mixture
    if mixture is None and temperature is None:
        if options.mixture_unit != PackingOptions.mixture_unit:
            raise ValueError(
                f"mixture_unit={options.mixture_unit!r} has no effect without mixture and "
                "mixture_temperature; set one of them, or leave mixture_unit out"
            )
        return
    if mixture is not None:
        _check_shares(mixture)
        weighted = [name for name, share in mixture.items() if "weight" in share]
        if temperature is not None and weighted:
            raise ValueError(
                f"mixture_temperature={temperature} and a weight of {weighted[0]!r} in mixture "
                "both say how often sources are drawn; leave one of them out"
            )
    if temperature is not None and not (_is_number(temperature) and temperature > 0):
        raise ValueError(f"mixture_temperature={temperature!r} must be above 0, or None")
    name = "mixture" if mixture is not None else "mixture_temperature"
    if args.train_sampling_strategy == "sequential":
        raise ValueError(
            f"{name} draws documents at random, and train_sampling_strategy='sequential' keeps "
            "their order; leave one of them out"
        )
    if options.prefix_sharing == "group":
        raise ValueError(
            f"{name} draws single documents, and prefix_sharing='group' groups of them; set "
            f"prefix_sharing='bin', or leave {name} out"
        )
    if options.curriculum is not None:
        raise ValueError(
            f"{name} draws documents at random, and curriculum={options.curriculum!r} orders them; "
            "leave one of them out"
        )
    if not find_strategy(args.packing_strategy).shuffles:
        raise ValueError(
            f"{name} with packing_strategy={args.packing_strategy!r}: pieces are cut where rows "
            "end, in the order of the data set, which a mixture changes; set another "
            "packing_strategy"
        )


def _check_shares(mixture: Any) -> None:
    """Raise ValueError unless `mixture` names shares of sources."""
    example = "{'math': {'weight': 3}, 'chat': {'epochs': 0.5}}"
    if not isinstance(mixture, dict) or not mixture:
        raise ValueError(f"mixture={mixture!r} must name sources, as in {example}")
    for source, share in mixture.items():
        if not (isinstance(share, dict) and len(share) == 1 and {*share} <= {"weight", "epochs"}):
            raise ValueError(
                f"mixture[{source!r}]={share!r} must have a 'weight' or 'epochs', as in {example}"
            )
        ((kind, value),) = share.items()
        if not (_is_number(value) and 0 <= value < float("inf")):
            raise ValueError(f"{kind}={value!r} of {source!r} in mixture must be a number from 0")


def _is_number(value: Any) -> bool:
    return isinstance(value, Real) and not isinstance(value, bool)


def _check_overlap(args: Any, options: PackingOptions) -> None:
    overlap, capacity = options.overlap_tokens, args.max_length
    if options.overflow != "overlap":
        if overlap is not None:
            raise ValueError(
                f"overlap_tokens={overlap} has no effect with overflow={options.overflow!r}; set "
                "overflow='overlap', or leave overlap_tokens out"
            )
        return
    if capacity is None:
        raise ValueError(
            "overflow='overlap' with max_length=None: no document is too long; set max_length, or "
            "leave overflow out"
        )
    if args.packing and find_strategy(args.packing_strategy).overflow == "wrapped":
        raise ValueError(
            f"overflow='overlap' with packing_strategy={args.packing_strategy!r}: its pieces are "
            "cut where rows end, and do not overlap; leave one of them out"
        )
    if overlap is not None and not 1 <= overlap <= capacity // 2:
        raise ValueError(
            f"overlap_tokens={overlap} must be at least 1 and at most half of max_length="
            f"{capacity}: with more, most tokens would be computed more than twice"
        )


def _check_curriculum(args: Any, options: PackingOptions) -> None:
    curriculum, default = options.curriculum, PackingOptions.curriculum_order
    if curriculum is None:
        if options.curriculum_order != default:
            raise ValueError(
                f"curriculum_order={options.curriculum_order!r} has no effect without curriculum; "
                "set curriculum='length' or a column, or leave curriculum_order out"
            )
        return
    others: dict[str, tuple[Any, Any]] = {
        "prefix_sharing": (options.prefix_sharing, ("group",)),
        "train_sampling_strategy": (
            str(args.train_sampling_strategy),
            ("sequential", "group_by_length"),
        ),
    }
    if args.packing:
        others["packing_strategy"] = args.packing_strategy, ("wrapped",)
    for name, (value, refused) in others.items():
        if value in refused:
            raise ValueError(
                f"curriculum={curriculum!r} and {name}={value!r} both say which documents come "
                "together; leave one of them out"
            )


def _check_patches(args: Any, options: PackingOptions) -> None:
    most, per_step = options.max_patches, options.documents_per_step
    if most is None:
        return
    if most < 1:
        raise ValueError(f"max_patches={most} must be at least 1, or None")
    other = f"documents_per_step={per_step}" if per_step is not None else "packing=False"
    if not args.packing or per_step is not None:
        raise ValueError(
            f"max_patches={most} limits bins, and {other} makes none; leave max_patches out, and "
            "raise gradient_accumulation_steps for smaller micro-batches"
        )


def _check_supervision(args: Any, options: PackingOptions) -> None:
    if options.train_on and args.assistant_only_loss:
        raise ValueError(
            f"train_on={options.train_on!r} and assistant_only_loss=True both say what is trained; "
            "leave assistant_only_loss out"
        )
    if options.instruction_template is not None and options.response_template is None:
        raise ValueError("instruction_template needs response_template: set both, or neither")
    if options.response_template is not None and (options.train_on or args.assistant_only_loss):
        other = f"train_on={options.train_on!r}" if options.train_on else "assistant_only_loss=True"
        raise ValueError(f"response_template and {other} both say what is trained; set one of them")
