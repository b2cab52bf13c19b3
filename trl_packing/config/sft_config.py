"""`PackedSFTConfig`: TRL's `SFTConfig` with packing on, plus the settings that packing adds."""

import json
import re
import warnings
from dataclasses import dataclass, field
from typing import Any

from trl import SFTConfig

from trl_packing.config.checks import check_options, check_types
from trl_packing.config.options import PackingOptions, choice
from trl_packing.packing.bins import STRATEGIES


@dataclass
class PackedSFTConfig(PackingOptions, SFTConfig):
    """Configuration of `PackedSFTTrainer`; every field of `trl.SFTConfig` keeps its meaning.

    Raises:
        ValueError: a value is not among the choices, or ``packing=True`` without a `max_length`.
    """

    # Fields that transformers reads as JSON on a command line.
    _VALID_DICT_FIELDS = [*SFTConfig._VALID_DICT_FIELDS, "mixture"]  # noqa: RUF012

    logging_nan_inf_filter: bool = field(
        default=False,
        metadata={
            "help": "Leave losses that are NaN or infinite out of the logged mean. TRL's default "
            "is True, which hides them, and makes every micro-batch wait for the device."
        },
    )
    packing: bool = field(  # a bool once `__post_init__` has run
        default=None,  # type: ignore[assignment]
        metadata={
            "help": "Pack documents into bins of max_length tokens. False: padding-free, with the "
            "documents of a padded run in every optimizer step. Default: True, but False if "
            "max_length is None."
        },
    )
    packing_strategy: str = choice(
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
        if args.greater_is_better is None and _names_a_loss(args.metric_for_best_model):
            args.greater_is_better = False
        for name in self._VALID_DICT_FIELDS:
            _check_json(name, getattr(self, name))
        with warnings.catch_warnings():
            # TRL 1.16 always sets it, by a name that transformers 5.23 has deprecated.
            warnings.filterwarnings("ignore", "`gradient_checkpointing`", FutureWarning)
            super().__post_init__()
        check_options(self)


def _check_json(name: str, value: Any) -> None:
    """Raise ValueError for a JSON text that cannot be read; transformers would not name it."""
    if isinstance(value, str) and value.startswith("{"):
        try:
            json.loads(value)
        except ValueError as error:
            raise ValueError(f"{name}={value!r} is not JSON ({error})") from error


def _names_a_loss(metric: Any) -> bool:
    """Whether `metric` is a perplexity, or the loss of a source, so that smaller is better.

    transformers 5.23 recognizes only names that end in "loss". By other losses, it would keep the
    worst model.
    """
    return isinstance(metric, str) and bool(re.search(r"(^|_)(perplexity$|loss_)", metric))
