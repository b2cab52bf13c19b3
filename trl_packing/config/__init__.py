"""The settings of a run: those that packing adds to TRL's, and what is refused.

Belongs here: settings, their defaults and help, and combinations that are not possible. Does not:
checks that need the data or the model.

Read `options.py` first.
"""

from trl_packing.config.checks import check_mixture_unit, check_options
from trl_packing.config.options import (
    ISOLATION_CHECKS,
    MIXTURE_UNITS,
    PREFIX_SHARING,
    TRAIN_ON,
    PackingOptions,
)
from trl_packing.config.sft_config import PackedSFTConfig

__all__ = [
    "ISOLATION_CHECKS",
    "MIXTURE_UNITS",
    "PREFIX_SHARING",
    "TRAIN_ON",
    "PackedSFTConfig",
    "PackingOptions",
    "check_mixture_unit",
    "check_options",
]
